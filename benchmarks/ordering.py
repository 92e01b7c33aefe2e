"""`preserve_ordering` under load: answers that overtake each other, counted by a caller that submits many at once.

Two models that differ in that setting only, four instances each, whose runs take a random time.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from bus.connection import Bus
from bus.identity import new_id
from bus.payloads import PayloadArena
from bus.registry import RegistryView
from calls.catalog import Catalog
from calls.inference import Inference
from calls.payload_store import PayloadStore
from schemas.requests import InferRequest, InferResponse
from schemas.tensors import Tensor
from weir.server import Server

MODEL = """
import random, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(random.choice((0, 0.0005, 0.002)))
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(r, "IN").as_numpy())])
            for r in requests
        ]
"""

CONFIG = """
backend: "python"
max_batch_size: 16
input {{ name: "IN" data_type: TYPE_INT64 dims: [1] }}
output {{ name: "OUT" data_type: TYPE_INT64 dims: [1] }}
instance_group [{{ count: 4 kind: KIND_CPU }}]
dynamic_batching {{ preserve_ordering: {} }}
"""


class Numbers:
    """Asks a model for `count` numbers, `in_flight` at a time, and looks at the order in which they come back."""

    def __init__(self, inference: Inference, model: str, count: int, in_flight: int) -> None:
        self._inference = inference
        self._model = model
        self._count = count
        self._room = asyncio.Semaphore(in_flight)
        self._done = asyncio.Event()
        self._submitted_s: list[float] = []
        self._latencies_s: list[float] = []
        self.inversions = 0
        self.errors = 0
        self._last = -1
        self._heard = 0

    async def run(self) -> None:
        began = time.perf_counter()
        for number in range(self._count):
            await self._room.acquire()
            tensor = Tensor("IN", "INT64", [1, 1], number.to_bytes(8, "little"))
            self._submitted_s.append(time.perf_counter())
            self._inference.submit(InferRequest(self._model, inputs=[tensor]), self._on_answer)
            if number % 16 == 15:
                await asyncio.sleep(0)
        await self._done.wait()
        seconds = time.perf_counter() - began
        p50, p99 = (1000 * q for q in np.percentile(self._latencies_s, (50, 99)))
        print(
            f"{self._model:<10} {self._count:>8} {self.inversions:>10} {self.errors:>7} {self._count / seconds:>11.0f}"
            f" {p50:>8.1f} {p99:>8.1f}",
            flush=True,
        )

    def _on_answer(self, outcome: Any, _is_final: bool) -> None:
        self._room.release()
        self._heard += 1
        if isinstance(outcome, InferResponse):
            number = int.from_bytes(outcome.outputs[0].data, "little")  # type: ignore[arg-type]
            self._latencies_s.append(time.perf_counter() - self._submitted_s[number])
            self.inversions += number < self._last
            self._last = number
        else:
            self.errors += 1
        if self._heard == self._count:
            self._done.set()


async def ask(nats_url: str, count: int, in_flight: int) -> None:
    caller_id = new_id("gateway")
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(nats_url, caller_id, background)
        registry = RegistryView(bus)
        catalog = Catalog(registry, True)
        payloads = PayloadStore(PayloadArena(caller_id), registry.model_shares_memory)
        inference = Inference(bus, caller_id, catalog, payloads)
        await inference.start(background)
        await registry.start(background)
        print(
            f"{'model':<10} {'requests':>8} {'inversions':>10} {'errors':>7} {'requests/s':>11} {'p50 ms':>8} {'p99 ms':>8}"
        )
        for model in ("unordered", "ordered"):
            await Numbers(inference, model, count, in_flight).run()
        await inference.stop(0)
        payloads.close()
        await bus.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000, help="of each model")
    parser.add_argument("--in-flight", type=int, default=4000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("unordered", "ordered"):
            version = Path(folder) / name / "1"
            version.mkdir(parents=True)
            (version / "model.py").write_text(MODEL)
            (version.parent / "config.pbtxt").write_text(CONFIG.format(str(name == "ordered").lower()))
        with Server(folder) as server:
            uvloop.run(ask(server.nats_url, options.requests, options.in_flight))


if __name__ == "__main__":
    main()
