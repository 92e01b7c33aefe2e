"""Batches of one request each for an instance, and how they ended."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import Tensor
from weir.schemas.wire.batches import BatchCompletion, BatchEntry, BatchMessage, BatchReleased
from weir.schemas.wire.calls import unpack_responses
from weir.schemas.wire.request_body import pack_body
from weir.worker.execution.batch import Batch
from weir.worker.execution.updates import BatchUpdate

CONFIG = ModelConfig.model_validate(
    {
        "name": "m",
        "max_batch_size": 0,
        "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]}],
    }
)


def batch_of(number: int, gateway: str = "gateway", deadline_ms: int = 0, scheduler: str = "scheduler") -> Batch:
    """A batch with one request, for version 1 of model `m`; `number` is its id, its request's key and its input."""
    tensor = Tensor.from_numpy("IN", np.array([number], np.float32), "FP32")
    entry = BatchEntry(gateway, number, 5, pack_body(InferRequest("m", inputs=[tensor])), deadline_ms)
    return Batch(BatchMessage(scheduler, number, "m", 1, 0, [entry]))


class Ends:
    """Takes the updates of an instance: `published` gets them, in any thread."""

    def __init__(self) -> None:
        self.published: queue.SimpleQueue[BatchUpdate] = queue.SimpleQueue()
        self.outputs: dict[int, Any] = {}
        self.busy_us: dict[int, int] = {}
        self._ends: dict[int, BatchCompletion] = {}

    def next(self) -> BatchUpdate:
        """Returns the next update, whose responses are in `outputs`: an output, the text of an error, or None, by key."""
        update = self.published.get(timeout=10)
        for _, message in update.responses:
            for row in unpack_responses(message)[1]:
                output = row.outputs[0].to_numpy().item() if row.outputs else None
                self.outputs[row.key] = row.error.message if row.error else output
        for end in update.completions:
            if not isinstance(end, BatchReleased):
                assert end.batch_id not in self._ends, "a batch ends twice"
                self._ends[end.batch_id] = end
                self.busy_us[end.batch_id] = getattr(end, "busy_us", 0)
        return update

    def until(self, *numbers: int) -> tuple[dict[int, BatchCompletion], dict[int, Any]]:
        """How these batches ended, and all responses since the last call, once they have."""
        while not self._ends.keys() >= set(numbers):
            self.next()
        outputs, self.outputs = self.outputs, {}
        return {number: self._ends[number] for number in numbers}, outputs
