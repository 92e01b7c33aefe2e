"""Batches between the bus and instances: dispatch, publication, cancellation, ownership, and failures of any of them."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.collecting_bus import CollectingBus
from tests.support.contained_sites import fail_for
from tests.support.scheduling.completions import Outcome, completion
from tests.support.waiting import eventually
from weir.schemas.wire.batches import (
    BatchCompletion,
    BatchEnded,
    BatchEntry,
    Batches,
    BatchLost,
    BatchMessage,
    BatchNotRun,
    BatchRefused,
    NotRunReason,
    QueueOwner,
    RunningCancellation,
    unpack_completions,
)
from weir.schemas.wire.calls import SlotRelease, unpack_responses
from weir.schemas.wire.codec import WIRE_VERSION, MalformedMessage, encode
from weir.worker import batch_dispatch
from weir.worker.batch_dispatch import BatchDispatcher, OwnershipFence
from weir.worker.execution.batch import Batch
from weir.worker.execution.instance import ModelInstance
from weir.worker.execution.updates import BatchUpdate


class FakeInstance:
    """Keeps batches and released slots."""

    def __init__(self) -> None:
        self.submitted: list[Batch] = []
        self.released: list[int] = []
        self.arena_name = "arena"
        self.slots_held = 3

    needs_watch = False

    def submit(self, batch: Batch, more_follow: bool = False) -> None:
        self.submitted.append(batch)

    def release(self, _segment: str, slot: int, _generation: int) -> None:
        self.released.append(slot)


class Worker:
    """A dispatcher with model `m`, versions 1 and 2, one instance, and what it publishes."""

    def __init__(self) -> None:
        self.bus = CollectingBus()
        self.published: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self.dispatcher = BatchDispatcher(
            cast(Any, self.bus), cast(Any, SimpleNamespace(send=self.sent, publish=self.sent_to_the_broker)), "w"
        )
        self.instance = FakeInstance()
        served = SimpleNamespace(
            instances=[self.instance],
            instance=lambda number: self.instance if number == 0 else None,
            runs_alone=False,
            is_numbered=False,
            obstacle=lambda instance: None,
            unload=lambda wait_for_readers: None,
        )
        self.result = cast(Any, SimpleNamespace(name="m", served={1: served, 2: served}, config=None))
        self.dispatcher.install(self.result)

    def sent(
        self, messages: Sequence[tuple[str, bytes]], last: Sequence[tuple[str, bytes]], on_sent: Callable[[], None]
    ) -> None:
        for message in (*messages, *last):
            self.published.put(message)
        on_sent()

    def sent_to_the_broker(self, messages: Sequence[tuple[str, bytes]], on_sent: Callable[[], None]) -> None:
        self.sent(messages, (), on_sent)

    def send(self, batch_id: int, instance: int = 0, version: int = 1, epoch: int = 0) -> None:
        entries = [BatchEntry("gateway", batch_id, 0, b"")]
        batch = BatchMessage("s", batch_id, "m", version, instance, entries, epoch=epoch)
        self.bus.deliver("work.w", Batches([batch]).pack())

    def complete(self, batch_id: int, outcome: int = Outcome.ANSWERED) -> None:
        self.dispatcher.publish(BatchUpdate("s", (completion(batch_id, outcome, 3),)))

    def completion(self) -> BatchCompletion:
        """The next published completion."""
        (ended,) = unpack_completions(self.published.get_nowait()[1])[0]
        return ended


@pytest.fixture
async def worker() -> Worker:
    started = Worker()
    await started.dispatcher.start()
    return started


# Dispatch


async def test_batches_are_held_until_their_completion_was_sent(worker: Worker) -> None:
    worker.send(1)
    worker.send(2)
    assert [batch.message.batch_id for batch in worker.instance.submitted] == [1, 2]
    assert worker.dispatcher.held_ids() == {"s": [1, 2]}
    worker.complete(1, Outcome.RELEASED)
    assert worker.dispatcher.held_ids() == {"s": [1, 2]}, "a released batch goes on"
    worker.complete(1)
    assert worker.dispatcher.held_ids() == {"s": [2]}


@pytest.mark.parametrize("first", [[], [("first", b"f")]], ids=["plain", "checkpoint"])
async def test_responses_are_sent_before_the_completion(worker: Worker, first: list[tuple[str, bytes]]) -> None:
    worker.send(1)
    worker.dispatcher.publish(BatchUpdate("s", (BatchEnded(1, 3),), [("gateway", b"r"), ("", b"x")], first))
    subjects = [worker.published.get_nowait()[0] for _ in range(2 + len(first))]
    assert subjects == [*(["first"] if first else []), "reply.gateway", "done.s"], "no caller, no response"


async def test_the_ends_of_several_batches_are_one_message(worker: Worker) -> None:
    worker.send(1)
    worker.send(2)
    worker.dispatcher.publish(BatchUpdate("s", (BatchEnded(1), BatchEnded(2)), [("gateway", b"r")]))
    sent = [worker.published.get_nowait() for _ in range(2)]
    assert [subject for subject, _ in sent] == ["reply.gateway", "done.s"]
    assert [end.batch_id for end in unpack_completions(sent[1][1])[0]] == [1, 2]
    assert worker.dispatcher.held_ids() == {}


async def test_an_update_of_a_batch_that_was_started_directly_is_not_published(worker: Worker) -> None:
    worker.dispatcher.publish(BatchUpdate("w", (BatchEnded(1, 3),), [("w", b"r")]))
    assert worker.published.empty()


async def test_a_failure_in_the_update_of_a_batch_that_was_started_directly_ends_that_batch(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates: list[BatchUpdate] = []

    def update(given: BatchUpdate) -> None:
        updates.append(given)
        if len(updates) == 1:
            raise RuntimeError("injected")

    monkeypatch.setattr(worker.dispatcher._direct, "update", update)
    worker.dispatcher.publish(BatchUpdate("w", (BatchEnded(1, 3),), [("w", b"r")]))
    assert updates[1] == BatchUpdate("w", [BatchLost(1, 3)])
    assert worker.published.empty()


async def test_a_batch_for_a_version_that_is_not_loaded_is_rejected(worker: Worker) -> None:
    worker.send(1, version=9)
    worker.dispatcher.uninstall("m")
    worker.send(2)
    for batch_id in (1, 2):
        (row,) = unpack_responses(worker.published.get_nowait()[1])[1]
        assert row.error is not None
        assert "is not at ready state" in row.error.message
        assert worker.completion() == BatchEnded(batch_id, 0, [])


@pytest.mark.parametrize(("is_numbered", "end"), [(False, BatchNotRun(1, NotRunReason.GONE)), (True, BatchLost(1))])
async def test_a_batch_for_an_instance_that_is_gone_is_lost_only_with_the_states_of_sequences(
    worker: Worker, is_numbered: bool, end: BatchCompletion
) -> None:
    worker.result.served[1].is_numbered = is_numbered
    worker.send(1, instance=5)
    assert worker.completion() == end


async def test_malformed_messages_are_counted(worker: Worker) -> None:
    for subject in ("work.w", "abandoned.w", "release.w", "owner.*"):
        worker.bus.deliver(subject, b"nonsense")
    assert worker.dispatcher.malformed_messages == 4
    assert worker.published.empty()


async def test_slots_are_released_until_the_version_is_unloaded(worker: Worker) -> None:
    assert worker.dispatcher.slots_held == 3
    worker.bus.deliver("release.w", SlotRelease([("weir-arena.0", 1, 1), ("weir-other.0", 2, 1)]).pack())
    worker.dispatcher.unload_version(worker.result.served[1])
    worker.bus.deliver("release.w", SlotRelease([("weir-arena.0", 3, 1)]).pack())
    assert worker.instance.released == [1]
    assert worker.dispatcher.slots_held == 0


async def test_a_drain_ends_with_the_last_batch(worker: Worker) -> None:
    worker.send(1)
    drain = asyncio.create_task(worker.dispatcher.drain())
    await asyncio.sleep(0)
    assert not drain.done()
    worker.complete(1)
    await drain
    await worker.dispatcher.drain()


# Failures


async def test_a_batch_that_can_not_be_dispatched_is_lost(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    site = "weir.worker.batch_dispatch:BatchDispatcher._accept"
    fail_for(monkeypatch, site, lambda _self, batch, *_: batch.batch_id == 1)
    worker.send(1)
    worker.send(2)
    assert worker.completion() == BatchLost(1)
    assert [batch.message.batch_id for batch in worker.instance.submitted] == [2]
    assert worker.dispatcher.held_ids() == {"s": [2]}


async def test_a_batch_whose_responses_can_not_be_published_is_lost(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_for(monkeypatch, "weir.worker.batch_dispatch:BatchDispatcher.publish")
    worker.send(1)
    worker.complete(1)
    assert worker.completion() == BatchLost(1, 3)
    assert worker.dispatcher.held_ids() == {}


async def test_a_failure_of_one_cancellation_or_release_affects_no_other(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.send(1)
    worker.send(2)
    first, second = worker.instance.submitted
    first.on_cancel = lambda: 1 / 0
    worker.bus.deliver("abandoned.w", RunningCancellation("s", [(1, "gateway", [1]), (2, "gateway", [2])]).pack())
    assert second.cancelled == {0}
    monkeypatch.setattr(
        worker.instance, "release", lambda _segment, slot, _: worker.instance.released.append(1 // slot)
    )
    worker.bus.deliver("release.w", SlotRelease([("weir-arena.0", 0, 1), ("weir-arena.0", 1, 1)]).pack())
    assert worker.instance.released == [1]


# Ownership


async def test_a_batch_of_a_former_owner_is_refused_with_the_newer_epoch(worker: Worker) -> None:
    worker.bus.deliver("owner.*", QueueOwner("m", 0, "other", 7).pack())
    worker.send(1, epoch=5)
    assert worker.completion() == BatchRefused(1, 7)
    assert worker.instance.submitted == []


def batch(scheduler: str, epoch: int, model: str = "m", partition: int = 0) -> BatchMessage:
    return BatchMessage(scheduler, 1, model, 1, 0, [], epoch, partition)


async def test_the_newest_owner_of_a_queue_counts() -> None:
    bus, fence = CollectingBus(), OwnershipFence()
    await fence.start(cast(Any, bus))
    assert fence.newer_epoch(batch("a", 5)) == 0
    assert fence.newer_epoch(batch("a", 5)) == 0
    assert fence.newer_epoch(batch("b", 5)) == 5, "one of the two has missed the announcement of the other"
    bus.deliver("owner.*", QueueOwner("m", 0, "b", 7).pack())
    assert fence.newer_epoch(batch("a", 5)) == 7
    assert fence.newer_epoch(batch("a", 5, partition=1)) == 0, "it is another queue"
    assert fence.newer_epoch(batch("b", 7)) == 0
    assert fence.newer_epoch(batch("b", 9)) == 0
    assert fence.newer_epoch(batch("b", 7)) == 9
    assert fence.newer_epoch(batch("b", 0)) == 0, "a scheduler without epochs"
    bus.deliver("owner.*", QueueOwner("m", 0, "a", 5).pack())
    assert fence.newer_epoch(batch("b", 9)) == 0
    bus.deliver("owner.*", b"nonsense")
    assert (fence.rejected, fence.malformed_messages) == (3, 1)


def test_the_number_of_remembered_queues_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_dispatch, "MAX_QUEUES", 3)
    fence = OwnershipFence()
    for number in range(4):
        fence.newer_epoch(batch("a", 5, f"m{number}"))
    assert fence.newer_epoch(batch("b", 5, "m0")) == 0, "the oldest was forgotten"
    assert fence.newer_epoch(batch("b", 5, "m3")) == 5


@pytest.mark.parametrize(
    "row",
    [
        ("m", 0, "a", "5"),
        ("m", -1, "a", 5),
        ("m", 0, "a.b", 5),
        ("m", 0, "a", -1),
        (7, 0, "a", 5),
        ("m", 0, None, 5),
        ("m", 0, "a", 1 << 60),
    ],
)
def test_a_malformed_announcement(row: tuple[object, ...]) -> None:
    with pytest.raises(MalformedMessage):
        QueueOwner.unpack(encode((WIRE_VERSION, *row)))


# What waits at an instance


class WaitingInstance(ModelInstance):
    """Keeps batches, as a `ModelInstance` whose thread runs the first one."""

    def __init__(self) -> None:
        self.key = "m_0_0"
        self.arena_name = "arena"
        self.submitted: list[Batch] = []
        self.seconds = 0.0
        self.flushed = 0
        self.held_flushes = 0

    slots_held = 0

    @property
    def held(self) -> int:
        return len(self.submitted)

    @property
    def unstarted(self) -> int:
        return len(self.submitted) - 1

    @property
    def needs_watch(self) -> bool:
        return self.held > 1

    @property
    def stuck_s(self) -> float:
        return self.seconds

    def submit(self, batch: Batch, more_follow: bool = False) -> None:
        self.submitted.append(batch)

    def flush(self) -> None:
        self.flushed += 1

    def flush_held(self) -> None:
        self.held_flushes += 1

    def withdraw(self) -> list[Batch]:
        withdrawn, self.submitted = self.submitted[1:], self.submitted[:1]
        return withdrawn


class Busy:
    """A worker with one such instance, which is down, or whose model calls others, if `obstacle` says so."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.instance = WaitingInstance()
        self.obstacle: NotRunReason | None = None
        worker.instance = cast(Any, self.instance)
        for served in worker.result.served.values():
            served.instances = [self.instance]
            served.obstacle = lambda _: self.obstacle
        worker.dispatcher.install(worker.result)

    def send(self, *batch_ids: int) -> None:
        """Sends batches in one message."""
        batches = [BatchMessage("s", id, "m", 1, 0, [BatchEntry("gateway", id, 0, b"")]) for id in batch_ids]
        self.worker.bus.deliver("work.w", Batches(batches).pack())

    def ends(self) -> list[BatchCompletion]:
        """The completions that were published together."""
        return list(unpack_completions(self.worker.published.get_nowait()[1])[0])


