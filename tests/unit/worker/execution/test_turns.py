"""The batches that an instance runs in one turn: each is an execution of its own, and their updates leave together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.waiting import wait_until
from tests.support.worker.single_batches import CONFIG, Ends, batch_of
from weir.bus.payloads.reach import process_reach
from weir.schemas.core.errors import not_found
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import Tensor
from weir.schemas.wire.batches import BatchCompletion, BatchEnded, BatchLost, BatchNotRun, BatchReleased, NotRunReason
from weir.schemas.wire.calls import join_responses, pack_response, pack_responses, unpack_responses
from weir.worker.backend_api.interface import (
    Execution,
    Instance,
    InstanceDevice,
    InstanceDied,
    InstanceUnavailable,
    ModelVersion,
    Result,
)
from weir.worker.execution import updates
from weir.worker.execution.instance import InstanceSpec, ModelEnvironment, ModelInstance
from weir.worker.execution.statistics import ModelStatistics
from weir.worker.execution.updates import BatchUpdate, HeldUpdates


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


class Served(Ends):
    """An instance of `Doubling` with its thread. Batch 0 blocks it, so that those behind it run in one turn."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model = Doubling()
        self.go = threading.Event()
        model.acts[0] = lambda execution: self.go.wait(10) and [Result()]

        class Loaded:
            def create_instance(self, device: InstanceDevice) -> Instance:
                return model

            def unload(self) -> None:
                pass

        self.statistics = ModelStatistics()
        environment = ModelEnvironment(arena_prefix="test", on_update=self.published.put)
        spec = InstanceSpec(InstanceDevice("KIND_CPU", 0, "m_0_0"), "test")
        self.instance = ModelInstance(
            Loaded(), ModelVersion("m", 1, Path(), CONFIG), spec, self.statistics, environment
        )
        self.instance.start()

    def submit(self, *numbers: int, gateways: Sequence[str] = ("gateway",), scheduler: str = "scheduler") -> list[Any]:
        batches = [
            batch_of(number, gateways[at % len(gateways)], scheduler=scheduler) for at, number in enumerate(numbers)
        ]
        for batch in batches:
            self.instance.submit(batch)
        return batches

    def block(self) -> None:
        self.submit(-1)  # a fast one: updates are held after two of them
        assert self.until(-1)[1] == {-1: -2}
        self.submit(0)
        wait_until(lambda: self.model.ran == [[-1], [0]])
        self.model.ran.clear()
        self.statistics.__init__()  # type: ignore[misc]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    # On a busy machine any batch may take long, which ends a turn.
    monkeypatch.setattr("weir.worker.execution.instance.FAST_US", 60_000_000)
    monkeypatch.setattr(updates, "MAX_HELD_S", 60.0)
    made = Served()
    yield made
    made.go.set()
    made.instance.stop()
    assert made.published.empty()
    assert made.instance.held == 0


def test_each_batch_is_an_execution_and_all_leave_together(served: Served):
    served.block()
    served.submit(*range(1, 17))
    served.go.set()
    update = served.next()
    assert [completion.batch_id for completion in update.completions] == list(range(17))
    assert len(update.responses) == 1
    assert served.outputs == {0: None, **{number: 2 * number for number in range(1, 17)}}
    assert served.model.ran == [[number] for number in range(1, 17)]
    counted = served.statistics.snapshot()
    assert (counted["success"][0], counted["execution_count"]) == (17, 17)


def test_each_caller_gets_one_message(served: Served):
    served.block()
    served.submit(1, 2, 3, 4, gateways=("g1", "g2"))
    served.go.set()
    update = served.next()
    rows = {gateway: [row.key for row in unpack_responses(data)[1]] for gateway, data in update.responses}
    assert rows == {"gateway": [0], "g1": [1, 3], "g2": [2, 4]}


def test_each_scheduler_gets_one_update(served: Served):
    served.block()
    served.submit(1, 2)
    served.submit(3, 4, scheduler="other")
    served.go.set()
    assert [[end.batch_id for end in served.next().completions] for _ in range(2)] == [[0, 1, 2], [3, 4]]


def test_a_batch_that_fails_does_not_affect_others(served: Served):
    served.model.acts[2] = lambda execution: [Result(error=not_found("no"))]
    served.model.acts[3] = lambda execution: 1 / 0
    served.block()
    served.submit(1, 2, 3, 4)
    served.go.set()
    assert served.until(1, 2, 3, 4)[1] == {0: None, 1: 2, 2: "no", 3: "ZeroDivisionError: division by zero", 4: 8}


@pytest.mark.parametrize(
    ("death", "end"),
    [(InstanceDied("gone"), BatchLost), (InstanceUnavailable("gone"), BatchNotRun)],
)
def test_an_instance_that_dies_loses_one_batch(served: Served, death: Exception, end: type):
    def die(_execution: Execution) -> Any:
        raise death

    served.model.acts[2] = die
    served.block()
    served.submit(1, 2, 3)
    served.go.set()
    ends, received = served.until(1, 2, 3)
    assert received == {0: None, 1: 2, 3: 6}
    assert isinstance(ends[2], end)


