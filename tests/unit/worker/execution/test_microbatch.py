"""`Microbatch`: batches that go to a process in one message. Each ends by itself; those that have not started may leave."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.waiting import wait_until
from tests.support.worker.single_batches import CONFIG, Ends, batch_of
from weir.schemas.core.errors import internal
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import Tensor
from weir.schemas.wire.batches import BatchEnded, BatchLost, BatchNotRun, BatchReleased, NotRunReason
from weir.worker.backend_api.interface import (
    EndedRequest,
    Execution,
    Instance,
    InstanceDevice,
    InstanceDied,
    InstanceUnavailable,
    ModelVersion,
    Result,
)
from weir.worker.execution.batch import Batch
from weir.worker.execution.instance import InstanceSpec, ModelEnvironment, ModelInstance
from weir.worker.execution.statistics import ModelStatistics

RUN_NS = 1_000_000


def doubled(number: int) -> Result:
    return Result([Tensor.from_numpy("OUT", np.array([2 * number], np.float32), "FP32")])


class Run:
    """A run that a test moves on: requests end when it says so, with twice their number by default."""

    def __init__(self, numbers: list[int], execution: Execution) -> None:
        self.death = ""
        self.execution = execution
        self.closed = False
        self.withdrawn = range(len(numbers), len(numbers))
        self._changed = threading.Condition()
        self._numbers = numbers
        self._ended: list[EndedRequest] = []
        self._next = 0
        self._end_ns = time.monotonic_ns()
        self._end = len(numbers)
        self.lost: Sequence[int] = ()

    def end(self, count: int = 1, result: Result | str | None = "") -> None:
        with self._changed:
            for _ in range(count):
                made = doubled(self._numbers[self._next]) if isinstance(result, str) else result
                start_ns, self._end_ns = self._end_ns, self._end_ns + RUN_NS
                self._ended.append(EndedRequest(self._next, made, start_ns, self._end_ns))
                self._next += 1
            self._changed.notify_all()

    def die(self) -> None:
        with self._changed:
            self.lost = range(self._next, self._next + 1)
            self.death = "killed"
            self._changed.notify_all()

    def stop(self) -> None:
        """Starts no more requests, as a process whose memory for outputs is full."""
        with self._changed:
            self._end = self._next
            self._changed.notify_all()

    def wait(self, timeout_s: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.death or self._next >= self._end, timeout_s) is not False

    def ended(self) -> Sequence[EndedRequest]:
        with self._changed:
            ended, self._ended = self._ended, []
            return ended

    @property
    def unstarted(self) -> int:
        return max(0, self._end - self._next - 1)

    def withdraw(self) -> Sequence[int]:
        with self._changed:
            withdrawn = range(min(self._next + 1, self._end), self._end)
            self._end = withdrawn.start
            self.withdrawn = range(self._end, len(self._numbers))
            self._changed.notify_all()
            return withdrawn

    def close(self) -> None:
        self.closed = True


class Model:
    """The first batch, with a negative number, runs until `go` is set, so that the next ones wait together."""

    def __init__(self) -> None:
        self.runs: queue.SimpleQueue[Run] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self.go = threading.Event()

    def start_microbatch(self, requests: Sequence[InferRequest], execution: Execution) -> Run:
        if self.error is not None:
            raise self.error
        execution.input_ready()
        run = Run([int(request.inputs[0].to_numpy().item()) for request in requests], execution)
        self.runs.put(run)
        return run

    def execute(self, requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None]:
        assert self.go.wait(10)
        return [Result() for _ in requests]

    def close(self) -> None:
        pass


class Served(Ends):
    """An instance of `Model` with its thread."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model = Model()
        self.statistics = ModelStatistics()

        class Loaded:
            is_isolated = True

            def create_instance(self, device: InstanceDevice) -> Instance:
                return model

            def unload(self) -> None:
                pass

        environment = ModelEnvironment(arena_prefix="test", on_update=self.published.put)
        spec = InstanceSpec(InstanceDevice("KIND_CPU", 0, "m_0_0"), "test")
        self.instance = ModelInstance(
            Loaded(), ModelVersion("m", 1, Path(), CONFIG), spec, self.statistics, environment
        )
        self.instance.start()

    def submit(self, *numbers: int, late: int = 0, scheduler: str = "scheduler") -> list[Batch]:
        batches = [batch_of(number, deadline_ms=int(number == late), scheduler=scheduler) for number in numbers]
        for batch in batches:
            self.instance.submit(batch)
        return batches

    def go(self) -> None:
        """Lets the first batch end, and with it the waiting ones start."""
        self.model.go.set()
        assert self.until(-1) == ({-1: BatchEnded(-1, self.busy_us[-1])}, {-1: None})
        self.statistics.__init__()  # type: ignore[misc]

    def started(self, *numbers: int, late: int = 0) -> tuple[Run, list[Batch]]:
        self.submit(-1)
        wait_until(lambda: self.instance.unstarted == 0)
        batches = self.submit(*numbers, late=late)
        self.go()
        return self.model.runs.get(timeout=10), batches


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    # Only a fast instance takes batches together, and the first batch of a test is slow.
    monkeypatch.setattr("weir.worker.execution.instance.FAST_US", 60_000_000)
    made = Served()
    yield made
    made.model.go.set()
    made.instance.stop()
    assert made.published.empty()
    assert made.instance.held == 0


