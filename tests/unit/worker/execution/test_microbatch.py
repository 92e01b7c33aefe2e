"""`Microbatch`: each part is an execution of its own; responses leave together unless a part is slow."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import not_found
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import Tensor
from weir.schemas.wire.messages import (
    BatchCompletion,
    BatchEntry,
    BatchMessage,
    BatchOutcome,
    join_responses,
    pack_response,
    pack_responses,
    unpack_responses,
)
from weir.schemas.wire.request_body import pack_body
from weir.worker.backend_api.interface import (
    Execution,
    Instance,
    InstanceDevice,
    InstanceDied,
    InstanceUnavailable,
    ModelVersion,
    Result,
)
from weir.worker.execution.batch_execution import BatchUpdate
from weir.worker.execution.instance import InstanceSpec, ModelEnvironment, ModelInstance
from weir.worker.execution.microbatch import Microbatch
from weir.worker.execution.statistics import ModelStatistics

CONFIG = ModelConfig.model_validate(
    {
        "name": "m",
        "max_batch_size": 0,
        "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]}],
    }
)


class Doubling:
    """Returns twice the input, in memory that the next run overwrites; `acts` replaces that for some numbers."""

    def __init__(self) -> None:
        self.acts: dict[int, Callable[[Execution], Any]] = {}
        self.ran: list[list[int]] = []
        self._output = np.zeros(1, np.float32)

    def execute(self, requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None]:
        numbers = [int(request.inputs[0].to_numpy().item()) for request in requests]
        self.ran.append(numbers)
        execution.input_ready()
        if numbers[0] in self.acts and (received := self.acts[numbers[0]](execution)) is not None:
            return received
        self._output[0] = 2 * numbers[0]
        execution.inferred()
        return [Result([Tensor("OUT", "FP32", [1], memoryview(self._output).cast("B"))])]

    def close(self) -> None:
        pass


class Served:
    """An instance of `Doubling` with its thread; `left` returns the next update."""

    def __init__(self) -> None:
        self.model = Doubling()
        self.statistics = ModelStatistics()
        self.published: queue.SimpleQueue[BatchUpdate] = queue.SimpleQueue()
        self._microbatches: dict[int, Microbatch] = {}
        model = self.model

        class Loaded:
            def create_instance(self, device: InstanceDevice) -> Instance:
                return model

            def unload(self) -> None:
                pass

        environment = ModelEnvironment(arena_prefix="test", on_update=self._on_update)
        device = InstanceDevice("KIND_CPU", 0, "m_0_0")
        version = ModelVersion("m", 1, Path(), CONFIG)
        self.instance = ModelInstance(Loaded(), version, InstanceSpec(device, "test"), self.statistics, environment)
        self.instance.start()
        self._ids = count(-1, -1)

    def submit(self, *numbers: int, gateways: Sequence[str] = ("gateway",)) -> Microbatch:
        entries = [
            BatchEntry(
                gateways[at % len(gateways)],
                number,
                5,
                pack_body(InferRequest("m", inputs=[Tensor.from_numpy("IN", np.array([number], np.float32), "FP32")])),
            )
            for at, number in enumerate(numbers)
        ]
        message = BatchMessage("scheduler", 7, "m", 1, 0, entries, is_series=True)
        microbatch = Microbatch(message, self.instance, self._ids, self.published.put)
        self._microbatches.update({part.message.batch_id: microbatch for part in microbatch.parts})
        microbatch.submit()
        return microbatch

    def left(self) -> tuple[BatchCompletion | None, dict[int, Any]]:
        """(completion, output or error of each request) of the next update."""
        update = self.published.get(timeout=10)
        received = {}
        for _, message in update.responses:
            for answer in unpack_responses(message)[1]:
                received[answer.key] = answer.error or answer.outputs[0].to_numpy().item()
        return update.completion, received

    def _on_update(self, update: BatchUpdate) -> None:
        if update.completion is None:
            self.published.put(update)
        else:
            self._microbatches[update.completion.batch_id].part_updated(update)


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.instance.stop()
    assert made.published.empty()


class Held:
    """Blocks the model until `go_on` is set; `entered` is set when the model blocks."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()

    def __call__(self, execution: Execution) -> None:
        self.entered.set()
        assert self.go_on.wait(10)


def raising(error: Exception) -> Callable[[Execution], Any]:
    def act(execution: Execution) -> Any:
        raise error

    return act


def test_each_part_is_an_execution_and_all_responses_leave_together(served: Served):
    served.submit(*range(1, 17), gateways=("g1", "g2"))
    done, received = served.left()
    assert received == {number: 2 * number for number in range(1, 17)}, "outputs are packed before the next one runs"
    assert done is not None
    assert (done.batch_id, done.outcome, list(done.rescheduled)) == (7, BatchOutcome.ANSWERED, [])
    assert served.model.ran == [[number] for number in range(1, 17)]
    counted = served.statistics.snapshot()
    assert (counted["success"][0], counted["inference_count"], counted["execution_count"]) == (16, 16, 16)
    assert {size: row[0] for size, row in counted["batches"].items()} == {1: 16}
    # Those before it ran while the last waited, so each has waited for longer than the one before.
    assert counted["queue"][1] >= 16 * 5_000