def test_a_cancelled_batch_does_not_run(served: Served):
    served.block()
    first, *_ = served.submit(1, 2)
    first.cancel("gateway", [1])
    served.go.set()
    _, received = served.until(1, 2)
    assert (received[1], received[2], served.model.ran) == ("the request was cancelled", 4, [[2]])


def test_what_has_not_started_can_be_withdrawn(served: Served):
    served.block()
    batches = served.submit(1, 2)
    assert served.instance.unstarted == 2
    assert served.instance.withdraw() == batches
    assert (served.instance.unstarted, served.instance.held) == (0, 1)
    served.go.set()
    served.until(0)
    assert served.model.ran == []


def test_a_withdrawal_does_not_keep_a_stopping_instance_from_its_end(served: Served):
    served.block()
    served.submit(1)
    served.instance.ask_to_stop()
    assert [batch.message.batch_id for batch in served.instance.withdraw()] == [1]
    served.go.set()
    served.until(0)


def test_held_updates_leave_while_a_later_batch_runs(served: Served):
    running = threading.Event()
    blocked = threading.Event()
    served.model.acts[2] = lambda execution: running.set() or (blocked.wait(10) and [Result()])
    served.block()
    served.submit(1, 2)
    served.go.set()
    assert running.wait(10)
    assert served.published.empty()
    served.instance.flush_held()
    assert served.until(0, 1)[1] == {0: None, 1: 2}
    blocked.set()
    served.until(2)


def test_an_instance_is_watched_while_it_may_hold_updates_or_batches(served: Served):
    served.block()
    assert not served.instance.needs_watch
    served.submit(1)
    assert served.instance.needs_watch, "the last batch was fast"
    served.instance._is_fast = False
    assert not served.instance.needs_watch
    served.submit(2)
    assert served.instance.needs_watch, "two wait"
    served.go.set()
    served.until(0, 1, 2)


def test_slow_batches_do_not_wait_for_each_other(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("weir.worker.execution.instance.FAST_US", -1)
    served.block()
    served.submit(1, 2)
    served.go.set()
    assert [len(served.next().completions) for _ in range(3)] == [1, 1, 1]


def test_a_model_may_respond_after_it_has_returned(served: Served):
    sent: list[Execution] = []

    def respond_later(execution: Execution) -> list[Result | None]:
        sent.append(execution)
        return [None]

    served.model.acts[2] = respond_later
    served.block()
    served.submit(1, 2, 3)
    served.go.set()
    updates = [served.next() for _ in range(3)]
    assert BatchReleased in [type(end) for update in updates for end in update.completions]
    sent[0].respond(0, Result([Tensor.from_numpy("OUT", np.array([9], np.float32), "FP32")]), True)
    ends, received = served.until(0, 1, 2, 3)
    assert all(isinstance(end, BatchEnded) for end in ends.values())
    assert received == {0: None, 1: 2, 2: 9, 3: 6}


def response(*keys: int) -> bytes:
    return pack_responses(1, [pack_response(key, [Tensor("OUT", "FP32", [1], bytes(4))]) for key in keys])


@pytest.mark.parametrize("sizes", [(1, 1), (1, 3, 2), (17, 1), (40, 40)])
def test_joined_responses_equal_responses_packed_together(sizes: tuple[int, ...]):
    keys = [range(100 * at, 100 * at + size) for at, size in enumerate(sizes)]
    joined = join_responses(1, [response(*of) for of in keys])
    version, rows = unpack_responses(joined)
    assert (version, [row.key for row in rows]) == (1, [key for of in keys for key in of])
    assert all(row.outputs is not None and row.outputs[0].data == bytes(4) for row in rows)


@pytest.mark.parametrize("message", [pack_responses(2, [pack_response(1, [])]), b"", b"\x93"])
def test_responses_of_several_versions_are_not_joined(message: bytes):
    with pytest.raises(ValueError, match="not messages of responses"):
        join_responses(1, [response(1), message])


def test_updates_that_can_not_be_joined_leave_one_by_one():
    published: list[BatchUpdate] = []
    held = HeldUpdates(1, published.append)
    wanted = [
        BatchUpdate("s", (BatchEnded(1),), [("g", response(1))]),
        BatchUpdate("s", (BatchNotRun(2, NotRunReason.DOWN),), [("g", b"odd")]),
    ]
    for update in wanted:
        held.add(update)
    held.flush()
    assert published == wanted
    assert not held


def test_large_responses_are_not_joined(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process_reach(), "message_bytes", 10)
    published: list[BatchUpdate] = []
    held = HeldUpdates(1, published.append)
    completions: list[BatchCompletion] = [BatchEnded(1), BatchEnded(2)]
    for completion in completions:
        held.add(BatchUpdate("s", (completion,), [("g", response(completion.batch_id))], [("first", b"")]))
    held.flush()
    assert published == [
        BatchUpdate("s", completions, [("g", response(1)), ("g", response(2))], [("first", b""), ("first", b"")])
    ]
