"""Padding: a model that keeps states by row sees each sequence in its own row, whatever fails."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from math import prod
from pathlib import Path

from weir.schemas.config.model_config import ModelConfig, ModelInput
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import Tensor
from weir.schemas.wire.batches import NO_REPLY, BatchEntry, BatchMessage, SequencePosition
from weir.schemas.wire.calls import unpack_responses
from weir.schemas.wire.request_body import pack_body
from weir.worker.backend_api.interface import Execution, Instance, InstanceDevice, LoadedModel, ModelVersion, Result
from weir.worker.execution.batch import Batch
from weir.worker.execution.instance import InstanceSpec, ModelEnvironment, ModelInstance
from weir.worker.execution.statistics import ModelStatistics
from weir.worker.execution.updates import BatchUpdate

READY = {"name": "READY", "control": [{"kind": "CONTROL_SEQUENCE_READY", "bool_false_true": [False, True]}]}
CONFIG = ModelConfig.model_validate(
    {"name": "m", "max_batch_size": 4, "sequence_batching": {"direct": {}, "control_input": [READY]}}
)


class _Seen:
    """A model that records the value and the READY control of each row, and returns its input."""

    def __init__(self) -> None:
        self.rows: list[tuple[bytes, bytes]] = []

    def create_instance(self, device: InstanceDevice) -> Instance:
        return self

    def execute(self, requests: Sequence[InferRequest], execution: Execution) -> list[Result]:
        self.rows = [(bytes(r.inputs[0].data), bytes(r.inputs[1].data)) for r in requests]  # type: ignore[arg-type]
        return [Result([Tensor("OUT", "INT8", [1, 1], r.inputs[0].data)]) for r in requests]

    def close(self) -> None:
        pass

    def unload(self) -> None:
        pass


def responses_to(model: LoadedModel, config: ModelConfig = CONFIG, shape: Sequence[int] = (1, 1)) -> dict[int, bool]:
    """Whether each of three requests got a response; the first is malformed, and padding is between the others."""
    published: queue.SimpleQueue[BatchUpdate] = queue.SimpleQueue()
    instance = ModelInstance(
        model,
        ModelVersion("m", 1, Path(), config),
        InstanceSpec(InstanceDevice("KIND_CPU", 0, "m_0"), "test"),
        ModelStatistics(),
        ModelEnvironment(arena_prefix="test", on_update=published.put),
    )
    instance.start()
    bodies = [
        pack_body(InferRequest("m", inputs=[Tensor("A", "INT8", shape, bytes([n] * prod(shape)))])) for n in range(4)
    ]
    places = [SequencePosition(slot, 0, restore=False, run=slot + 1, flags=1) for slot in range(4)]
    entries = [
        BatchEntry("gateway", 10, 5, b"garbage", 0, places[0]),
        BatchEntry("gateway", 11, 5, bodies[1], 0, places[1]),
        BatchEntry(NO_REPLY, 0, 0, bodies[1]),
        BatchEntry("gateway", 13, 5, bodies[3], 0, places[3]),
    ]
    instance.submit(Batch(BatchMessage("scheduler", 1, "m", 1, 0, entries)))
    answers: dict[int, bool] = {}
    while len(answers) < 3:
        for _, message in published.get(timeout=20).responses:
            answers |= {answer.key: answer.error is None for answer in unpack_responses(message)[1]}
    instance.stop()
    return answers


def test_a_row_that_can_not_run_does_not_move_the_others() -> None:
    seen = _Seen()
    assert responses_to(seen) == {10: False, 11: True, 13: True}
    assert seen.rows == [(b"\1", b"\0"), (b"\1", b"\1"), (b"\1", b"\0"), (b"\3", b"\1")]


def test_responses_to_padding_are_dropped() -> None:
    class Sends(_Seen):
        def execute(self, requests: Sequence[InferRequest], execution: Execution) -> list[Result | None]:  # type: ignore[override]
            for position, request in enumerate(requests):
                execution.respond(position, Result([Tensor("OUT", "INT8", [1, 1], request.inputs[0].data)]), True)
            return [None] * len(requests)

    assert responses_to(Sends()) == {10: False, 11: True, 13: True}


def test_padding_is_reshaped_by_itself() -> None:
    shapes: list[list[int]] = []

    class Shaped(_Seen):
        def execute(self, requests: Sequence[InferRequest], execution: Execution) -> list[Result]:
            shapes.extend(list(request.inputs[0].shape) for request in requests)
            return super().execute(requests, execution)

    reshaped = {"name": "A", "data_type": "TYPE_INT8", "dims": [1, -1], "reshape": {"shape": [-1]}}
    responses_to(Shaped(), CONFIG.replace(input=[ModelInput.model_validate(reshaped)]), (1, 1, 2))
    assert shapes == [[1, 2]] * 4
