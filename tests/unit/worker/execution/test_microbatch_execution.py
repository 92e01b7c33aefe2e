"""`MicrobatchExecution`: instances that take a microbatch in one message; responses wait a little, requests never long."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.worker.execution.test_microbatch import CONFIG
from weir.schemas.core.errors import internal
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import Tensor
from weir.schemas.wire.messages import BatchCompletion, BatchEntry, BatchMessage, BatchOutcome, unpack_responses
from weir.schemas.wire.request_body import pack_body
from weir.worker.backend_api.interface import (
    EndedRequest,
    Execution,
    Instance,
    InstanceDevice,
    InstanceDied,
    ModelVersion,
    Result,
)
from weir.worker.execution.batch_execution import BatchUpdate
from weir.worker.execution.instance import InstanceSpec, ModelEnvironment, ModelInstance
from weir.worker.execution.running_batch import RunningBatch
from weir.worker.execution.statistics import ModelStatistics

RUN_NS = 1_000_000


class Series:
    """A run that a test moves on: requests end when it says so, with twice their number by default."""

    def __init__(self, numbers: list[int], execution: Execution) -> None:
        self.death = ""
        self.execution = execution
        self.closed = False
        self._changed = threading.Condition()
        self._numbers = numbers
        self._ended: list[EndedRequest] = []
        self._next = 0
        self._end = len(numbers)
        self.lost: Sequence[int] = ()

    def end(self, count: int = 1, result: Result | str | None = "") -> None:
        with self._changed:
            for _ in range(count):
                value = np.array([2 * self._numbers[self._next]], np.float32)
                made = Result([Tensor.from_numpy("OUT", value, "FP32")]) if isinstance(result, str) else result
                now_ns = time.monotonic_ns()
                self._ended.append(EndedRequest(self._next, made, now_ns - RUN_NS, now_ns))
                self._next += 1
            self._changed.notify_all()

    def die(self) -> None:
        with self._changed:
            self.lost = range(self._next, self._next + 1)
            self.death = "killed"
            self._changed.notify_all()

    def wait(self, timeout_s: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.death or self._next >= self._end, timeout_s) is not False

    def ended(self) -> Sequence[EndedRequest]:
        with self._changed:
            ended, self._ended = self._ended, []
            return ended

    def withdraw(self) -> Sequence[int]:
        with self._changed:
            withdrawn = range(min(self._next + 1, self._end), self._end)
            self._end = withdrawn.start
            self._changed.notify_all()
            return withdrawn

    def close(self) -> None:
        self.closed = True


class Model:
    def __init__(self) -> None:
        self.runs: queue.SimpleQueue[Series] = queue.SimpleQueue()
        self.error: BaseException | None = None

    def start_microbatch(self, requests: Sequence[InferRequest], execution: Execution) -> Series:
        if self.error is not None:
            raise self.error
        execution.input_ready()
        run = Series([int(request.inputs[0].to_numpy().item()) for request in requests], execution)
        self.runs.put(run)
        return run

    def execute(self, requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None]:
        raise AssertionError

    def close(self) -> None:
        pass


class Served:
    """An instance of `Model` with its thread; `left` returns the next update."""

    def __init__(self) -> None:
        self.model = model = Model()
        self.statistics = ModelStatistics()
        self.published: queue.SimpleQueue[BatchUpdate] = queue.SimpleQueue()

        class Loaded:
            def create_instance(self, device: InstanceDevice) -> Instance:
                return model

            def unload(self) -> None:
                pass

        environment = ModelEnvironment(arena_prefix="test", on_update=self.published.put)
        spec = InstanceSpec(InstanceDevice("KIND_CPU", 0, "m_0_0"), "test")
        version = ModelVersion("m", 1, Path(), CONFIG)
        self.instance = ModelInstance(Loaded(), version, spec, self.statistics, environment)
        self.instance.start()
        assert self.instance.runs_microbatches

    def submit(self, *numbers: int, deadline_ms: int = 0) -> RunningBatch:
        entries = [
            BatchEntry(
                "gateway",
                number,
                5,
                pack_body(InferRequest("m", inputs=[Tensor.from_numpy("IN", np.array([number], np.float32), "FP32")])),
                deadline_ms if number == 2 else 0,
            )
            for number in numbers
        ]
        running = RunningBatch(BatchMessage("scheduler", 7, "m", 1, 0, entries, is_series=True))
        self.instance.submit(running)
        return running

    def started(self, *numbers: int) -> tuple[Series, RunningBatch]:
        running = self.submit(*numbers)
        return self.model.runs.get(timeout=10), running

    def left(self) -> tuple[BatchCompletion | None, dict[int, Any]]:
        """(completion, output or error message of each request) of the next update."""
        update = self.published.get(timeout=10)
        received = {}
        for _, message in update.responses:
            for answer in unpack_responses(message)[1]:
                received[answer.key] = answer.error.message if answer.error else answer.outputs[0].to_numpy().item()
        return update.completion, received

    def rest(self) -> tuple[list[BatchCompletion], dict[int, Any]]:
        """All completions up to the last one, and all responses."""
        completions, received = [], {}
        while not completions or completions[-1].outcome in (BatchOutcome.HANDED_BACK, BatchOutcome.RELEASED):
            completion, more = self.left()
            completions += [] if completion is None else [completion]
            received |= more
        return completions, received


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.instance.stop()
    assert made.published.empty()


def outcome_of(completion: BatchCompletion | None) -> tuple[int, list[int]]:
    assert completion is not None
    assert completion.batch_id == 7
    return completion.outcome, list(completion.rescheduled)


def test_all_responses_leave_together_and_each_is_counted(served: Served) -> None:
    run, _ = served.started(*range(1, 17))
    run.end(16)
    completion, received = served.left()
    assert received == {number: 2 * number for number in range(1, 17)}
    assert outcome_of(completion) == (BatchOutcome.ANSWERED, [])
    counted = served.statistics.snapshot()
    assert (counted["success"][0], counted["inference_count"], counted["execution_count"]) == (16, 16, 16)
    assert {size: row[0] for size, row in counted["batches"].items()} == {1: 16}
    assert counted["compute_infer"] == [16, 16 * RUN_NS]
    assert counted["batches"][1][2] == 16 * RUN_NS
    phases_ns = sum(counted[name][1] for name in ("queue", "compute_input", "compute_infer", "compute_output"))
    assert counted["success"][1] == phases_ns


def test_a_request_that_fails_does_not_affect_others(served: Served) -> None:
    run, _ = served.started(1, 2, 3)
    run.end()
    run.end(result=Result(error=internal("broken")))
    run.end()
    _, received = served.rest()
    assert received == {1: 2, 2: "broken", 3: 6}
    counted = served.statistics.snapshot()
    assert (counted["success"][0], counted["fail"][0], counted["execution_count"]) == (2, 1, 3)
    assert counted["failures"]["BACKEND"] == 1


def test_responses_leave_while_a_later_request_runs(served: Served) -> None:
    run, _ = served.started(1, 2, 3)
    run.end(2)
    assert [served.left() for _ in range(2)] == [(None, {1: 2}), (None, {2: 4})]
    assert served.statistics.snapshot()["success"][0] == 2
    run.end()
    completions, received = served.rest()
    assert ([outcome_of(completion) for completion in completions], received) == ([(BatchOutcome.ANSWERED, [])], {3: 6})
    counted = served.statistics.snapshot()
    assert (counted["success"][0], counted["execution_count"]) == (3, 3)
    assert run.closed


def test_requests_behind_a_slow_one_are_requeued(served: Served) -> None:
    run, _ = served.started(1, 2, 3, 4)
    completion, received = served.left()
    assert (outcome_of(completion), received) == ((BatchOutcome.HANDED_BACK, [1, 2, 3]), {})
    run.end()
    completion, received = served.left()
    assert (outcome_of(completion), received) == ((BatchOutcome.ANSWERED, [1, 2, 3]), {1: 2})
    assert served.statistics.snapshot()["execution_count"] == 1


def test_requests_are_requeued_when_the_dispatcher_asks(served: Served) -> None:
    run, running = served.started(1, 2)
    assert running.requeue is not None
    running.requeue()
    completion, _ = served.left()
    assert outcome_of(completion) == (BatchOutcome.HANDED_BACK, [1])
    run.end()
    completion, received = served.left()
    assert (outcome_of(completion), received) == ((BatchOutcome.ANSWERED, [1]), {1: 2})


def test_a_microbatch_that_has_not_started_can_be_withdrawn(served: Served) -> None:
    run, first = served.started(1)
    second = served.submit(2, 3)
    assert served.instance.withdraw([first, second]) == [second]
    run.end()
    assert served.rest()[1] == {1: 2}


def test_only_the_request_that_ran_is_lost_with_the_instance(served: Served) -> None:
    run, _ = served.started(1, 2, 3, 4)
    run.end()
    run.die()
    completions, received = served.rest()
    assert received == {1: 2}
    assert [outcome_of(completion) for completion in completions] == [
        (BatchOutcome.HANDED_BACK, [2, 3]),
        (BatchOutcome.UNANSWERED, [1, 2, 3]),
    ]


def test_a_request_with_a_response_does_not_run_again(served: Served) -> None:
    run, _ = served.started(1, 2)
    run.execution.respond(0, Result([Tensor.from_numpy("OUT", np.array([9], np.float32), "FP32")]), True)
    run.die()
    completions, received = served.rest()
    assert received == {1: 9}
    assert outcome_of(completions[-1]) == (BatchOutcome.ANSWERED, [1])


def test_a_request_whose_sender_is_lost_fails(served: Served) -> None:
    run, _ = served.started(1, 2)
    run.end(result=None)
    run.die()
    completions, received = served.rest()
    assert received == {1: "killed"}
    assert outcome_of(completions[-1]) == (BatchOutcome.UNANSWERED, [1])


def test_a_model_may_respond_after_it_has_returned(served: Served) -> None:
    run, _ = served.started(1, 2)
    run.end()
    run.end(result=None)
    completion, received = served.left()
    assert (outcome_of(completion), received) == ((BatchOutcome.RELEASED, []), {1: 2})
    run.execution.respond(1, Result([Tensor.from_numpy("OUT", np.array([9], np.float32), "FP32")]), True)
    completion, received = served.left()
    assert (outcome_of(completion), received) == ((BatchOutcome.ANSWERED, []), {2: 9})
    counted = served.statistics.snapshot()
    assert (counted["success"][0], counted["execution_count"]) == (2, 2)


def test_an_instance_that_cannot_start_loses_the_batch(served: Served) -> None:
    served.model.error = InstanceDied("gone")
    served.submit(1, 2)
    completion, received = served.left()
    assert (outcome_of(completion), received) == ((BatchOutcome.UNANSWERED, []), {})
    served.model.error = ValueError("unexpected")
    served.submit(1, 2)
    completion, received = served.left()
    assert outcome_of(completion) == (BatchOutcome.ANSWERED, [])
    assert received == {1: "ValueError: unexpected", 2: "ValueError: unexpected"}


def test_requests_that_are_cancelled_or_late_do_not_run(served: Served) -> None:
    blocking, _ = served.started(9)
    running = served.submit(1, 2, 3, deadline_ms=1)
    running.cancel("gateway", [1])
    blocking.end()
    assert served.rest()[1] == {9: 18}
    run = served.model.runs.get(timeout=10)
    run.end()
    _, received = served.rest()
    assert (received[2], received[3]) == ("Request timeout expired", 6)
    assert "cancelled" in received[1]