@pytest.fixture
async def busy(worker: Worker) -> Busy:
    return Busy(worker)


async def test_the_batches_of_a_message_leave_together_if_they_run_at_once(busy: Busy) -> None:
    busy.send(1, 2, 3)
    assert [batch.message.batch_id for batch in busy.instance.submitted] == [1, 2, 3]
    assert busy.instance.flushed == 1


async def test_what_waits_behind_a_slow_batch_is_returned(busy: Busy) -> None:
    busy.send(1, 2, 3)
    busy.instance.seconds = batch_dispatch.MAX_STUCK_S
    await eventually(lambda: not busy.worker.published.empty())
    assert busy.ends() == [BatchNotRun(2, NotRunReason.SLOW), BatchNotRun(3, NotRunReason.SLOW)]
    assert busy.worker.dispatcher.held_ids() == {"s": [1]}


async def test_held_responses_leave_while_batches_wait(busy: Busy) -> None:
    busy.send(1, 2)
    await eventually(lambda: busy.instance.held_flushes > 1)
    busy.instance.submitted.pop()
    await eventually(lambda: busy.instance not in busy.worker.dispatcher._watched)
    assert busy.worker.published.empty()


async def test_one_batch_may_wait_behind_a_slow_one(busy: Busy) -> None:
    busy.send(1, 2)
    busy.worker.dispatcher._return_waiting(busy.instance, NotRunReason.SLOW)
    assert busy.worker.dispatcher.held_ids() == {"s": [1, 2]}


