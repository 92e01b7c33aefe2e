"""The statistics of a scheduler's models, in the form that gateways read."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.collecting_bus import CollectingBus
from tests.support.scheduling.requests import part
from weir.bus.naming import subjects
from weir.bus.naming.live_queues import LiveQueue
from weir.scheduler.service.owned_queue import OwnedQueue
from weir.scheduler.service.service import SchedulerService
from weir.scheduler.service.statistics import DispatchCounters, reset_unloaded_failures
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.wire.batches import Batches, BatchLost, BatchMessage, Completions
from weir.schemas.wire.calls import Frame
from weir.schemas.wire.registry import ModelRecord, ModelState, VersionRecord
from weir.schemas.wire.statistics import MAX_NAME_LENGTH, SchedulerCounters, unpack_counters

CONFIG = ModelConfig.model_validate({"name": "model", "max_batch_size": 2, "dynamic_batching": {}})


@pytest.fixture
async def bus() -> CollectingBus:
    return CollectingBus()


@pytest.fixture
async def service(bus: CollectingBus) -> SchedulerService:
    service = SchedulerService(bus, "scheduler", None)
    await service.listen()
    return service


@pytest.fixture
async def owned(service: SchedulerService, bus: CollectingBus) -> OwnedQueue:
    owned = await service.serve(LiveQueue("model"), "live-model")
    owned.scheduler.configure(1, CONFIG)
    owned.scheduler.set_instances("worker", {1: 1})
    bus.published.clear()
    return owned


def sent_batches(bus: CollectingBus) -> list[BatchMessage]:
    return [batch for data in bus.taken("work.") for batch in Batches.unpack(data).batches]


def reported(bus: CollectingBus) -> SchedulerCounters:
    bus.deliver(subjects.STATISTICS_QUERY, b"", "asked")
    counters = unpack_counters(bus.taken("asked")[0])
    assert isinstance(counters, SchedulerCounters)
    return counters


def send(bus: CollectingBus, *keys: int, delivered: int = 1) -> None:
    ack = f"$JS.ACK.LIVE.live-model.{delivered}.7.7.1700000000000000000.0"
    bus.deliver("inbox.scheduler.model", Frame("gateway", [part(key) for key in keys]).pack(), ack)


async def test_staged_requests_count_as_pending(bus: CollectingBus, owned: OwnedQueue) -> None:
    send(bus, *range(1, 8))
    (model,) = reported(bus).models
    (version,) = model.versions
    assert (version.version, version.pending) == (1, 5)
    assert model.lanes["live"].depth == 3
    assert model.lanes["live"].oldest_us >= 0
    assert (model.batch_requests.counts[:2], model.batch_requests.sum) == ([0, 2], 4)
    owned.timer.close()


async def test_each_lane_is_counted_separately(bus: CollectingBus, owned: OwnedQueue) -> None:
    send(bus, *range(1, 5))  # which keep the instance busy
    ack = "$JS.ACK.LIVE.live-model.1.7.7.1700000000000000000.0"
    rows = [part(5), part(6, lane=1), part(7, lane=1), part(8, lane=2)]
    bus.deliver("inbox.scheduler.model", Frame("gateway", rows).pack(), ack)
    lanes = reported(bus).models[0].lanes
    assert {name: lane.depth for name, lane in lanes.items()} == {"live": 1, "event": 2, "batch": 1}
    owned.timer.close()


async def test_owners_are_reported_with_what_they_have_in_flight(bus: CollectingBus, owned: OwnedQueue) -> None:
    ack = "$JS.ACK.LIVE.live-model.1.7.7.1700000000000000000.0"
    long = "key " + "x" * 2 * MAX_NAME_LENGTH
    rows = [part(key)._replace(owner="key a", in_flight_limit=2) for key in (1, 2, 3)]
    bus.deliver("inbox.scheduler.model", Frame("gateway", [*rows, part(4)._replace(owner=long), part(5)]).pack(), ack)
    (model,) = reported(bus).models
    assert [(use.owner, use.in_flight, use.refused) for use in model.owners] == [
        ("key a", 2, 1),
        (long[:MAX_NAME_LENGTH], 1, 0),
    ]
    owned.timer.close()


async def test_the_age_of_the_oldest(bus: CollectingBus, owned: OwnedQueue) -> None:
    send(bus, *range(1, 6))
    await asyncio.sleep(0.005)
    send(bus, 6)
    assert reported(bus).models[0].lanes["live"].oldest_us >= 5000
    owned.timer.close()


async def test_repeated_batches_are_counted(bus: CollectingBus, owned: OwnedQueue) -> None:
    send(bus, 1, delivered=2)
    (batch,) = sent_batches(bus)
    bus.deliver("done.scheduler", Completions("worker", [BatchLost(batch.batch_id, 10)]).pack())
    (model,) = reported(bus).models
    assert (model.redelivered_frames, model.retried_batches) == (1, 1)
    bus.deliver("lost.scheduler.worker", b"", status="503")
    assert reported(bus).models[0].retried_batches == 2
    owned.timer.close()


async def test_the_last_counters_are_published_on_exit(
    bus: CollectingBus, service: SchedulerService, owned: OwnedQueue
) -> None:
    bus.deliver("done.scheduler", b"nonsense")
    owned.close = lambda: None  # type: ignore[method-assign]
    await service.stop(0)
    counters = unpack_counters(bus.taken(subjects.LAST_COUNTERS)[0])
    assert isinstance(counters, SchedulerCounters)
    assert (counters.leaving, counters.malformed_messages) == (True, 1)


@pytest.mark.parametrize(
    ("subject", "again"),
    [
        ("$JS.ACK.LIVE.live-m.1.7.7.1700.0", 0),
        ("$JS.ACK.LIVE.live-m.2.7.7.1700.0", 1),
        ("$JS.ACK.domain.account.LIVE.live-m.1.7.7.1700.0.x", 0),
        ("$JS.ACK.domain.account.LIVE.live-m.3.7.7.1700.0.x", 1),
        ("$JS.ACK.1", 0),
    ],
)
def test_how_often_a_frame_was_delivered_is_in_its_ack_subject(subject: str, again: int) -> None:
    counters = DispatchCounters()
    counters.frame_received(subject)
    assert counters.redelivered_frames == again


async def test_failures_end_with_the_version_and_not_with_its_worker(owned: OwnedQueue) -> None:
    version = owned.scheduler.versions()[1]
    version.failures = {"REJECTED": 3}  # type: ignore[attr-defined]
    reset_unloaded_failures(owned.scheduler, [])
    reset_unloaded_failures(owned.scheduler, [ModelRecord("model", {1: VersionRecord(ModelState.LOADING)})])
    assert version.failures == {"REJECTED": 3}  # type: ignore[attr-defined]
    reset_unloaded_failures(
        owned.scheduler, [ModelRecord("model", {1: VersionRecord(ModelState.UNAVAILABLE, "unloaded")})]
    )
    assert version.failures == {"REJECTED": 0}  # type: ignore[attr-defined]
