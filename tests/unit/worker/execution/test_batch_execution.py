"""Updates and counters of an instance whose model sends responses itself."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError, internal
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import Tensor
from weir.schemas.wire.batches import BatchEnded, BatchEntry, BatchMessage, BatchReleased
from weir.schemas.wire.calls import unpack_responses
from weir.schemas.wire.request_body import pack_body
from weir.worker.backend_api.interface import Execution, Instance, InstanceDevice, ModelVersion, Result
from weir.worker.execution.batch import Batch
from weir.worker.execution.instance import InstanceSpec, ModelEnvironment, ModelInstance
from weir.worker.execution.statistics import ModelStatistics
from weir.worker.execution.updates import BatchUpdate

CONFIG = ModelConfig.model_validate({"name": "m", "max_batch_size": 4, "model_transaction_policy": {"decoupled": True}})
LOST = WeirError(ErrorCode.UNAVAILABLE, "lost")

Execute = Callable[[Sequence[InferRequest], Execution], Sequence[Result | None]]


class Scripted:
    """An instance with a thread, whose model runs the test's `execute`."""

    def __init__(self, config: ModelConfig) -> None:
        self.execute: Execute = lambda requests, execution: [None] * len(requests)
        self.executions: queue.SimpleQueue[Execution] = queue.SimpleQueue()
        self.published: queue.SimpleQueue[BatchUpdate] = queue.SimpleQueue()
        self.statistics = ModelStatistics()
        self.is_closed = False
        outer = self

        class Running:
            def execute(self, requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None]:
                outer.executions.put(execution)
                return outer.execute(requests, execution)

            def close(self) -> None:
                outer.is_closed = True

        class Loaded:
            def create_instance(self, device: InstanceDevice) -> Instance:
                return Running()

            def unload(self) -> None:
                pass

        self.instance = ModelInstance(
            Loaded(),
            ModelVersion("m", 1, Path(), config),
            InstanceSpec(InstanceDevice("KIND_CPU", 0, "m_0"), "test"),
            self.statistics,
            ModelEnvironment(arena_prefix="test", on_update=self.published.put),
        )
        self.instance.start()

    def submit(self, *keys: int) -> Batch:
        body = pack_body(InferRequest("m", inputs=[Tensor("A", "INT8", [1, 1], b"\1")]))
        entries = [BatchEntry(f"gateway{key % 2}", key, 5, body) for key in keys]
        batch = Batch(BatchMessage("scheduler", keys[0], "m", 1, 0, entries))
        self.instance.submit(batch)
        return batch

    def left(self) -> tuple[int | None, list[tuple[int, Any, bool]]]:
        """The next update: outcome of the batch, (key, value or text, is_final) of its responses."""
        update = self.published.get(timeout=10)
        rows = [answer for _, message in update.responses for answer in unpack_responses(message)[1]]
        received = [
            (row.key, row.error.message if row.error else row.outputs and row.outputs[0].data[0], row.is_final)
            for row in rows
        ]
        return (type(update.completions[0]) if update.completions else None), received

    def counted(self) -> tuple[int, int, dict[str, int], int]:
        """(successes, executions, failures by reason if there are any, inference count)."""
        told = self.statistics.snapshot()
        failures = {reason: count for reason, count in told["failures"].items() if count}
        return told["success"][0], told["execution_count"], failures, told["inference_count"]


@pytest.fixture
def model() -> Iterator[Scripted]:
    scripted = Scripted(CONFIG)
    yield scripted
    scripted.instance.stop()
    assert scripted.is_closed


def number(value: int) -> Result:
    return Result([Tensor.from_numpy("N", np.array([[value]], np.int8), "INT8")])


def test_a_batch_continues_after_its_instance_was_released(model: Scripted) -> None:
    model.submit(1, 2)
    execution = model.executions.get()
    assert model.left() == (BatchReleased, [])
    execution.respond(1, number(10), False)
    assert model.left() == (None, [(2, 10, False)])
    execution.respond(0, None, True)
    assert model.left() == (None, [(1, None, True)])
    model.execute = lambda requests, execution: [number(5)] * len(requests)
    model.submit(3)
    assert model.left() == (BatchEnded, [(3, 5, True)])
    assert model.counted() == (2, 2, {}, 2)
    execution.respond(1, number(11), True)
    assert model.left() == (BatchEnded, [(2, 11, True)])
    execution.respond(1, number(12), True)
    execution.fail(LOST)
    assert model.published.empty()
    assert model.counted() == (3, 2, {}, 3)


def test_requests_with_a_response_during_the_run_get_no_second_one(model: Scripted) -> None:
    def execute(requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None]:
        if len(requests) == 1:
            return [number(9)]
        execution.respond(0, number(1), True)
        execution.respond(1, number(2), False)
        raise ValueError("boo")

    model.execute = execute
    model.submit(1, 2, 3)
    assert model.left() == (None, [(1, 1, True)])
    assert model.left() == (None, [(2, 2, False)])
    outcome, answers = model.left()
    assert outcome == BatchEnded
    assert sorted(answers) == [(2, "ValueError: boo", True), (3, 9, True)]  # nobody had seen anything of the third
    assert model.counted() == (2, 2, {"BACKEND": 1}, 2)


