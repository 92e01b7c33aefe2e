"""Networks on a GPU through the whole server, beside the bare engine, as tables of Markdown.

    python -m benchmarks.gpu [--sections NAME ...] [--seconds 1] [--minutes 9] [--folder .bench/gpu]

The sections are listed by `--help`. Results are kept in `FOLDER/results`: a run measures the sections that it lacks, or
those that are named, begins none after `--minutes`, and writes `gpu.md` and its pictures there (and to `$OUT`, if that is
set), for `docs/performance/` and `docs/pictures/`. The status is 1 if a section failed.

`--device cpu` rehearses the run without a GPU: the same code with tiny networks. Its figures mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.gateways import gateways
from benchmarks.gpu.language_model import language_model
from benchmarks.gpu.lives import clear, client_memory, device_error, memory
from benchmarks.gpu.overlap import overlap
from benchmarks.gpu.plan import Plan, rehearsal
from benchmarks.gpu.report import Results, Section
from benchmarks.gpu.throughput import side_by_side, switches, throughput
from weir.worker.devices.gpus import find_gpus

SECTIONS: Mapping[str, Callable[[Plan], Section]] = {
    "overlap": overlap,
    "device_error": device_error,
    "client_memory": client_memory,
    "language_model": language_model,
    "switches": switches,
    "side_by_side": side_by_side,
    "gateways": gateways,
    "memory": memory,
    "throughput": throughput,
}
"""In the order in which they are measured: those that show most in the least time come first."""

FOLDER = Path(__file__).parents[2] / ".bench" / "gpu"


def machine(device: str) -> str:
    """What the figures were measured on."""
    processors = f"{os.cpu_count()} processors"
    if device == "cpu":
        return f"a CPU ({platform.machine()}, {processors}): a rehearsal, whose figures mean nothing"
    gpu = find_gpus().gpus[0]
    capability = ".".join(map(str, gpu.compute_capability))
    return f"{gpu.name} ({gpu.memory_bytes >> 30} GiB, compute capability {capability}), {processors}"


def run(plan: Plan, names: Sequence[str], again: bool) -> int:
    """Measures these sections, writes the page, and returns the number of sections that failed."""
    results, failed = Results(plan.folder / "results"), 0
    for name in names:
        if (results.has(name) and not again) or not plan.has_time:
            print(f"{name}: {'measured before' if results.has(name) else 'left out, the time is over'}", flush=True)
            continue
        clear(plan.folder)
        began_s = time.monotonic()
        try:
            results.keep(SECTIONS[name](plan))
        except Exception:
            failed += 1
            print(f"{name}: failed\n{traceback.format_exc()}", flush=True)
        print(f"{name}: took {time.monotonic() - began_s:.0f} s", flush=True)
        page = results.write(list(SECTIONS), machine(plan.device), datetime.date.today().isoformat())
        _copy_out(page.parent)
    clear(plan.folder)
    return failed


def _copy_out(folder: Path) -> None:
    """Copies the page and its pictures to `$OUT`, from where a lent machine sends them back."""
    out = os.environ.get("OUT")
    if out:
        for path in [folder / "gpu.md", *folder.glob("*.svg")]:
            shutil.copy(path, out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, print its rows, and write its page."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--sections", nargs="+", choices=tuple(SECTIONS), default=[], help="these alone, and again")
    options.add_argument("--seconds", type=float, help="length of one measurement")
    options.add_argument("--minutes", type=float, default=60.0, help="begin nothing after so many minutes")
    options.add_argument("--folder", type=Path, default=FOLDER, help="for models and results")
    options.add_argument("--networks", nargs="+", help="of the section throughput")
    options.add_argument("--backends", nargs="+", choices=("pytorch", "onnxruntime", "tensorrt"))
    options.add_argument("--batches", nargs="+", type=int)
    options.add_argument("--instances", nargs="+", type=int)
    options.add_argument("--loads", type=int, help="of the section memory")
    chosen = options.parse_args(arguments)
    if chosen.device == "cuda" and not find_gpus().gpus:
        options.error(f"{find_gpus().problem}; --device cpu rehearses the run")
    plan = rehearsal(chosen.folder) if chosen.device == "cpu" else Plan(device="cuda", folder=chosen.folder)
    names = ("seconds", "networks", "backends", "batches", "instances", "loads")
    given = {name: getattr(chosen, name) for name in names if getattr(chosen, name) is not None}
    plan = replace(plan, deadline_s=time.monotonic() + 60 * chosen.minutes, **given)
    return min(1, run(plan, chosen.sections or list(SECTIONS), again=bool(chosen.sections)))


if __name__ == "__main__":
    sys.exit(main())
