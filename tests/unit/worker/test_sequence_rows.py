"""Rows of sequences in an instance: a model that keeps states by row sees each sequence at its own, whatever fails."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from math import prod
from pathlib import Path

from schemas.bodies import pack_body
from schemas.messages import NOBODY, BatchEntry, BatchMessage, SequencePlace, unpack_answers
from schemas.model_config import ModelConfig, ModelInput
from schemas.requests import InferRequest
from schemas.tensors import Tensor
from worker.backend import Execution, Instance, InstanceDevice, LoadedModel, ModelVersion, Result
from worker.batch_execution import FinishedBatch
from worker.model_environment import ModelEnvironment
from worker.model_instance import ModelInstance
from worker.running_batch import RunningBatch
from worker.statistics import ModelStatistics

READY = {"name": "READY", "control": [{"kind": "CONTROL_SEQUENCE_READY", "bool_false_true": [False, True]}]}
CONFIG = ModelConfig.model_validate(
    {"name": "m", "max_batch_size": 4, "sequence_batching": {"direct": {}, "control_input": [READY]}}
)


class _Seen:
    """A model that notes the value and the READY control of each row, and answers its input."""

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


def answers_of(model: LoadedModel, config: ModelConfig = CONFIG, shape: Sequence[int] = (1, 1)) -> dict[int, bool]:
    """Whether each of three requests got a response; the first one is garbage, and between the others is a null row."""
    published: queue.SimpleQueue[FinishedBatch] = queue.SimpleQueue()
    instance = ModelInstance(
        model,
        ModelVersion("m", 1, Path(), config),
        InstanceDevice("KIND_CPU", 0, "m_0"),
        "test",
        ModelStatistics(),
        ModelEnvironment(arena_prefix="test", on_finished=published.put),
    )
    instance.start()
    bodies = [
        pack_body(InferRequest("m", inputs=[Tensor("A", "INT8", shape, bytes([n] * prod(shape)))])) for n in range(4)
    ]
    places = [SequencePlace(slot, 0, restore=False, run=slot + 1, flags=1) for slot in range(4)]
    entries = [
        BatchEntry("gateway", 10, 5, b"garbage", 0, places[0]),
        BatchEntry("gateway", 11, 5, bodies[1], 0, places[1]),
        BatchEntry(NOBODY, 0, 0, bodies[1]),
        BatchEntry("gateway", 13, 5, bodies[3], 0, places[3]),
    ]
    instance.submit(RunningBatch(BatchMessage("scheduler", 1, "m", 1, 0, entries, [])))
    answers: dict[int, bool] = {}
    while len(answers) < 3:
        for _, message in published.get(timeout=5).answers:
            answers |= {answer.key: answer.error is None for answer in unpack_answers(message)[1]}
    instance.stop()
    return answers


def test_a_row_that_can_not_be_run_leaves_the_others_where_they_are() -> None:
    seen = _Seen()
    assert answers_of(seen) == {10: False, 11: True, 13: True}
    assert seen.rows == [(b"\1", b"\0"), (b"\1", b"\1"), (b"\1", b"\0"), (b"\3", b"\1")]


def test_nobody_gets_what_a_model_sends_to_a_row_that_stands_in_for_his() -> None:
    class Sends(_Seen):
        def execute(self, requests: Sequence[InferRequest], execution: Execution) -> list[Result | None]:  # type: ignore[override]
            for position, request in enumerate(requests):
                execution.respond(position, Result([Tensor("OUT", "INT8", [1, 1], request.inputs[0].data)]), True)
            return [None] * len(requests)

    assert answers_of(Sends()) == {10: False, 11: True, 13: True}


def test_a_row_that_stands_in_is_reshaped_by_itself() -> None:
    shapes: list[list[int]] = []

    class Shaped(_Seen):
        def execute(self, requests: Sequence[InferRequest], execution: Execution) -> list[Result]:
            shapes.extend(list(request.inputs[0].shape) for request in requests)
            return super().execute(requests, execution)

    reshaped = {"name": "A", "data_type": "TYPE_INT8", "dims": [1, -1], "reshape": {"shape": [-1]}}
    answers_of(Shaped(), CONFIG.replace(input=[ModelInput.model_validate(reshaped)]), (1, 1, 2))
    assert shapes == [[1, 2]] * 4
