"""A closed loop of requests to one model: latency at the client, and batch sizes at the server."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from tritonclient import http as triton

from weir.demo.server import DemoServer


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """`in_flight` requests were under way at any time; latencies are milliseconds, `batch_size` is the mean."""

    in_flight: int
    requests_per_second: float
    p50_ms: float
    p99_ms: float
    batch_size: float


def measure(
    server: DemoServer, model: str, inputs: Sequence[triton.InferInput], in_flight: int, seconds: float
) -> LoadFigures:
    """Call `model` for `seconds`; each of `in_flight` clients sends its next request after the last response."""
    end = time.perf_counter() + seconds

    def ask(_client: int) -> list[float]:
        latencies: list[float] = []
        with triton.InferenceServerClient(server.http) as client:
            while not latencies or time.perf_counter() < end:
                began = time.perf_counter()
                client.infer(model, inputs)
                latencies.append((time.perf_counter() - began) * 1000)
        return latencies

    before = counts(server, model)
    began = time.perf_counter()
    with ThreadPoolExecutor(in_flight) as clients:
        latencies = np.concatenate(list(clients.map(ask, range(in_flight))))
    took = time.perf_counter() - began
    rows, batches = (after - earlier for after, earlier in zip(counts(server, model), before, strict=True))
    p50, p99 = np.percentile(latencies, [50, 99])
    return LoadFigures(in_flight, len(latencies) / took, float(p50), float(p99), rows / batches)


def counts(server: DemoServer, model: str) -> tuple[int, int]:
    """(inferences, batches that ran) of the model so far, from the metrics page."""
    with urllib.request.urlopen(server.metrics) as page:  # noqa: S310 - the server's own http:// address
        text = page.read().decode()

    def value(name: str) -> int:
        found = re.search(rf'^{name}{{model="{model}",.*}} ([0-9.e+]+)$', text, re.MULTILINE)
        return int(float(found[1])) if found else 0

    return value("nv_inference_count"), value("nv_inference_exec_count")