def test_a_part_that_fails_does_not_affect_others(served: Served):
    served.model.acts = {2: raising(not_found("nothing")), 3: raising(ValueError("no"))}
    served.submit(1, 2, 3, 4)
    done, received = served.left()
    assert done is not None
    assert done.outcome == BatchOutcome.ANSWERED
    assert (received[1], received[2].message, received[3].message, received[4]) == (2, "nothing", "ValueError: no", 8)
    counted = served.statistics.snapshot()
    assert (counted["success"][0], counted["fail"][0], counted["execution_count"]) == (2, 2, 4)


def test_other_parts_get_responses_if_the_instance_dies(served: Served):
    served.model.acts = {2: raising(InstanceDied("killed")), 4: raising(InstanceUnavailable("is away"))}
    served.submit(1, 2, 3, 4, 5)
    received: dict[int, Any] = {}
    while (one := served.left())[0] is None:
        received |= one[1]
    done, last = one
    assert done is not None
    assert (done.outcome, list(done.rescheduled)) == (BatchOutcome.UNANSWERED, [1, 3])
    assert received | last == {1: 2, 3: 6, 5: 10}


def test_an_unavailable_instance_does_not_fail_the_parts(served: Served):
    served.model.acts = {number: raising(InstanceUnavailable("is away")) for number in (1, 2)}
    served.submit(1, 2)
    done, received = served.left()
    assert done is not None
    assert (done.outcome, list(done.rescheduled), received) == (BatchOutcome.NOT_RUN, [0, 1], {})


def test_a_cancelled_part_does_not_run(served: Served):
    served.model.acts[1] = held = Held()
    microbatch = served.submit(1, 2, 3)
    assert held.entered.wait(10)
    microbatch.cancel("gateway", [2])
    microbatch.cancel("another", [3])
    held.go_on.set()
    _, received = served.left()
    assert (received[1], received[2].code.name, received[3]) == (2, "CANCELLED", 6)
    assert served.model.ran == [[1], [3]]


def test_parts_behind_a_slow_one_are_requeued(served: Served):
    served.model.acts[2] = held = Held()
    microbatch = served.submit(1, 2, 3, 4)
    assert held.entered.wait(10)
    assert len(microbatch.requeue()) == 2
    done, received = served.left()
    assert done is not None
    assert (done.outcome, list(done.rescheduled), received) == (BatchOutcome.HANDED_BACK, [2, 3], {1: 2})
    assert microbatch.requeue() == []
    held.go_on.set()
    done, received = served.left()
    assert done is not None
    assert (done.outcome, list(done.rescheduled), received) == (BatchOutcome.ANSWERED, [2, 3], {2: 4})
    assert served.model.ran == [[1], [2]]


def test_other_batches_of_the_instance_are_not_requeued(served: Served):
    served.model.acts[1] = held = Held()
    first, second = served.submit(1, 2), served.submit(3, 4)
    assert held.entered.wait(10)
    assert len(first.requeue()) == 1
    held.go_on.set()
    assert [served.left()[1] for _ in range(3)] == [{}, {1: 2}, {3: 6, 4: 8}]
    assert second.is_complete


def test_a_microbatch_that_did_not_start_ends_without_responses(served: Served):
    served.model.acts[1] = held = Held()
    served.submit(1)
    assert held.entered.wait(10)
    microbatch = served.submit(2, 3)
    assert len(microbatch.requeue()) == 2
    done, received = served.left()
    assert done is not None
    assert (done.outcome, list(done.rescheduled), received) == (BatchOutcome.ANSWERED, [0, 1], {})
    held.go_on.set()
    assert served.left()[1] == {1: 2}


def test_responses_leave_while_later_parts_run(served: Served):
    served.model.acts[3] = held = Held()
    microbatch = served.submit(1, 2, 3, 4)
    assert held.entered.wait(10)
    microbatch.flush()
    assert served.left() == (None, {1: 2, 2: 4})
    assert not microbatch.is_complete
    held.go_on.set()
    assert served.left()[1] == {3: 6, 4: 8}


def test_a_model_may_respond_after_it_has_returned(served: Served):
    runs: list[Execution] = []

    def later(execution: Execution) -> Any:
        runs.append(execution)
        return [None]

    served.model.acts = {2: later, 4: later}
    microbatch = served.submit(1, 2, 3, 4)
    done, received = served.left()
    assert done is not None
    assert (done.outcome, received) == (BatchOutcome.RELEASED, {1: 2, 3: 6}), "the instance is free"
    for run, answer in ((runs[1], 44.0), (runs[0], 22.0)):
        run.respond(0, Result([Tensor.from_numpy("OUT", np.array([answer], np.float32), "FP32")]), True)
    left = [served.left(), served.left()]
    done = left[-1][0]
    assert done is not None
    assert (done.outcome, done.busy_us) == (BatchOutcome.ANSWERED, 0)
    assert microbatch.is_complete


def test_joined_responses_equal_responses_packed_together():
    rows = [pack_response(number, [], {"received": "x" * number}) for number in range(300)]
    joined = join_responses(9, [pack_responses(9, [row]) for row in rows])
    assert unpack_responses(joined) == unpack_responses(pack_responses(9, rows))
    with pytest.raises(ValueError, match="one response each"):
        join_responses(9, [pack_responses(9, rows[:2])])
