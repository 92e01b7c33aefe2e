"""The memory limit of queues, their release, and the report of lost attempts."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.collecting_bus import CollectingBus
from tests.support.scheduling.requests import part
from weir.bus.naming.live_queues import LiveQueue
from weir.scheduler.service.owned_queue import (
    ACK_DELAY_S,
    MAX_BUFFERED_BYTES,
    MAX_TOTAL_BUFFERED_BYTES,
    MIN_BUFFERED_BYTES,
    AckBundle,
    BufferedFrames,
    OwnedQueue,
    TotalBufferedFrames,
)
from weir.scheduler.service.service import SchedulerService
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.wire.batches import BatchEnded, Batches, BatchMessage, BatchRefused, Completions
from weir.schemas.wire.calls import Cancellation, Frame
from weir.schemas.wire.statistics import SchedulerCounters, unpack_counters

MIB = 1 << 20


def sent_batches(bus: CollectingBus) -> list[BatchMessage]:
    return [batch for data in bus.taken("work.") for batch in Batches.unpack(data).batches]


def test_a_full_queue_stays_full_until_half_of_the_limit_is_free() -> None:
    held = BufferedFrames(TotalBufferedFrames())
    assert not held.add(MAX_BUFFERED_BYTES)
    assert held.add(1)
    assert not held.add(1), "it was before"
    assert not held.remove(MAX_BUFFERED_BYTES // 2 + 1)
    assert held.remove(1)


def test_a_queue_that_holds_little_is_not_blocked_by_others() -> None:
    of_all = TotalBufferedFrames()
    others = [BufferedFrames(of_all) for _ in range(3)]
    for other in others:
        other.add(MAX_TOTAL_BUFFERED_BYTES // 3 + 1)
    own = BufferedFrames(of_all)
    assert not own.add(MIN_BUFFERED_BYTES)
    assert own.add(1)
    assert own.remove(MIN_BUFFERED_BYTES // 2 + 1), "the amount it may always hold is free again"
    others[0].clear()
    assert of_all.size_bytes == 2 * (MAX_TOTAL_BUFFERED_BYTES // 3 + 1) + MIN_BUFFERED_BYTES // 2


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 64), st.booleans()), max_size=200))
def test_whatever_comes_and_goes(events: list[tuple[int, int, bool]]) -> None:
    """A queue that pulls only while it has room exceeds the limit by one frame at most, and resumes once all has ended."""
    of_all = TotalBufferedFrames()
    queues = [BufferedFrames(of_all) for _ in range(6)]
    frames: list[list[int]] = [[] for _ in queues]
    for number, mib, comes in events:
        queue, of_queue = queues[number], frames[number]
        if comes and not queue.is_full:
            of_queue.append(mib * MIB)
            queue.add(of_queue[-1])
        elif of_queue and not comes:
            queue.remove(of_queue.pop())
        assert of_all.size_bytes == sum(map(sum, frames))
        assert sum(of_queue) <= MAX_BUFFERED_BYTES + 64 * MIB
        assert of_all.size_bytes <= MAX_TOTAL_BUFFERED_BYTES + len(queues) * (MIN_BUFFERED_BYTES + 64 * MIB)
    for queue, of_queue in zip(queues, frames, strict=True):
        while of_queue:
            queue.remove(of_queue.pop())
    assert not any(queue.is_full for queue in queues)


QUEUE = LiveQueue("model")
CONFIG = {"name": "model", "max_batch_size": 4, "dynamic_batching": {}}


async def serving(bus: CollectingBus) -> tuple[SchedulerService, OwnedQueue]:
    service = SchedulerService(bus, "scheduler", None)  # type: ignore[arg-type]
    await service.listen()
    return service, await owned_again(service, 7)


async def owned_again(service: SchedulerService, epoch: int) -> OwnedQueue:
    owned = await service.serve(QUEUE, "live-model", epoch)
    owned.scheduler.configure(1, ModelConfig.model_validate(CONFIG))
    owned.scheduler.set_instances("worker", {1: 1})
    return owned


def frame(bus: CollectingBus, *keys: int) -> None:
    bus.deliver("inbox.scheduler.model", Frame("gateway", [part(key) for key in keys]).pack(), "$JS.ACK.1")


def done(bus: CollectingBus, batch_id: int, epoch: int = 0) -> None:
    ended = BatchRefused(batch_id, epoch) if epoch else BatchEnded(batch_id, 10)
    bus.deliver("done.scheduler", Completions("worker", [ended]).pack())


def counters(bus: CollectingBus) -> SchedulerCounters:
    bus.deliver("statistics.query", b"", "told")
    reported = unpack_counters(bus.taken("told")[-1])
    assert isinstance(reported, SchedulerCounters)
    return reported


async def test_a_lost_queue_sends_nothing_any_more() -> None:
    bus = CollectingBus()
    service, owned = await serving(bus)
    frame(bus, 1)
    (batch,) = sent_batches(bus)
    assert (batch.epoch, batch.partition) == (7, 0)
    frame(bus, 2, 3)
    service.queues.drop(owned)
    bus.published.clear()
    done(bus, batch.batch_id)
    bus.deliver("cancel.model", Cancellation("gateway", [2, 3]).pack())
    frame(bus, 4)
    assert [subject for subject, _, _ in bus.published if subject.startswith(("$JS.ACK", "work", "reply"))] == []
    assert not service.queues.by_name


async def test_batches_rejected_by_a_worker_wait_until_the_owner_is_known() -> None:
    bus = CollectingBus()
    service, owned = await serving(bus)
    refused: list[int] = []
    service.queues.on_batch_rejected = lambda of, epoch: refused.append(epoch)
    frame(bus, 1)
    (batch,) = sent_batches(bus)
    done(bus, batch.batch_id, 9)
    frame(bus, 2)
    assert (refused, bus.taken("work.")) == ([9], [])
    owned.epoch = 10
    service.queues.resume(owned)
    bus.turn()
    (again,) = sent_batches(bus)
    assert (again.epoch, [entry.key for entry in again.entries]) == (10, [1])
    done(bus, again.batch_id)
    assert len(owned.scheduler) == 0


async def test_a_closed_gate_buffers_events() -> None:
    bus = CollectingBus()
    service, _ = await serving(bus)
    service.lease_gate.close()
    frame(bus, 1)
    assert bus.taken("work.") == []
    assert service.lease_gate.reopen(time.monotonic())
    bus.turn()
    assert len(bus.taken("work.")) == 1


async def test_counters_of_a_queue_outlast_its_owner_and_are_not_doubled() -> None:
    bus = CollectingBus()
    service, owned = await serving(bus)
    frame(bus, 1, 2)
    (batch,) = sent_batches(bus)
    done(bus, batch.batch_id)
    frame(bus, 3)
    owned.scheduler.versions()[1].failures["REJECTED"] += 2
    for _ in range(2):
        service.queues.drop(owned)
        reported = counters(bus)
        assert sum(sum(queue.batch_requests.counts) for queue in reported.models) == 2
        assert sum(version.failures["REJECTED"] for queue in reported.models for version in queue.versions) == 2
        assert sum(version.pending for queue in reported.models for version in queue.versions) == 0
        assert not any(queue.lanes for queue in reported.models)
        owned = await owned_again(service, 9)
        reported = counters(bus)
        assert sum(sum(queue.batch_requests.counts) for queue in reported.models) == 2
        assert sum(version.failures["REJECTED"] for queue in reported.models for version in queue.versions) == 2


class AckLoop:
    """An event loop's clock and calls, for `AckBundle`."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now_s

    def call_soon(self, act: Callable[[], None]) -> None:
        self.due.append((self.now_s, act))

    def call_later(self, delay_s: float, act: Callable[[], None]) -> None:
        self.due.append((self.now_s + delay_s, act))

    def run_until(self, now_s: float) -> None:
        """Makes the calls that are due, and ends at `now_s`."""
        while self.due and min(self.due)[0] <= now_s + 1e-9:
            self.due.sort(key=lambda call: call[0])
            self.now_s, act = self.due.pop(0)
            act()
        self.now_s = now_s


