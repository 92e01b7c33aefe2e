"""`python -m tests.faults [F-08 …] --seed 7 --count 20`: runs the named faults, or all, and prints one line for each.

`--count` is the number of times each fault happens (at each step, if it has steps); without it each fault has a default.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import traceback
from pathlib import Path

from tests.faults.policy import write_policy
from tests.faults.report import FaultReport, Skipped
from tests.faults.scene import Task
from tests.faults.suite import FAULTS

_COLUMNS = ("id", "fault", "requests", "faults", "lost", "duplicated", "wrong", "errors", "p99")
_COLUMNS += ("recovery p50, max", "max RSS MiB", "outcome")


def table(lines: list[FaultReport]) -> str:
    """The reports as a Markdown table."""
    rows = [_COLUMNS, ("---",) * len(_COLUMNS)]
    rows += [(line.id, line.what, *line.figures(), line.skipped or line.verdict) for line in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _try(id: str, task: Task) -> FaultReport:
    fault = FAULTS[id]
    what = (fault.__doc__ or "").split("\n")[0].partition(": ")[2].rstrip(".")
    try:
        return asyncio.run(fault(task))
    except Skipped as reason:
        return FaultReport(id, what, seed=task.seed, skipped=str(reason))
    except Exception as error:
        traceback.print_exc()
        return FaultReport(id, what, seed=task.seed, failures=[f"{type(error).__name__}: {error}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", nargs="*", metavar="F-01", help="which; all where none is named")
    parser.add_argument(
        "--seed", type=int, default=0, help="of payloads, and of when what happens; 0: another each time"
    )
    parser.add_argument("--count", type=int, help="how often each fault happens")
    parser.add_argument("--schedulers", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--policy", action="store_true", help="with an access policy; all clients show a key")
    parser.add_argument("--table", action="store_true", help="print a table in the end")
    parser.add_argument("--keep", type=Path, help="keep ledgers and logs in this new folder")
    options = parser.parse_args()
    if unknown := set(options.faults) - set(FAULTS):
        parser.error(f"no such fault: {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    lines: list[FaultReport] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        for id in options.faults or FAULTS:
            folder = (options.keep or Path(temporary)) / id
            folder.mkdir(parents=True)
            task = Task(
                seed=options.seed or random.SystemRandom().randrange(1, 1 << 31),
                folder=folder,
                count=options.count,
                schedulers=options.schedulers,
                workers=options.workers,
                gateways=options.gateways,
                policy=write_policy(folder) if options.policy else None,
            )
            lines.append(_try(id, task))
            print(lines[-1].text(), flush=True)
    if options.table:
        print(table(lines))
    return 0 if all(line.is_passed or line.skipped for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
