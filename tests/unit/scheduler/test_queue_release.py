"""Queues that are let go of, lost and taken again: nothing more is said of what was there, and counters stay."""

from __future__ import annotations

from collecting_bus import CollectingBus
from queued import part

from bus.live_queues import LiveQueue
from scheduler.owned_model import OwnedModel
from scheduler.service import SchedulerService
from schemas.messages import BatchOutcome, Done, pack_cancel, pack_done, pack_frame, unpack_batch
from schemas.model_config import ModelConfig
from schemas.statistics import SchedulerCounters, unpack_counters

QUEUE = LiveQueue("model")
CONFIG = {"name": "model", "max_batch_size": 4, "dynamic_batching": {}}


async def serving(bus: CollectingBus) -> tuple[SchedulerService, OwnedModel]:
    service = SchedulerService(bus, "scheduler", None)  # type: ignore[arg-type]
    await service.listen()
    return service, await owned_again(service, 7)


async def owned_again(service: SchedulerService, epoch: int) -> OwnedModel:
    owned = await service.own(QUEUE, "live-model", epoch)
    owned.scheduler.configure(1, ModelConfig.model_validate(CONFIG))
    owned.scheduler.set_instances("worker", {1: 1})
    return owned


def frame(bus: CollectingBus, *keys: int) -> None:
    bus.deliver("inbox.scheduler.model", pack_frame("gateway", [part(key) for key in keys]), "$JS.ACK.1")


def done(bus: CollectingBus, batch_id: int, outcome: int = BatchOutcome.ANSWERED, number: int = 10) -> None:
    bus.deliver("done.scheduler", pack_done("worker", [Done(batch_id, outcome, number)]))


def counters(bus: CollectingBus) -> SchedulerCounters:
    bus.deliver("statistics.query", b"", "told")
    told = unpack_counters(bus.taken("told")[-1])
    assert isinstance(told, SchedulerCounters)
    return told


async def test_of_a_queue_that_is_lost_nothing_is_said_any_more() -> None:
    bus = CollectingBus()
    service, owned = await serving(bus)
    frame(bus, 1)
    (batch,) = map(unpack_batch, bus.taken("work."))
    assert (batch.epoch, batch.partition) == (7, 0)
    frame(bus, 2, 3)
    service.drop(owned)
    bus.published.clear()
    done(bus, batch.batch_id)
    bus.deliver("cancel.model", pack_cancel("gateway", [2, 3]))
    frame(bus, 4)
    assert [subject for subject, _, _ in bus.published if subject.startswith(("$JS.ACK", "work", "reply"))] == []
    assert service.unanswered == 0


async def test_what_a_worker_refuses_is_kept_until_it_is_known_whose_the_queue_is() -> None:
    bus = CollectingBus()
    service, owned = await serving(bus)
    refused: list[int] = []
    service.on_refused = lambda of, epoch: refused.append(epoch)
    frame(bus, 1)
    (batch,) = map(unpack_batch, bus.taken("work."))
    done(bus, batch.batch_id, BatchOutcome.REFUSED, 9)
    frame(bus, 2)
    assert (refused, bus.taken("work.")) == ([9], [])
    owned.epoch = 10
    service.resume(owned)
    bus.turn()
    (again,) = map(unpack_batch, bus.taken("work."))
    assert (again.epoch, [entry.key for entry in again.entries]) == (10, [1])
    done(bus, again.batch_id)
    assert service.unanswered == 0


async def test_a_fence_that_is_shut_keeps_what_comes() -> None:
    bus = CollectingBus()
    service, _ = await serving(bus)
    service.fence.shut()
    frame(bus, 1)
    assert bus.taken("work.") == []
    assert service.fence.open(service.fence._clock())
    bus.turn()
    assert len(bus.taken("work.")) == 1


async def test_counters_of_a_queue_outlast_its_owner_and_are_not_doubled() -> None:
    bus = CollectingBus()
    service, owned = await serving(bus)
    frame(bus, 1, 2)
    (batch,) = map(unpack_batch, bus.taken("work."))
    done(bus, batch.batch_id)
    frame(bus, 3)
    owned.scheduler.versions()[1].failures["REJECTED"] += 2
    for _ in range(2):
        service.drop(owned)
        told = counters(bus)
        assert sum(sum(queue.batch_requests.counts) for queue in told.models) == 2
        assert sum(version.failures["REJECTED"] for queue in told.models for version in queue.versions) == 2
        assert sum(version.pending for queue in told.models for version in queue.versions) == 0
        assert not any(queue.lanes for queue in told.models)
        owned = await owned_again(service, 9)
        told = counters(bus)
        assert sum(sum(queue.batch_requests.counts) for queue in told.models) == 2
        assert sum(version.failures["REJECTED"] for queue in told.models for version in queue.versions) == 2