def test_all_responses_leave_together_and_each_is_counted(served: Served) -> None:
    run, _ = served.started(*range(1, 17))
    run.end(16)
    update = served.next()
    assert [completion.batch_id for completion in update.completions] == list(range(1, 17))
    assert all(
        isinstance(completion, BatchEnded) and completion.busy_us > RUN_NS // 2000 for completion in update.completions
    )
    assert len(update.responses) == 1
    assert served.outputs == {number: 2 * number for number in range(1, 17)}
    counted = served.statistics.snapshot()
    assert (counted["success"][0], counted["inference_count"], counted["execution_count"]) == (16, 16, 16)
    assert {size: row[0] for size, row in counted["batches"].items()} == {1: 16}
    assert counted["compute_infer"] == [16, 16 * RUN_NS]
    assert counted["batches"][1][2] == 16 * RUN_NS
    phases_ns = sum(counted[name][1] for name in ("queue", "compute_input", "compute_infer", "compute_output"))
    assert counted["success"][1] == phases_ns


def test_a_batch_that_fails_does_not_affect_others(served: Served) -> None:
    run, _ = served.started(1, 2, 3)
    run.end()
    run.end(result=Result(error=internal("broken")))
    run.end()
    assert served.until(1, 2, 3)[1] == {1: 2, 2: "broken", 3: 6}
    counted = served.statistics.snapshot()
    assert (counted["success"][0], counted["fail"][0], counted["execution_count"]) == (2, 1, 3)
    assert counted["failures"]["BACKEND"] == 1


def test_batches_end_while_a_later_one_runs(served: Served) -> None:
    run, _ = served.started(1, 2, 3)
    run.end(2)
    ends, received = served.until(1, 2)
    assert (set(map(type, ends.values())), received) == ({BatchEnded}, {1: 2, 2: 4})
    assert served.statistics.snapshot()["success"][0] == 2
    run.end()
    assert served.until(3)[1] == {3: 6}
    counted = served.statistics.snapshot()
    assert (counted["success"][0], counted["execution_count"]) == (3, 3)
    wait_until(lambda: run.closed)


def test_batches_that_have_not_started_can_be_withdrawn(served: Served) -> None:
    run, batches = served.started(1, 2, 3)
    behind = served.submit(4)
    wait_until(lambda: served.instance.unstarted == 3)
    assert served.instance.withdraw() == [*batches[1:], *behind]
    assert (served.instance.unstarted, served.instance.held) == (0, 1)
    run.end()
    assert served.until(1)[1] == {1: 2}


def test_only_the_batch_that_ran_is_lost_with_the_instance(served: Served) -> None:
    run, _ = served.started(1, 2, 3, 4)
    run.end()
    run.die()
    ends, received = served.until(1, 2, 3, 4)
    assert received == {1: 2}
    assert isinstance(ends[1], BatchEnded)
    assert [ends[number] for number in (2, 3, 4)] == [
        BatchLost(2),
        BatchNotRun(3, NotRunReason.DOWN),
        BatchNotRun(4, NotRunReason.DOWN),
    ]


def test_what_was_withdrawn_before_the_instance_died_is_not_ended_again(served: Served) -> None:
    run, batches = served.started(1, 2)
    assert served.instance.withdraw() == batches[1:]
    run.die()
    assert served.until(1)[0] == {1: BatchLost(1)}


def test_a_process_may_start_no_more(served: Served) -> None:
    run, _ = served.started(1, 2)
    run.end()
    run.stop()
    ends, received = served.until(1, 2)
    assert (ends[2], received) == (BatchNotRun(2, NotRunReason.SLOW), {1: 2})


