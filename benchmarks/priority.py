"""Latency of high priority under a flood of low priority: `python -m benchmarks.priority` prints a table.

One instance of a Python model with a fixed time per batch is served by a whole `weir serve`. Requests of priority 1
come evenly spaced, alone and then beside four times as many of priority 2 as the model can run; the same again for a
model without priority levels. Requests of the flood that find no room in the queue are rejected.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import numpy as np
import tritonclient.grpc.aio as grpc
from tritonclient.utils import InferenceServerException

from weir import Server

EXECUTION_MS = 20.0
BATCH = 2
QUEUED = 400
HIGH_PER_S = 10.0
OVERLOAD = 4

MODEL = f"""
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep({EXECUTION_MS / 1000})
        tensors = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor)]) for tensor in tensors]
"""
CONFIG = """
backend: "python" max_batch_size: %d
input { name: "IN" data_type: TYPE_FP32 dims: 1 } output { name: "OUT" data_type: TYPE_FP32 dims: 1 }
instance_group { kind: KIND_CPU count: 1 }
dynamic_batching { default_queue_policy { max_queue_size: %d } %s }
"""
LEVELS = {"two levels": "priority_levels: 2 default_priority_level: 2", "no levels": ""}


def write_models(folder: Path) -> None:
    """One model with priority levels and one without."""
    for name, levels in LEVELS.items():
        model = folder / name.replace(" ", "_")
        (model / "1").mkdir(parents=True)
        (model / "1" / "model.py").write_text(MODEL)
        (model / "config.pbtxt").write_text(CONFIG % (BATCH, QUEUED, levels))


class Load:
    """Requests that come evenly spaced, whether or not the ones before are answered."""

    def __init__(self, client: grpc.InferenceServerClient, model: str, priority: int) -> None:
        self._client = client
        self._model = model
        self._priority = priority
        self._input = grpc.InferInput("IN", [1, 1], "FP32")
        self._input.set_data_from_numpy(np.zeros((1, 1), np.float32))
        self.taken_ms: list[float] = []
        self.refused = 0

    async def run(self, per_s: float, seconds: float) -> None:
        """Returns when all have had their answers."""
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as asked:
            for number in range(int(per_s * seconds)):
                await asyncio.sleep(max(0.0, began_s + number / per_s - time.perf_counter()))
                asked.create_task(self._ask())

    async def _ask(self) -> None:
        began_s = time.perf_counter()
        try:
            await self._client.infer(self._model, [self._input], priority=self._priority)
        except InferenceServerException as error:
            if "Exceeds maximum queue size" not in error.message():
                raise
            self.refused += 1
        else:
            self.taken_ms.append((time.perf_counter() - began_s) * 1000)

    def line(self) -> str:
        """Latency, and how many were refused."""
        if not self.taken_ms:
            return f"{'-':>9} {'-':>9} {'-':>9} {0:>9} {self.refused:>9}"
        p50, p99, most = np.percentile(self.taken_ms, [50, 99, 100])
        return f"{p50:>9.1f} {p99:>9.1f} {most:>9.1f} {len(self.taken_ms):>9} {self.refused:>9}"


async def measure(url: str, seconds: float) -> None:
    """Print the rows of both models."""
    print(f"{'':34} {'p50 ms':>9} {'p99 ms':>9} {'max ms':>9} {'answered':>9} {'refused':>9}")
    capacity_per_s = BATCH / (EXECUTION_MS / 1000)
    async with grpc.InferenceServerClient(url) as client:
        for name in LEVELS:
            model = name.replace(" ", "_")
            await Load(client, model, 1).run(HIGH_PER_S, 1)
            alone, high, low = (Load(client, model, priority) for priority in (1, 1, 2))
            await alone.run(HIGH_PER_S, seconds)
            flood = asyncio.create_task(low.run(OVERLOAD * capacity_per_s, seconds + 2))
            await asyncio.sleep(2)  # until its queue is full
            await high.run(HIGH_PER_S, seconds)
            await flood
            print(f"{name + ', high alone':34} {alone.line()}")
            print(f"{name + f', high under {OVERLOAD} x overload':34} {high.line()}")
            print(f"{name + ', the overload itself':34} {low.line()}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each row is measured")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        with Server(folder) as server:
            asyncio.run(measure(server.grpc_url, seconds))


if __name__ == "__main__":
    main()
