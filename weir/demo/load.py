"""Closed loops of requests to one model: latency and batch sizes, and what clients notice of a worker's death."""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import psutil
from tritonclient import http as triton
from tritonclient.utils import InferenceServerException

from weir.demo.server import DemoServer
from weir.errors import StartError


class Call(NamedTuple):
    """A request to a model. With `in_sequences` those of each client form one sequence."""

    model: str
    inputs: Sequence[triton.InferInput]
    in_sequences: bool = False


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """`in_flight` requests were under way at any time; latencies are milliseconds, `batch_size` is the mean."""

    in_flight: int
    requests_per_second: float
    p50_ms: float
    p99_ms: float
    batch_size: float


@dataclass(frozen=True, slots=True)
class KillFigures:
    """What clients noticed of the death of worker `pid`: of `requests` requests `failed` failed."""

    pid: int
    requests: int
    failed: int
    longest_s: float


def measure(server: DemoServer, call: Call, in_flight: int, seconds: float) -> LoadFigures:
    """Make the call for `seconds`; each of `in_flight` clients sends its next request after the last response.

    Raises InferenceServerException if a request fails.
    """
    end = time.perf_counter() + seconds

    def ask(client: int) -> list[float]:
        latencies: list[float] = []
        for latency_ms, error in _requests(server, call, client, lambda: time.perf_counter() >= end):
            if error is not None:
                raise error
            latencies.append(latency_ms)
        return latencies

    before = counts(server, call.model)
    began = time.perf_counter()
    with ThreadPoolExecutor(in_flight) as clients:
        latencies = np.concatenate(list(clients.map(ask, range(in_flight))))
    took = time.perf_counter() - began
    rows, batches = (after - earlier for after, earlier in zip(counts(server, call.model), before, strict=True))
    p50, p99 = np.percentile(latencies, [50, 99])
    return LoadFigures(in_flight, len(latencies) / took, float(p50), float(p99), rows / batches)


def kill_worker(server: DemoServer, call: Call, in_flight: int, seconds: float) -> KillFigures:
    """Make the call as `measure` does, and kill the server's worker after half of `seconds` (SIGKILL).

    Each client gets a response after the kill. Raises StartError if the server has no worker.
    """
    pid = worker_pid(server)
    killed_at: list[float] = []

    def is_over() -> bool:
        return bool(killed_at) and time.perf_counter() >= killed_at[0] + seconds / 2

    def ask(client: int) -> list[tuple[float, InferenceServerException | None]]:
        return list(_requests(server, call, client, is_over))

    with ThreadPoolExecutor(in_flight) as clients:
        asking = [clients.submit(ask, client) for client in range(in_flight)]
        time.sleep(seconds / 2)
        os.kill(pid, signal.SIGKILL)
        killed_at.append(time.perf_counter())
        outcomes = [outcome for one in asking for outcome in one.result()]
    failed = sum(error is not None for _, error in outcomes)
    return KillFigures(pid, len(outcomes), failed, max(latency_ms for latency_ms, _ in outcomes) / 1000)


def worker_pid(server: DemoServer) -> int:
    """The process of the server's worker. Raises StartError if it has none."""
    for child in psutil.Process(server.process.pid).children():
        if "worker" in " ".join(child.cmdline()).split():  # a forked role has one word there
            return child.pid
    raise StartError("the server has no worker")


def _requests(
    server: DemoServer, call: Call, number: int, is_over: Callable[[], bool]
) -> Iterator[tuple[float, InferenceServerException | None]]:
    """The requests of client `number`, one after another, at least one: the milliseconds and the error of each."""
    sequence = number + 1 if call.in_sequences else 0
    is_first, is_last = True, False
    with triton.InferenceServerClient(server.http) as client:
        while not is_last:
            is_last = not is_first and is_over()
            began = time.perf_counter()
            error = None
            try:
                client.infer(
                    call.model,
                    call.inputs,
                    sequence_id=sequence,
                    sequence_start=call.in_sequences and is_first,
                    sequence_end=call.in_sequences and is_last,
                )
            except InferenceServerException as refused:
                error = refused
            yield (time.perf_counter() - began) * 1000, error
            is_first = False


def counts(server: DemoServer, model: str) -> tuple[int, int]:
    """(inferences, batches that ran) of the model so far, from the metrics page."""
    with urllib.request.urlopen(server.metrics) as page:  # noqa: S310 - the server's own http:// address
        text = page.read().decode()

    def value(name: str) -> int:
        found = re.search(rf'^{name}{{model="{model}",.*}} ([0-9.e+]+)$', text, re.MULTILINE)
        return int(float(found[1])) if found else 0

    return value("nv_inference_count"), value("nv_inference_exec_count")
