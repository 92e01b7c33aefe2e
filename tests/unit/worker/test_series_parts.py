"""Requests of a series: each is an execution of its own, and what comes of all leaves together, unless one is slow."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.bodies import pack_body
from schemas.errors import not_found
from schemas.messages import (
    BatchEntry,
    BatchMessage,
    BatchOutcome,
    Done,
    join_answers,
    pack_answer,
    pack_answers,
    unpack_answers,
)
from schemas.model_config import ModelConfig
from schemas.requests import InferRequest
from schemas.tensors import Tensor
from worker.backend import Execution, Instance, InstanceDevice, InstanceDied, InstanceDown, ModelVersion, Result
from worker.batch_execution import FinishedBatch
from worker.model_environment import ModelEnvironment
from worker.model_instance import ModelInstance
from worker.series import Series
from worker.statistics import ModelStatistics

CONFIG = ModelConfig.model_validate(
    {
        "name": "m",
        "max_batch_size": 0,
        "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]}],
    }
)
ACKS = ["$JS.ACK.x"]


class Doubling:
    """Answers with twice the input, in memory that the next run writes over; numbers in `acts` do something else."""

    def __init__(self) -> None:
        self.acts: dict[int, Callable[[Execution], Any]] = {}
        self.ran: list[list[int]] = []
        self._output = np.zeros(1, np.float32)

    def execute(self, requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None]:
        numbers = [int(request.inputs[0].to_numpy().item()) for request in requests]
        self.ran.append(numbers)
        execution.input_ready()
        if numbers[0] in self.acts and (said := self.acts[numbers[0]](execution)) is not None:
            return said
        self._output[0] = 2 * numbers[0]
        execution.inferred()
        return [Result([Tensor("OUT", "FP32", [1], memoryview(self._output).cast("B"))])]

    def close(self) -> None:
        pass


class Served:
    """An instance of `Doubling` in its thread; `left` is what was published."""

    def __init__(self) -> None:
        self.model = Doubling()
        self.statistics = ModelStatistics()
        self.published: queue.SimpleQueue[FinishedBatch] = queue.SimpleQueue()
        self._series: dict[int, Series] = {}
        model = self.model

        class Loaded:
            def create_instance(self, device: InstanceDevice) -> Instance:
                return model

            def unload(self) -> None:
                pass

        environment = ModelEnvironment(arena_prefix="test", on_finished=self._finished)
        device = InstanceDevice("KIND_CPU", 0, "m_0_0")
        version = ModelVersion("m", 1, Path(), CONFIG)
        self.instance = ModelInstance(Loaded(), version, device, "test", self.statistics, environment)
        self.instance.start()
        self._ids = count(-1, -1)

    def submit(self, *numbers: int, gateways: Sequence[str] = ("gateway",)) -> Series:
        entries = [
            BatchEntry(
                gateways[at % len(gateways)],
                number,
                5,
                pack_body(InferRequest("m", inputs=[Tensor.from_numpy("IN", np.array([number], np.float32), "FP32")])),
            )
            for at, number in enumerate(numbers)
        ]
        message = BatchMessage("scheduler", 7, "m", 1, 0, entries, ACKS, is_series=True)
        series = Series(message, self.instance, self._ids, self.published.put)
        self._series.update({part.message.batch_id: series for part in series.parts})
        series.submit()
        return series

    def left(self) -> tuple[Done | None, dict[int, Any]]:
        """(end, each request's output or error) of what leaves next."""
        finished = self.published.get(timeout=10)
        said = {}
        for _, message in finished.answers:
            for answer in unpack_answers(message)[1]:
                said[answer.key] = answer.error or answer.outputs[0].to_numpy().item()
        is_all = finished.done is not None and finished.done.outcome == BatchOutcome.ANSWERED
        assert list(finished.acks) == (ACKS if is_all and not finished.done.rescheduled else [])
        return finished.done, said

    def _finished(self, finished: FinishedBatch) -> None:
        if finished.done is None:
            self.published.put(finished)
        else:
            self._series[finished.done.batch_id].ended(finished)


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.instance.stop()
    assert made.published.empty()


class Held:
    """Keeps the model until it is told to go on; `entered` says that it has come there."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()

    def __call__(self, execution: Execution) -> None:
        self.entered.set()
        assert self.go_on.wait(10)


def raising(error: Exception) -> Callable[[Execution], Any]:
    def act(execution: Execution) -> Any:
        raise error

    return act


def test_each_is_an_execution_of_its_own_and_all_leave_together(served: Served):
    served.submit(*range(1, 17), gateways=("g1", "g2"))
    done, said = served.left()
    assert said == {number: 2 * number for number in range(1, 17)}, "outputs are packed before the next one runs"
    assert done is not None
    assert (done.batch_id, done.outcome, list(done.rescheduled)) == (7, BatchOutcome.ANSWERED, [])
    assert served.model.ran == [[number] for number in range(1, 17)]
    counted = served.statistics.snapshot()
    assert (counted["success"][0], counted["inference_count"], counted["execution_count"]) == (16, 16, 16)
    assert {size: row[0] for size, row in counted["batches"].items()} == {1: 16}
    # Those before it ran while the last waited, so each has waited for longer than the one before.
    assert counted["queue"][1] >= 16 * 5_000


def test_one_that_fails_fails_alone(served: Served):
    served.model.acts = {2: raising(not_found("nothing")), 3: raising(ValueError("no"))}
    served.submit(1, 2, 3, 4)
    done, said = served.left()
    assert done is not None
    assert done.outcome == BatchOutcome.ANSWERED
    assert (said[1], said[2].message, said[3].message, said[4]) == (2, "nothing", "ValueError: no", 8)
    counted = served.statistics.snapshot()
    assert (counted["success"][0], counted["fail"][0], counted["execution_count"]) == (2, 2, 4)


def test_where_the_instance_dies_the_others_are_answered(served: Served):
    served.model.acts = {2: raising(InstanceDied("killed")), 4: raising(InstanceDown("is away"))}
    served.submit(1, 2, 3, 4, 5)
    said: dict[int, Any] = {}
    while (one := served.left())[0] is None:
        said |= one[1]
    done, last = one
    assert done is not None
    assert (done.outcome, list(done.rescheduled)) == (BatchOutcome.UNANSWERED, [1, 3])
    assert said | last == {1: 2, 3: 6, 5: 10}


def test_an_instance_that_is_away_is_nobodys_fault(served: Served):
    served.model.acts = {number: raising(InstanceDown("is away")) for number in (1, 2)}
    served.submit(1, 2)
    done, said = served.left()
    assert done is not None
    assert (done.outcome, list(done.rescheduled), said) == (BatchOutcome.NOT_RUN, [0, 1], {})


def test_one_whose_caller_has_gone_is_not_run(served: Served):
    served.model.acts[1] = held = Held()
    series = served.submit(1, 2, 3)
    assert held.entered.wait(10)
    series.cancel("gateway", [2])
    series.cancel("another", [3])
    held.go_on.set()
    _, said = served.left()
    assert (said[1], said[2].code.name, said[3]) == (2, "CANCELLED", 6)
    assert served.model.ran == [[1], [3]]


def test_what_waits_behind_a_slow_one_goes_back(served: Served):
    served.model.acts[2] = held = Held()
    series = served.submit(1, 2, 3, 4)
    assert held.entered.wait(10)
    assert len(series.make_haste()) == 2
    done, said = served.left()
    assert done is not None
    assert (done.outcome, list(done.rescheduled), said) == (BatchOutcome.HANDED_BACK, [2, 3], {1: 2})
    assert series.make_haste() == []
    held.go_on.set()
    done, said = served.left()
    assert done is not None
    assert (done.outcome, list(done.rescheduled), said) == (BatchOutcome.ANSWERED, [2, 3], {2: 4})
    assert served.model.ran == [[1], [2]]


def test_other_batches_of_the_instance_stay_where_they_are(served: Served):
    served.model.acts[1] = held = Held()
    first, second = served.submit(1, 2), served.submit(3, 4)
    assert held.entered.wait(10)
    assert len(first.make_haste()) == 1
    held.go_on.set()
    assert [served.left()[1] for _ in range(3)] == [{}, {1: 2}, {3: 6, 4: 8}]
    assert second.is_over


def test_one_that_did_not_begin_at_all_ends_with_nothing_answered(served: Served):
    served.model.acts[1] = held = Held()
    served.submit(1)
    assert held.entered.wait(10)
    series = served.submit(2, 3)
    assert len(series.make_haste()) == 2
    done, said = served.left()
    assert done is not None
    assert (done.outcome, list(done.rescheduled), said) == (BatchOutcome.ANSWERED, [0, 1], {})
    held.go_on.set()
    assert served.left()[1] == {1: 2}


def test_what_is_answered_leaves_while_others_run(served: Served):
    served.model.acts[3] = held = Held()
    series = served.submit(1, 2, 3, 4)
    assert held.entered.wait(10)
    series.flush()
    assert served.left() == (None, {1: 2, 2: 4})
    assert not series.is_over
    held.go_on.set()
    assert served.left()[1] == {3: 6, 4: 8}


def test_a_model_may_answer_when_it_has_returned(served: Served):
    runs: list[Execution] = []

    def later(execution: Execution) -> Any:
        runs.append(execution)
        return [None]

    served.model.acts = {2: later, 4: later}
    series = served.submit(1, 2, 3, 4)
    done, said = served.left()
    assert done is not None
    assert (done.outcome, said) == (BatchOutcome.RELEASED, {1: 2, 3: 6}), "the instance is free"
    for run, answer in ((runs[1], 44.0), (runs[0], 22.0)):
        run.respond(0, Result([Tensor.from_numpy("OUT", np.array([answer], np.float32), "FP32")]), True)
    left = [served.left(), served.left()]
    done = left[-1][0]
    assert done is not None
    assert (done.outcome, done.busy_us) == (BatchOutcome.ANSWERED, 0)
    assert series.is_over


def test_answers_are_joined_as_if_they_had_been_packed_together():
    rows = [pack_answer(number, [], {"said": "x" * number}) for number in range(300)]
    joined = join_answers(9, [pack_answers(9, [row]) for row in rows])
    assert unpack_answers(joined) == unpack_answers(pack_answers(9, rows))
    with pytest.raises(ValueError, match="one answer each"):
        join_answers(9, [pack_answers(9, rows[:2])])