def test_a_request_with_a_response_does_not_run_again(served: Served) -> None:
    run, _ = served.started(1, 2)
    run.execution.respond(0, doubled(9), True)
    run.die()
    ends, received = served.until(1, 2)
    assert received == {1: 18}
    assert isinstance(ends[1], BatchEnded)
    assert ends[2] == BatchNotRun(2, NotRunReason.DOWN)


def test_a_request_whose_sender_is_lost_fails(served: Served) -> None:
    run, _ = served.started(1, 2)
    run.end(result=None)
    assert isinstance(served.next().completions[0], BatchReleased)
    run.execution.fail(internal("lost"))
    run.die()
    ends, received = served.until(1, 2)
    assert (type(ends[1]), ends[2], received) == (BatchEnded, BatchLost(2), {1: "lost"})


def test_a_sender_may_be_lost_before_its_request_is_known_to_have_run(served: Served) -> None:
    run, _ = served.started(1, 2)
    run.execution.fail(internal("lost"))
    run.end(result=None)
    run.end()
    _, received = served.until(1, 2)
    assert received == {1: "lost", 2: 4}


def test_a_model_may_respond_after_it_has_returned(served: Served) -> None:
    run, _ = served.started(1, 2)
    run.end()
    assert served.until(1)[1] == {1: 2}
    run.end(result=None)
    assert isinstance(served.next().completions[0], BatchReleased)
    run.execution.respond(1, doubled(9), True)
    ends, received = served.until(2)
    assert (ends, received) == ({2: BatchEnded(2, 0, [])}, {2: 18})
    counted = served.statistics.snapshot()
    assert (counted["success"][0], counted["execution_count"]) == (2, 2)


@pytest.mark.parametrize(
    ("error", "end"),
    [(InstanceDied("gone"), BatchLost), (InstanceUnavailable("gone"), BatchNotRun), (ValueError("odd"), BatchEnded)],
)
def test_an_instance_may_fail_to_start(served: Served, error: Exception, end: type) -> None:
    served.model.error = error
    served.submit(-1)
    wait_until(lambda: served.instance.unstarted == 0)
    served.submit(1, 2)
    served.go()
    ends, received = served.until(1, 2)
    assert set(map(type, ends.values())) == {end}
    assert received == ({1: "ValueError: odd", 2: "ValueError: odd"} if end is BatchEnded else {})


def test_requests_that_are_cancelled_or_late_do_not_run(served: Served) -> None:
    served.submit(-1)
    wait_until(lambda: served.instance.unstarted == 0)
    first, *_ = served.submit(1, 2, 3, late=2)
    first.cancel("gateway", [1])
    served.go()
    run = served.model.runs.get(timeout=10)
    run.end()
    _, received = served.until(1, 2, 3)
    assert (received[2], received[3]) == ("Request timeout expired", 6)
    assert "cancelled" in received[1]


def test_a_batch_of_several_requests_goes_alone(served: Served) -> None:
    served.submit(-1)
    wait_until(lambda: served.instance.unstarted == 0)
    several = batch_of(2)
    several.message.entries.append(batch_of(3).message.entries[0])
    served.submit(1)
    served.instance.submit(several)
    served.submit(4, 5)
    served.go()
    run = served.model.runs.get(timeout=10)
    assert served.until(1, 2)[1] == {1: None, 2: None, 3: None}
    run.end(2)
    assert served.until(4, 5)[1] == {4: 8, 5: 10}


def test_batches_of_several_schedulers_do_not_share_a_message(served: Served) -> None:
    served.submit(-1)
    wait_until(lambda: served.instance.unstarted == 0)
    served.submit(1, 2)
    served.submit(3, 4, scheduler="other")
    served.go()
    for numbers in ((1, 2), (3, 4)):
        run = served.model.runs.get(timeout=10)
        run.end(2)
        assert served.until(*numbers)[1] == {number: 2 * number for number in numbers}


def test_an_unexpected_exception_ends_the_batches_that_have_not(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = served.started(1, 2, 3)
    run.end()
    assert served.until(1)[1] == {1: 2}
    assert len(served.instance.withdraw()) == 1

    def raise_error() -> Sequence[EndedRequest]:
        raise RuntimeError("injected")

    monkeypatch.setattr(run, "ended", raise_error)
    run.end()
    ends, received = served.until(2)
    assert (type(ends[2]), received) == (BatchEnded, {2: "RuntimeError: injected"})
