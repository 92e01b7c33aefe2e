"""Batches between the bus and instances: dispatch, publication, cancellation, ownership, and failures of any of them."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest

from tests.support.collecting_bus import CollectingBus
from tests.support.contained_sites import fail_for
from tests.support.waiting import eventually
from weir.schemas.wire.codec import WIRE_VERSION, MalformedMessage, encode
from weir.schemas.wire.messages import (
    BatchCompletion,
    BatchEntry,
    BatchMessage,
    BatchOutcome,
    QueueOwner,
    RunningCancellation,
    SlotRelease,
    unpack_responses,
)
from weir.worker import batch_dispatch
from weir.worker.batch_dispatch import BatchDispatcher, OwnershipFence
from weir.worker.execution.batch_execution import BatchUpdate
from weir.worker.execution.instance import ModelInstance
from weir.worker.execution.running_batch import RunningBatch


class FakeInstance:
    """Keeps batches and released slots."""

    def __init__(self) -> None:
        self.submitted: list[RunningBatch] = []
        self.released: list[int] = []
        self.arena_name = "arena"
        self.slots_held = 3

    def submit(self, batch: RunningBatch) -> None:
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
        self.bus.deliver("work.w", batch.pack())

    def complete(self, batch_id: int, outcome: BatchOutcome = BatchOutcome.ANSWERED) -> None:
        self.dispatcher.publish(BatchUpdate("s", BatchCompletion(batch_id, outcome, 3)))

    def completion(self) -> tuple[int, int]:
        """The id and outcome of the next published completion."""
        _, _, ((batch_id, outcome, *_),) = msgpack.unpackb(self.published.get_nowait()[1])
        return batch_id, outcome


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
    worker.complete(1, BatchOutcome.RELEASED)
    assert worker.dispatcher.held_ids() == {"s": [1, 2]}, "a released batch goes on"
    worker.complete(1)
    assert worker.dispatcher.held_ids() == {"s": [2]}


@pytest.mark.parametrize("first", [[], [("first", b"f")]], ids=["plain", "checkpoint"])
async def test_responses_are_sent_before_the_completion(worker: Worker, first: list[tuple[str, bytes]]) -> None:
    worker.send(1)
    completion = BatchCompletion(1, BatchOutcome.ANSWERED, 3)
    worker.dispatcher.publish(BatchUpdate("s", completion, [("gateway", b"r"), ("", b"x")], first))
    subjects = [worker.published.get_nowait()[0] for _ in range(2 + len(first))]
    assert subjects == [*(["first"] if first else []), "reply.gateway", "done.s"], "no caller, no response"


async def test_updates_of_several_batches_leave_together_with_one_message_of_completions(worker: Worker) -> None:
    worker.send(1)
    worker.send(2)
    other = BatchUpdate("s", BatchCompletion(2, BatchOutcome.ANSWERED, 0), [("gateway", b"q")])
    first = BatchUpdate("s", BatchCompletion(1, BatchOutcome.ANSWERED, 0), [("gateway", b"r")], others=[other])
    worker.dispatcher.publish(first)
    sent = [worker.published.get_nowait() for _ in range(3)]
    assert [subject for subject, _ in sent] == ["reply.gateway", "reply.gateway", "done.s"]
    assert [completion[0] for completion in msgpack.unpackb(sent[2][1])[2]] == [1, 2]
    assert worker.dispatcher.held_ids() == {}


async def test_an_update_of_a_batch_that_was_started_directly_is_not_published(worker: Worker) -> None:
    worker.dispatcher.publish(BatchUpdate("w", BatchCompletion(1, BatchOutcome.ANSWERED, 3), [("w", b"r")]))
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
    worker.dispatcher.publish(BatchUpdate("w", BatchCompletion(1, BatchOutcome.ANSWERED, 3), [("w", b"r")]))
    assert updates[1] == BatchUpdate("w", BatchCompletion(1, BatchOutcome.UNANSWERED, 3))
    assert worker.published.empty()


async def test_a_batch_for_a_version_that_is_not_loaded_is_rejected(worker: Worker) -> None:
    worker.send(1, version=9)
    worker.dispatcher.uninstall("m")
    worker.send(2)
    for batch_id in (1, 2):
        (row,) = unpack_responses(worker.published.get_nowait()[1])[1]
        assert row.error is not None
        assert "is not at ready state" in row.error.message
        assert worker.completion() == (batch_id, BatchOutcome.ANSWERED)


async def test_a_batch_for_an_instance_that_is_gone_is_lost(worker: Worker) -> None:
    worker.send(1, instance=5)
    assert worker.completion() == (1, BatchOutcome.UNANSWERED)


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
    site = "weir.worker.batch_dispatch:BatchDispatcher._dispatch"
    fail_for(monkeypatch, site, lambda _self, batch, *_: batch.batch_id == 1)
    worker.send(1)
    worker.send(2)
    assert worker.completion() == (1, BatchOutcome.UNANSWERED)
    assert [batch.message.batch_id for batch in worker.instance.submitted] == [2]
    assert worker.dispatcher.held_ids() == {"s": [2]}


async def test_a_batch_whose_responses_can_not_be_published_is_lost(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_for(monkeypatch, "weir.worker.batch_dispatch:BatchDispatcher._publish")
    worker.send(1)
    worker.complete(1)
    assert worker.completion() == (1, BatchOutcome.UNANSWERED)
    assert worker.dispatcher.held_ids() == {}


async def test_a_failure_of_one_cancellation_or_release_affects_no_other(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.send(1)
    worker.send(2)
    first, second = worker.instance.submitted
    site = "weir.worker.batch_dispatch:BatchDispatcher._cancel"
    fail_for(monkeypatch, site, lambda _self, running, *_: running is first)
    worker.bus.deliver("abandoned.w", RunningCancellation("s", [(1, "gateway", [1]), (2, "gateway", [2])]).pack())
    assert (first.cancelled, second.cancelled) == (frozenset(), {0})
    site = "weir.worker.batch_dispatch:BatchDispatcher._release"
    fail_for(monkeypatch, site, lambda _self, _segment, slot, _generation: slot == 1)
    worker.bus.deliver("release.w", SlotRelease([("weir-arena.0", 1, 1), ("weir-arena.0", 2, 1)]).pack())
    assert worker.instance.released == [2]


# Ownership


async def test_a_batch_of_a_former_owner_is_refused_with_the_newer_epoch(worker: Worker) -> None:
    worker.bus.deliver("owner.*", QueueOwner("m", 0, "other", 7).pack())
    worker.send(1, epoch=5)
    _, _, ((batch_id, outcome, *_, epoch),) = msgpack.unpackb(worker.published.get_nowait()[1])
    assert (batch_id, outcome, epoch) == (1, BatchOutcome.REFUSED, 7)
    assert worker.instance.submitted == []


def batch(scheduler: str, epoch: int, model: str = "m", partition: int = 0) -> BatchMessage:
    return BatchMessage(scheduler, 1, model, 1, 0, [], False, epoch, partition)


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


# Microbatches of instances that take them whole


class WholeInstance(ModelInstance):
    """Keeps batches, as a `ModelInstance` whose thread does not run."""

    def __init__(self) -> None:
        self.key = "m_0_0"
        self.arena_name = "arena"
        self.submitted: list[RunningBatch] = []

    runs_microbatches = True
    slots_held = 0

    def submit(self, batch: RunningBatch) -> None:
        self.submitted.append(batch)

    def withdraw(self, batches: Iterable[RunningBatch]) -> list[RunningBatch]:
        withdrawn = [batch for batch in self.submitted if batch in set(batches)]
        self.submitted = [batch for batch in self.submitted if batch not in withdrawn]
        return withdrawn


@pytest.fixture
async def whole(worker: Worker) -> WholeInstance:
    instance = worker.instance = cast(Any, WholeInstance())
    for served in worker.result.served.values():
        served.model = SimpleNamespace(config=SimpleNamespace(is_decoupled=False))
    return instance


def send_microbatch(worker: Worker, batch_id: int) -> None:
    entries = [BatchEntry("gateway", key, 0, b"") for key in range(3)]
    batch = BatchMessage("s", batch_id, "m", 1, 0, entries, is_series=True)
    worker.bus.deliver("work.w", batch.pack())


def requeued(worker: Worker) -> tuple[str, list[Any]]:
    subject, data = worker.published.get_nowait()
    _, _, (completion,) = msgpack.unpackb(data)
    return subject, completion


async def test_a_microbatch_that_does_not_start_soon_is_requeued(
    worker: Worker, whole: WholeInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_dispatch, "MAX_STUCK_S", 0.0)
    send_microbatch(worker, 1)
    send_microbatch(worker, 2)
    started = whole.submitted.pop(0)
    assert (started.message.batch_id, len(started.message.entries)) == (1, 3)
    await eventually(lambda: not worker.published.empty())
    assert requeued(worker) == ("done.s", [2, BatchOutcome.ANSWERED, 0, [0, 1, 2], 0])
    assert worker.published.empty(), "its frame is not acknowledged"
    assert worker.dispatcher.held_ids() == {"s": [1]}


async def test_microbatches_of_an_instance_that_calls_a_model_are_requeued(
    worker: Worker, whole: WholeInstance
) -> None:
    send_microbatch(worker, 1)
    send_microbatch(worker, 2)
    asked: list[str] = []
    whole.submitted.pop(0).requeue = lambda: asked.append("requeue")
    worker.dispatcher.requeue_waiting("another")
    assert (asked, worker.published.empty()) == ([], True)
    worker.dispatcher.requeue_waiting("m_0_0")
    assert asked == ["requeue"]
    assert requeued(worker) == ("done.s", [2, BatchOutcome.ANSWERED, 0, [0, 1, 2], 0])