async def test_what_waits_for_an_instance_that_calls_a_model_is_returned(busy: Busy) -> None:
    busy.send(1, 2, 3)
    busy.worker.dispatcher.model_calls("another")
    assert busy.worker.published.empty()
    busy.worker.dispatcher.model_calls("m_0_0")
    assert busy.ends() == [BatchNotRun(2, NotRunReason.CALLING), BatchNotRun(3, NotRunReason.CALLING)]


@pytest.mark.parametrize("reason", [NotRunReason.CALLING, NotRunReason.DOWN])
async def test_an_instance_that_can_not_take_a_batch_returns_it(busy: Busy, reason: NotRunReason) -> None:
    busy.obstacle = reason
    busy.send(1)
    assert busy.ends() == [BatchNotRun(1, reason)]
    assert (busy.instance.submitted, busy.worker.dispatcher.held_ids()) == ([], {})


async def test_a_batch_of_several_requests_for_a_model_that_runs_each_alone_is_returned(busy: Busy) -> None:
    for served in busy.worker.result.served.values():
        served.runs_alone = True
    batch = BatchMessage("s", 1, "m", 1, 0, [BatchEntry("gateway", key, 0, b"") for key in range(2)])
    busy.worker.bus.deliver("work.w", Batches([batch]).pack())
    assert busy.ends() == [BatchNotRun(1, NotRunReason.GONE)]
