"""Where requests with large tensors run: `python -m benchmarks.payload_locality` prints a table.

A gateway and a worker on one host, another worker on another, as many instances on each; the instances only wait. Requests
come at random moments (Poisson), at a share of what all instances together could take. How many ran beside their gateway;
and of those whose execution began while an instance there had been free for some time, so that the scheduler knew of it.
"""

from __future__ import annotations

import argparse
import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import tritonclient.http as triton
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.role_hosts import RoleHosts

MODEL = "waits"
NEAR, FAR = "near", "far"
LOADS = (0.3, 0.6, 0.9)

_KNOWN_AFTER = 0.1
"""What the scheduler may take to hear that an instance is free, or to have one begin; of the time of an execution."""

_SOURCE = """
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        began_s = time.time()
        time.sleep({seconds})
        told = np.array([b"{host}"], np.object_)
        span = np.array([began_s, time.time()], np.float64)
        outputs = [pb_utils.Tensor("HOST", told), pb_utils.Tensor("SPAN", span)]
        return [pb_utils.InferenceResponse(outputs) for _ in requests]
"""
_CONFIG = """
backend: "python"
input {{ name: "IN" data_type: TYPE_UINT8 dims: [ -1 ] }}
output [ {{ name: "HOST" data_type: TYPE_STRING dims: [ 1 ] }}, {{ name: "SPAN" data_type: TYPE_FP64 dims: [ 2 ] }} ]
instance_group {{ kind: KIND_CPU count: {instances} }}
"""


class _Run(NamedTuple):
    host: str
    began_s: float
    ended_s: float


def main() -> None:
    """Runs all loads and prints their table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--bytes", type=int, default=200_000, help="of each request's tensor")
    parser.add_argument("--instances", type=int, default=3, help="on each host")
    parser.add_argument("--run-seconds", type=float, default=0.3, help="that an execution takes")
    options = parser.parse_args()
    table = Table(box=box.SIMPLE)
    for column in ("load of all", "requests", "ran near", "near was free", "of those ran near"):
        table.add_column(column, justify="right")
    with ExitStack() as stack:
        roles = RoleHosts(stack)
        roles.start("scheduler")
        for host in (NEAR, FAR):
            folder = roles.folder / host / MODEL
            (folder / "1").mkdir(parents=True)
            (folder / "config.pbtxt").write_text(_CONFIG.format(instances=options.instances))
            (folder / "1" / "model.py").write_text(_SOURCE.format(host=host, seconds=options.run_seconds))
            roles.start("worker", f"--model-repository={folder.parent}", "--payload-listen=127.0.0.1", host=host)
        url = roles.gateway(MODEL, "--payload-listen=127.0.0.1", host=NEAR)
        for load in LOADS:
            rate = load * 2 * options.instances / options.run_seconds
            runs = _asked(url, options.bytes, rate, options.seconds)
            near, free = _counted(runs, options.instances, _KNOWN_AFTER * options.run_seconds)
            ran_near = sum(run.host == NEAR for run in free)
            table.add_row(
                f"{load:.0%}", str(len(runs)), f"{near / len(runs):.0%}", str(len(free)), _share(ran_near, len(free))
            )
    Console().print(table)


def _asked(url: str, size: int, rate: float, seconds: float) -> list[_Run]:
    content = np.zeros(size, np.uint8)
    clients = threading.local()

    def ask() -> _Run:
        if not hasattr(clients, "one"):
            clients.one = triton.InferenceServerClient(url)
        tensor = triton.InferInput("IN", [size], "UINT8")
        tensor.set_data_from_numpy(content)
        answer = clients.one.infer(MODEL, [tensor])
        began_s, ended_s = answer.as_numpy("SPAN")
        return _Run(answer.as_numpy("HOST")[0].decode(), float(began_s), float(ended_s))

    dice, asked = random.Random(1), []
    with ThreadPoolExecutor(64) as pool:
        at_s, until_s = time.monotonic(), time.monotonic() + seconds
        while at_s < until_s:
            time.sleep(max(0.0, at_s - time.monotonic()))
            asked.append(pool.submit(ask))
            at_s += dice.expovariate(rate)
    return [one.result() for one in asked]


def _counted(runs: list[_Run], instances: int, known_after_s: float) -> tuple[int, list[_Run]]:
    """How many ran near, and those that began while an instance there was free and the scheduler knew of it."""
    near = [run for run in runs if run.host == NEAR]
    free = []
    for run in runs:
        others = itertools.filterfalse(lambda other, run=run: other is run, near)
        busy = sum(o.began_s - known_after_s <= run.began_s < o.ended_s + known_after_s for o in others)
        if busy < instances:
            free.append(run)
    return len(near), free


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


if __name__ == "__main__":
    main()
