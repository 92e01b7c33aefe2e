"""`python -m benchmarks.compare`: Weir beside Triton on this machine, as `make bench` runs it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.compare.installation import TritonInstallation, missing_load_generators
from benchmarks.compare.measurement import Measurement, check_answers, measure, measure_onnxruntime
from benchmarks.compare.networks import NETWORKS
from benchmarks.compare.report import Report
from benchmarks.compare.servers import Server, running_triton, running_weir
from benchmarks.compare.targets import BATCHER, TARGETS, Baseline, Target

_FOLDER = Path(__file__).resolve().parents[2] / ".bench"
_WARM_UP_S = 1
_KEYS = [target.key for target in (*TARGETS, BATCHER)]

app = typer.Typer(add_completion=False)


@app.command()
def compare(
    rounds: Annotated[int, typer.Option(min=1, help="How often each server's turn comes.")] = 5,
    seconds: Annotated[int, typer.Option(min=1, help="Seconds of a turn.")] = 2,
    rows: Annotated[str, typer.Option(help="Rows of the table, separated by commas.")] = ",".join(_KEYS),
    json_path: Annotated[Path | None, typer.Option("--json", help="Write every measurement to a file.")] = None,
) -> None:
    """Measure Weir and Triton, turn by turn, and print what Weir must reach, what it aims for and what it does."""
    chosen = rows.split(",")
    if unknown := set(chosen) - set(_KEYS):
        raise typer.BadParameter(f"unknown rows: {', '.join(sorted(unknown))}; there are {', '.join(_KEYS)}")
    targets = [target for target in TARGETS if target.key in chosen]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if missing := missing_load_generators():
        print(f"better figures with: apt-get install {' '.join(missing)}")
    machine = {
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        # Distributions compile their own Python with optimizations, and some without this argument.
        "optimized_python": sys.base_prefix == "/usr"
        or "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or ""),
        "onnxruntime": metadata.version("onnxruntime"),
    }
    print(", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    measurements = _measure_all(targets, rounds, seconds) if targets else []
    batcher_per_s = _batcher_per_s() if BATCHER.key in chosen else None
    Report(measurements).print(targets, batcher_per_s)
    if json_path:
        rows_out = [dataclasses.asdict(measurement) for measurement in measurements]
        document = {"machine": machine, "batcher_per_s": batcher_per_s, "measurements": rows_out}
        json_path.write_text(json.dumps(document, indent=1))


def _measure_all(targets: list[Target], rounds: int, seconds: int) -> list[Measurement]:
    run = _FOLDER / "run"
    shutil.rmtree(run, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(running_weir(_new(run / "weir")))]
        try:
            installation = TritonInstallation(_FOLDER / "triton")
            installation.install()
            servers.append(stack.enter_context(running_triton(_new(run / "triton"), installation)))
        except SystemExit as reason:
            print(f"without Triton: {reason}", flush=True)
        _check_and_warm_up(servers, targets)
        for server in servers:
            print(f"{server.name} at rest uses {server.processes().idle_cores():.3f} cores", flush=True)
        return [m for number in range(rounds) for m in _round(servers, targets, number, seconds)]


def _check_and_warm_up(servers: list[Server], targets: list[Target]) -> None:
    for workload in dict.fromkeys(target.workload for target in targets):
        for server in servers:
            check_answers(server, NETWORKS[workload.network], workload.protocol)
            measure(server, NETWORKS[workload.network], workload, 0, _WARM_UP_S)
    print("answers of both are those of ONNX Runtime" if len(servers) > 1 else "answers are right", flush=True)


def _round(servers: list[Server], targets: list[Target], number: int, seconds: int) -> list[Measurement]:
    """One turn of each server for each workload; who begins alternates. The others are up meanwhile, at rest."""
    measurements = []
    for workload in dict.fromkeys(target.workload for target in targets):
        network = NETWORKS[workload.network]
        for server in servers if number % 2 == 0 else reversed(servers):
            measurements.append(measure(server, network, workload, number, seconds))
            _tell(measurements[-1])
        if any(t.baseline is Baseline.ONNXRUNTIME for t in targets if t.workload == workload):
            measurements.append(measure_onnxruntime(network, workload, number, seconds))
            _tell(measurements[-1])
    return measurements


def _tell(m: Measurement) -> None:
    print(f"round {m.round + 1}, {m.workload}, {m.server}: {m.requests_per_s:.0f}/s, CPU {m.cpu_ms:.3f} ms", flush=True)


def _batcher_per_s() -> float | None:
    """What `benchmarks.scheduler_core` measures, if it is there."""
    command = [sys.executable, "-m", "benchmarks.scheduler_core"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=_FOLDER.parent, check=False)
    match = re.search(r"^dynamic +([\d,]+)", done.stdout, re.MULTILINE)
    if done.returncode or match is None:
        print(f"no figure of the batcher: {done.stderr.strip().splitlines()[-1:] or done.stdout[-200:]}")
        return None
    return float(match[1].replace(",", ""))


def _new(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    app()
