"""Clients of the GPU benchmarks, which send batches in shared memory, and readings of the GPU while they do."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import shared_memory

_numbers = itertools.count()


@contextmanager
def shared_input(client: Any, rows: np.ndarray) -> Iterator[Any]:
    """An input "INPUT" with these rows in shared memory of its own, as from a decoder on the same host."""
    name = f"rows-{next(_numbers)}"
    region = shared_memory.create_shared_memory_region(name, f"/{name}", rows.nbytes)
    try:
        shared_memory.set_shared_memory_region(region, [rows])
        client.register_system_shared_memory(name, f"/{name}", rows.nbytes)
        tensor = triton.InferInput("INPUT", list(rows.shape), "INT64" if rows.dtype == np.int64 else "FP32")
        tensor.set_shared_memory(name, rows.nbytes)
        yield tensor
        client.unregister_system_shared_memory(name)
    finally:
        shared_memory.destroy_shared_memory_region(region)


class Load:
    """`callers` clients of one model, each of which sends one batch after the other, until the context ends.

    `rate` is then the rows a second, `times_s` the times of the requests.
    """

    def __init__(self, grpc_url: str, model: str, rows: np.ndarray, callers: int) -> None:
        self._url = grpc_url
        self._model = model
        self._rows = rows
        self._ready = threading.Barrier(callers + 1)
        self._stop = threading.Event()
        self._times: list[list[float]] = [[] for _ in range(callers)]
        self._threads = [threading.Thread(target=self._call, args=(number,)) for number in range(callers)]
        self.rate = 0.0
        self.times_s: list[float] = []

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        self._ready.wait()
        self._began_s = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self.times_s = list(itertools.chain.from_iterable(self._times))
        self.rate = len(self.times_s) * len(self._rows) / (time.perf_counter() - self._began_s)

    @property
    def p50_ms(self) -> float:
        """The median time of a request in milliseconds."""
        return float(np.median(self.times_s)) * 1e3

    def _call(self, number: int) -> None:
        times = self._times[number]
        try:
            with triton.InferenceServerClient(self._url) as client, shared_input(client, self._rows) as tensor:
                for _ in range(3):
                    client.infer(self._model, [tensor])
                self._ready.wait()
                while not self._stop.is_set() or not times:
                    began_s = time.perf_counter()
                    client.infer(self._model, [tensor])
                    times.append(time.perf_counter() - began_s)
        except BaseException:
            self._ready.abort()  # whoever waits is to fail too
            raise


def loaded(grpc_url: str, model: str, rows: np.ndarray, callers: int, seconds: float) -> Load:
    """The outcome of a load of so many seconds."""
    load = Load(grpc_url, model, rows, callers)
    with load:
        time.sleep(seconds)
    return load


class Utilization:
    """The GPU's utilisation in per cent and its power in watts, each the mean while this is open."""

    def __init__(self, on_gpu: bool) -> None:
        self._nvml: Any = None
        if on_gpu:
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        self._readings: list[tuple[float, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Utilization:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def __str__(self) -> str:
        if not self._readings:
            return "-"
        percent, watts = np.mean(self._readings, axis=0)
        return f"{percent:.0f} % {watts:.0f} W"

    def _read(self) -> None:
        while self._nvml is not None and not self._ended.wait(0.1):
            percent = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu
            self._readings.append((percent, self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000))