def test_a_lost_process_ends_each_open_request_once(model: Scripted) -> None:
    model.submit(1, 2)
    execution = model.executions.get()
    assert model.left()[0] == BatchReleased
    execution.respond(0, number(1), True)
    assert model.left() == (None, [(1, 1, True)])
    execution.fail(LOST)
    assert model.left() == (BatchEnded, [(2, "lost", True)])
    execution.fail(LOST)
    assert model.published.empty()
    assert model.counted() == (1, 1, {"BACKEND": 1}, 1)


def test_a_loss_before_the_run_has_returned(model: Scripted) -> None:
    def execute(requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None]:
        execution.fail(LOST)
        return [None] * len(requests)

    model.execute = execute
    model.submit(1)
    assert model.left() == (None, [(1, "lost", True)])
    assert model.left() == (BatchEnded, [])


def test_a_cancelled_request_is_counted_once(model: Scripted) -> None:
    batch = model.submit(1, 2, 3)
    execution = model.executions.get()
    assert model.left()[0] == BatchReleased
    batch.cancel("gateway1", [1, 2])
    assert [execution.is_cancelled(position) for position in range(3)] == [True, False, False]
    execution.respond(0, None, True)
    batch.cancel("gateway0", [2])
    execution.fail(LOST)
    assert model.left()[0] is None
    assert model.left()[0] == BatchEnded
    assert model.counted() == (0, 1, {"CANCELED": 2, "BACKEND": 1}, 0)


def test_a_request_that_is_cancelled_before_its_run_does_not_run(model: Scripted) -> None:
    entered, go = threading.Event(), threading.Event()

    def execute(requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None]:
        entered.set()
        assert go.wait(10)
        return [number(len(requests))] * len(requests)

    model.execute = execute
    running, staged = model.submit(1, 2), model.submit(3, 4)
    assert entered.wait(10)
    running.cancel("gateway1", [1])
    staged.cancel("gateway1", [3])
    go.set()
    outcome, answers = model.left()
    assert (outcome, sorted(answers)) == (BatchEnded, [(1, 2, True), (2, 2, True)])
    outcome, answers = model.left()
    assert (outcome, sorted(answers)) == (
        BatchEnded,
        [(3, "the request was cancelled", True), (4, 1, True)],
    )
    success, executions, failures, _ = model.counted()
    assert (success, executions, failures) == (2, 2, {"CANCELED": 2})


def test_responses_are_counted_by_index(model: Scripted) -> None:
    batch = model.submit(1, 2)
    execution = model.executions.get()
    model.left()
    execution.respond(0, number(1), False)
    execution.respond(0, Result(error=internal("boo"), is_model_response=True), False)
    execution.respond(0, None, True)
    batch.cancel("gateway0", [2])
    execution.respond(1, number(1), True)
    responses = {
        index: {name: count for name, (count, _) in row.items() if count}
        for index, row in model.statistics.snapshot()["responses"].items()
    }
    assert responses == {
        0: {"success": 1, "cancel": 1, "compute_infer": 1, "compute_output": 1},
        1: {"fail": 1, "compute_infer": 1, "compute_output": 1},
        2: {"empty_response": 1, "compute_infer": 1},
    }
    assert model.counted() == (1, 1, {"CANCELED": 1}, 1)


def test_an_instance_is_not_closed_before_its_last_response(model: Scripted) -> None:
    model.submit(1)
    execution = model.executions.get()
    model.left()
    stopping = threading.Thread(target=model.instance.stop)
    stopping.start()
    stopping.join(0.05)
    assert stopping.is_alive()
    assert not model.is_closed
    execution.respond(0, None, True)
    stopping.join(10)
    assert model.is_closed


def test_late_requests_do_not_run_or_are_cancelled(model: Scripted) -> None:
    deadline_ms = time.time_ns() // 1_000_000 + 100
    body = pack_body(InferRequest("m", inputs=[Tensor("A", "INT8", [1, 1], b"\1")]))
    deadlines = [1, 0, deadline_ms]
    entries = [BatchEntry("gateway1", key, 5, body, deadline) for key, deadline in enumerate(deadlines, 1)]
    seen: list[list[bool]] = []

    def execute(requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None]:
        seen.append([execution.is_cancelled(position) for position in range(len(requests))])
        while not execution.is_cancelled(1):
            time.sleep(0.001)
        return [number(5)] * len(requests)

    model.execute = execute
    model.instance.submit(Batch(BatchMessage("scheduler", 1, "m", 1, 0, entries)))
    outcome, received = model.left()
    assert outcome == BatchEnded
    assert received == [(1, "Request timeout expired", True), (2, 5, True), (3, 5, True)]
    assert seen == [[False, False]]
    assert model.counted() == (2, 1, {"REJECTED": 1}, 2)
