"""`DirectDispatcher`: which requests of a worker start without the scheduler, where, and what becomes of them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.collecting_bus import CollectingBus
from tests.support.gateway.inference import Bench
from tests.support.scheduling.completions import Outcome, completion
from weir.schemas.core.requests import InferRequest, Lane
from weir.schemas.core.tensors import PayloadRef
from weir.schemas.wire.batches import (
    BatchEnded,
    BatchEntry,
    BatchMessage,
    BatchReleased,
    DirectGrant,
    unpack_completions,
)
from weir.schemas.wire.calls import RequestEnvelope
from weir.worker import direct_dispatch
from weir.worker.direct_dispatch import MAX_AHEAD_US, SLOW_US, DirectDispatcher
from weir.worker.execution.batch import Batch
from weir.worker.execution.instance import ModelInstance
from weir.worker.execution.updates import BatchUpdate


class FakeInstance(ModelInstance):
    """Keeps batches until a test ends them; `of_scheduler` counts batches of a scheduler that it holds."""

    def __init__(self) -> None:
        self.submitted: list[Batch] = []
        self.ended = 0
        self.of_scheduler = 0
        self.runs_directly = True

    @property
    def held(self) -> int:
        return len(self.submitted) - self.ended + self.of_scheduler

    def submit(self, batch: Batch) -> None:
        self.submitted.append(batch)


class Worker:
    """A dispatcher of worker `w` with model `m`, version 1, and what it does."""

    def __init__(self, instances: int = 1, runs_alone: bool = False, max_batch_size: int = 4) -> None:
        self.bus = CollectingBus()
        self.direct = DirectDispatcher(cast(Any, self.bus), "w")
        self.instances = [FakeInstance() for _ in range(instances)]
        config = SimpleNamespace(max_batch_size=max_batch_size)
        served = SimpleNamespace(instances=self.instances, runs_alone=runs_alone, model=SimpleNamespace(config=config))
        self.models: dict[str, Any] = {"m": SimpleNamespace(served={1: served})}
        self.direct.serve(self.models)
        self.pending: dict[int, Any] = {}
        self.responses: list[bytes] = []
        self.requeued: list[int] = []
        self.direct.attach(self.pending.get, self._received, lambda pending: self.requeued.append(pending.key))

    def _received(self, data: bytes) -> None:
        """Ends the requests whose keys a message of responses names."""
        self.responses.append(data)
        for key in map(int, data.split()):
            self.pending.pop(key, None)

    def request(self, key: int, **envelope: Any) -> Any:
        row = RequestEnvelope(key, -1, 1, "", 0, 0, 0, 0, 0, "", b"body")._replace(**envelope)
        pending = SimpleNamespace(
            key=key, queue="m", envelope=row, request=InferRequest("m"), model=SimpleNamespace(name="m")
        )
        self.pending[key] = pending
        return pending

    def take(self, *keys: int, **envelope: Any) -> list[bool]:
        """Whether the requests are taken, in one turn of the event loop."""
        taken = [self.direct.take(self.request(key, **envelope)) for key in keys]
        self.bus.turn()
        return taken

    def grant(self, ms: int = 10_000, us: int = 50, gateway: str = "w", scheduler: str = "s") -> None:
        """A batch of a scheduler with a request of `gateway`, and leave for more."""
        self.request(1000)
        entries = [BatchEntry(gateway, 1000, 0, b"")]
        self.direct.granted(BatchMessage(scheduler, 1, "m", 1, 0, entries), DirectGrant(ms, us))

    def running(self, instance: int = 0) -> list[list[int]]:
        """The keys of the requests of each batch that the instance has got."""
        return [[entry.key for entry in batch.message.entries] for batch in self.instances[instance].submitted]

    async def end(self, instance: int = 0, outcome: Outcome = Outcome.ANSWERED, busy_us: int = 50) -> None:
        """Ends the oldest batch of an instance, as its thread does."""
        ended = self.instances[instance]
        batch = ended.submitted[ended.ended]
        ended.ended += outcome != Outcome.RELEASED
        ended_batch = completion(batch.message.batch_id, outcome, busy_us)
        keys = " ".join(str(entry.key) for entry in batch.message.entries).encode()
        responses = [("w", keys)] if outcome == Outcome.ANSWERED else []
        update = BatchUpdate(batch.message.scheduler, (ended_batch,), responses)
        await asyncio.to_thread(self.direct.update, update)
        await asyncio.sleep(0)

    def reports(self) -> list[Any]:
        return [run for data in self.bus.taken("done.") for run in unpack_completions(data)[1]]


@pytest.fixture
async def worker() -> Worker:
    granted = Worker()
    granted.grant()
    return granted


# Which requests


async def test_without_a_grant_requests_go_to_the_scheduler() -> None:
    worker = Worker()
    assert worker.take(1) == [False]
    worker.grant(gateway="a gateway")
    assert worker.take(1) == [False], "a grant is for a worker whose own request was in the batch"
    worker.grant()
    assert worker.take(1) == [True]
    assert worker.running() == [[1]]


async def test_a_grant_is_for_one_queue_and_version(worker: Worker) -> None:
    assert worker.take(1, version=1) == [False], "the grant is for the latest version, whichever that is"
    assert not worker.direct.take(cast(Any, SimpleNamespace(queue="n", envelope=worker.request(2).envelope)))


@pytest.mark.parametrize("lane", [Lane.EVENT, Lane.BATCH])
async def test_other_lanes_go_to_the_scheduler(worker: Worker, lane: Lane) -> None:
    assert worker.take(1, lane=lane.value) == [False]


async def test_half_way_through_a_grant_one_request_asks_for_the_next(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(direct_dispatch.time, "monotonic", lambda: now_s)
    worker.grant(ms=200)
    now_s = 0.11
    assert worker.take(1, 2, 3) == [False, True, True]
    now_s = 0.14
    assert worker.take(4, 5) == [False, True], "the first has brought nothing yet"
    now_s = 0.2
    assert worker.take(6, 7) == [False, False], "the grant is over"
    worker.grant(ms=200)
    assert worker.take(8) == [True]


async def test_inputs_of_other_hosts_go_to_the_scheduler(worker: Worker) -> None:
    """Whose batch has them fetched. As a step has them: a reference to what another step has put out."""
    bench = Bench(keeps_references=True, direct=worker.direct)
    worker.models["plain"] = worker.models["m"]
    first = bench.submit("1", "plain")
    entries = [BatchEntry("w", first.key, 0, b"")]
    worker.direct.granted(BatchMessage("s", 1, "plain", 1, 0, entries), DirectGrant(10_000, 50))
    here = bench.submit("2", "plain")
    far = bench.submit("3", "plain", PayloadRef("weir-worker-00000000-1_0.1", 0, 1, 0, 1))
    worker.bus.turn()
    await asyncio.sleep(0)
    assert (bench.sent, worker.running()) == ([first.key, far.key], [[here.key]])
    assert far.envelope.payload_host == "00000000"


async def test_requests_beyond_what_runs_in_a_short_time_go_to_the_scheduler() -> None:
    worker = Worker(max_batch_size=1)
    worker.grant(us=MAX_AHEAD_US // 2)
    worker.take(1)
    assert worker.take(2, 3, 4, 5, 6) == [True, True, True, False, False]


async def test_a_slow_model_goes_back_to_the_scheduler(worker: Worker) -> None:
    worker.take(1)
    await worker.end(busy_us=SLOW_US + 1)
    assert worker.take(2) == [False]


# Where, and with which others


async def test_requests_of_one_turn_share_a_batch_and_the_next_ones_wait_for_it(worker: Worker) -> None:
    worker.take(1, 2)
    worker.take(3)
    worker.take(4)
    assert worker.running() == [[1, 2]]
    await worker.end()
    assert worker.running() == [[1, 2], [3, 4]]
    assert worker.responses == [b"1 2"]


async def test_batches_hold_the_models_rows_of_one_shape(worker: Worker) -> None:
    for key, rows, shape in ((1, 2, "a"), (2, 2, "a"), (3, 1, "a"), (4, 1, "b")):
        assert worker.direct.take(worker.request(key, batch_size=rows, shape_key=shape))
    worker.bus.turn()
    for _ in range(3):
        await worker.end()
    assert worker.running() == [[1, 2], [3], [4]]


async def test_without_dynamic_batching_each_request_is_a_batch() -> None:
    worker = Worker(instances=2, runs_alone=True)
    worker.grant()
    worker.take(1, 2, 3)
    assert (worker.running(0), worker.running(1)) == ([[1], [3]], [[2]])


async def test_an_instance_with_a_batch_of_a_scheduler_takes_none() -> None:
    worker = Worker(instances=2)
    worker.grant()
    worker.instances[0].of_scheduler = 1
    worker.take(1)
    assert (worker.running(0), worker.running(1)) == ([], [[1]])
    worker.instances[1].of_scheduler = 1
    worker.take(2)
    assert worker.requeued == [], "it waits for the batch that was started here"
    await worker.end(instance=1)
    assert worker.requeued == [2], "where only batches of a scheduler run, it shares those"


async def test_other_instances_take_none(worker: Worker) -> None:
    worker.instances[0].runs_directly = False
    worker.take(1)
    assert (worker.running(), worker.requeued) == ([], [1])


async def test_requests_for_a_model_that_is_reloaded_go_to_the_scheduler(worker: Worker) -> None:
    worker.take(1)
    worker.take(2)
    worker.direct.forget("m")
    assert worker.requeued == [2]
    assert worker.take(3) == [False]


async def test_requests_for_a_version_that_is_gone_go_to_the_scheduler(worker: Worker) -> None:
    worker.models.clear()
    worker.take(1)
    assert worker.requeued == [1]


# Their end


@pytest.mark.parametrize("outcome", [Outcome.UNANSWERED, Outcome.NOT_RUN])
async def test_a_batch_without_responses_goes_to_the_scheduler(worker: Worker, outcome: Outcome) -> None:
    worker.take(1, 2)
    worker.direct.cancel(worker.pending[2])
    await worker.end(outcome=outcome)
    assert worker.requeued == [1]
    assert worker.take(3) == [True]
    assert worker.running() == [[1, 2], [3]]


async def test_a_released_instance_takes_the_next_batch(worker: Worker) -> None:
    worker.take(1)
    worker.take(2)
    worker.instances[0].ended = 1
    batch = worker.instances[0].submitted[0].message
    worker.direct.update(BatchUpdate("w", (BatchReleased(batch.batch_id, 5),)))
    await asyncio.sleep(0)
    assert worker.running() == [[1], [2]]
    worker.direct.update(BatchUpdate("w", (BatchEnded(batch.batch_id, 0),)))
    await asyncio.sleep(0)
    worker.take(3)
    assert worker.running() == [[1], [2]], "the second batch still runs"


async def test_cancelled_requests_do_not_start_or_are_marked(worker: Worker) -> None:
    worker.take(1)
    worker.take(2, 3)
    for key in (1, 2):
        worker.direct.cancel(worker.pending[key])
    await worker.end()
    assert worker.instances[0].submitted[0].cancelled == {0}
    assert worker.running() == [[1], [3]]


async def test_a_deadline_and_the_time_of_waiting_go_along(worker: Worker) -> None:
    worker.take(1, deadline_ms=77)
    worker.take(2)
    await asyncio.sleep(0.002)
    await worker.end()
    first, second = (batch.message.entries[0] for batch in worker.instances[0].submitted)
    assert (first.gateway, first.deadline_ms, first.body) == ("w", 77, b"body")
    assert second.queued_us >= 2000


async def test_requests_whose_responses_can_not_be_delivered_go_to_the_scheduler(worker: Worker) -> None:
    def fail(_data: bytes) -> None:
        raise RuntimeError("injected")

    worker.direct.attach(worker.pending.get, fail, lambda pending: worker.requeued.append(pending.key))
    worker.take(1)
    worker.take(2)
    await worker.end()
    assert worker.requeued == [1]
    assert worker.running() == [[1], [2]]


async def test_a_lost_response_before_the_end_of_a_batch_sends_its_request_to_the_scheduler(worker: Worker) -> None:
    """As of a model that responds during its run: the end of the batch carries no response."""
    worker.take(1, 2)
    (batch,) = worker.instances[0].submitted
    worker.direct.update(BatchUpdate("w", (), [("w", b"1")]))
    await asyncio.sleep(0)
    worker.direct.update(BatchUpdate("w", (BatchEnded(batch.message.batch_id, 50),)))
    await asyncio.sleep(0)
    assert worker.requeued == [2], "the response to request 2 was lost on the way"


async def test_requests_that_can_not_be_started_go_to_the_scheduler(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_batch: Batch) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(worker.instances[0], "submit", fail)
    worker.take(1, 2)
    assert worker.requeued == [1, 2]


# Reports


async def test_runs_are_reported_to_the_scheduler_that_granted_them(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_dispatch, "REPORT_DELAY_S", 0.0)
    worker.take(1, 2)
    worker.take(3)
    await worker.end(busy_us=10)
    await worker.end(busy_us=20)
    worker.grant(scheduler="t")
    worker.take(4)
    await worker.end(busy_us=40)
    await asyncio.sleep(0.001)
    subjects = [subject for subject, _, _ in worker.bus.published]
    assert {"done.s", "done.t"} == set(subjects)
    runs = worker.reports()
    assert {(run.model, run.version) for run in runs} == {("m", 1)}
    sizes = [size for run in runs for size in run.sizes]
    assert sum(size * batches for size, batches in sizes) == 4
    assert sum(run.busy_us for run in runs) == 70
