"""Runs the checks of `weir doctor` and prints the findings, as a table or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weir.commands.doctor.checks import Result, examine, has_problem
from weir.commands.doctor.probes import probe
from weir.commands.terminal import one_line, print_json

WIDTH = 100
"""Width in columns if the output is not a terminal."""

_STYLES = {"ok": "green", "note": "dim", "warning": "yellow", "problem": "bold red"}


def run(data_dir: Path | None, as_json: bool) -> int:
    """Check this machine and print the findings; returns the exit status: 1 if there is a problem, else 0."""
    results = examine(probe(data_dir))
    if as_json:
        print_json(to_dict(results))
    else:
        print_results(results)
    return int(has_problem(results))


def to_dict(results: list[Result]) -> dict[str, object]:
    """`{"state": ..., "checks": [{"name", "state", "finding", "remedy"}, ...]}`; `state` is the gravest of all."""
    return {"state": _gravest(results), "checks": [result._asdict() for result in results]}


def print_results(results: list[Result], console: Console | None = None) -> None:
    """Print a table: the name of the check, the state, the finding, and below it what to do."""
    chosen = console or _console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("CHECK", "STATE", "FINDING"):
        table.add_column(title, no_wrap=title != "FINDING", overflow="fold")
    before = ""
    for result in results:
        finding = Text(one_line(result.finding))
        if result.remedy:
            finding.append(f"\n→ {one_line(result.remedy)}", style="cyan" if result.state != "ok" else "dim")
        table.add_row(
            result.name if result.name != before else "", Text(result.state, style=_STYLES[result.state]), finding
        )
        before = result.name
    with chosen.capture() as captured:
        chosen.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip(), file=chosen.file)
    print(f"\n{_summary(results)}", file=chosen.file)


def _console() -> Console:
    console = Console(highlight=False, markup=False)
    return console if sys.stdout.isatty() else Console(width=WIDTH, highlight=False, markup=False)


def _summary(results: Sequence[Result]) -> str:
    counts = {state: sum(result.state == state for result in results) for state in ("problem", "warning")}
    if not any(counts.values()):
        return "This machine has what Weir needs."
    return ", ".join(f"{count} {state}{'s' * (count != 1)}" for state, count in counts.items() if count)


def _gravest(results: Sequence[Result]) -> str:
    return max((result.state for result in results), key=list(_STYLES).index, default="ok")