def ack_bundle(monkeypatch: pytest.MonkeyPatch) -> tuple[AckBundle, AckLoop, list[tuple[float, str]]]:
    loop, published = AckLoop(), list[tuple[float, str]]()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    return AckBundle(lambda subject, data: published.append((loop.now_s, subject))), loop, published


def test_the_first_acknowledgement_after_a_pause_leaves_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    acks, loop, published = ack_bundle(monkeypatch)
    acks.add("a")
    acks.add("b")
    assert not published  # others of this turn go with it
    loop.run_until(100.0)
    assert published == [(100.0, "a"), (100.0, "b")]
    loop.run_until(100.0 + ACK_DELAY_S)
    acks.add("c")
    loop.run_until(loop.now_s)
    assert published[2] == (100.0 + ACK_DELAY_S, "c")
    assert not loop.due


def test_acknowledgements_leave_together_at_most_once_in_their_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    acks, loop, published = ack_bundle(monkeypatch)
    for step in range(100):
        loop.run_until(100.0 + step * 0.001)
        acks.add(str(step))
    loop.run_until(101.0)
    assert [subject for _, subject in published] == [str(step) for step in range(100)]
    moments = sorted({moment_s for moment_s, _ in published})
    assert all(later - earlier > ACK_DELAY_S - 1e-6 for earlier, later in itertools.pairwise(moments))
    assert len(moments) <= 21
