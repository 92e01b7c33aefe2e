"""The records of which scheduler owns which queue, on a real nats-server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from weir.bus.kv.queue_owners import OwnerRecord, QueueOwners
from weir.bus.naming import subjects
from weir.bus.naming.live_queues import LiveQueue
from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.schemas.wire.batches import MAX_EPOCH

NOW_MS = 1_700_000_000_000


@pytest.fixture(scope="module")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedNats(Path(tmp_path_factory.mktemp("nats")))
    yield server.start()
    server.stop()


class Clock:
    def __init__(self) -> None:
        self.unix_ms = NOW_MS

    def __call__(self) -> int:
        return self.unix_ms


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(nats_url, "test", background)
        await QueueOwners(bus).ensure()
        yield bus
        await bus.jetstream.delete_stream(subjects.OWNERS_STREAM)
        await bus.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def owners(bus: Bus, clock: Clock) -> QueueOwners:
    return QueueOwners(bus, clock)


QUEUE = LiveQueue("model")


async def test_a_queue_without_a_record_has_no_owner(owners: QueueOwners) -> None:
    assert await owners.read(QUEUE) == OwnerRecord("", 0, 0)


async def test_what_is_written_is_read_for_each_queue(owners: QueueOwners) -> None:
    first = await owners.write(QUEUE, "a", OwnerRecord())
    second = await owners.write(LiveQueue("model", 1), "b", OwnerRecord())
    assert first == await owners.read(QUEUE)
    assert second == await owners.read(LiveQueue("model", 1))
    assert first is not None
    assert (first.owner, first.epoch) == ("a", NOW_MS)


async def test_of_several_that_write_after_the_same_record_one_succeeds(owners: QueueOwners) -> None:
    base = await owners.write(QUEUE, "a", OwnerRecord())
    assert base is not None
    written = await asyncio.gather(*(owners.write(QUEUE, name, base) for name in "bcde"))
    (winner,) = [record for record in written if record is not None]
    assert await owners.read(QUEUE) == winner
    assert await owners.write(QUEUE, "f", base) is None


async def test_epochs_grow_even_if_clocks_do_not(owners: QueueOwners, clock: Clock) -> None:
    first = await owners.write(QUEUE, "a", OwnerRecord())
    assert first is not None
    clock.unix_ms -= 60_000
    second = await owners.write(QUEUE, "b", first)
    assert second is not None
    assert second.epoch == first.epoch + 1
    third = await owners.write(QUEUE, "c", second, highest=second.epoch + 50)
    assert third is not None
    assert third.epoch == second.epoch + 51
    clock.unix_ms = third.epoch + 1_000
    fourth = await owners.write(QUEUE, "", third)
    assert fourth is not None
    assert (fourth.owner, fourth.epoch) == ("", clock.unix_ms)


async def test_no_epoch_exceeds_the_limit_of_the_message(owners: QueueOwners) -> None:
    written = await owners.write(QUEUE, "a", OwnerRecord(), highest=MAX_EPOCH + 7)
    assert written is not None
    assert written.epoch == MAX_EPOCH - 1
    assert (await owners.read(QUEUE)).epoch == MAX_EPOCH - 1


async def test_a_malformed_record_has_no_owner_and_can_be_overwritten(bus: Bus, owners: QueueOwners) -> None:
    await bus.jetstream.publish(f"$KV.{subjects.OWNERS_BUCKET}.{subjects.queue_token(*QUEUE)}", b"nonsense")
    record = await owners.read(QUEUE)
    assert (record.owner, record.epoch) == ("", 0)
    assert record.sequence > 0
    written = await owners.write(QUEUE, "a", record)
    assert written is not None
    assert (await owners.read(QUEUE)).owner == "a"


async def test_a_broker_without_its_memory_is_set_up_again(bus: Bus, owners: QueueOwners) -> None:
    first = await owners.write(QUEUE, "a", OwnerRecord())
    assert first is not None
    await bus.jetstream.delete_stream(subjects.OWNERS_STREAM)
    assert await owners.write(QUEUE, "a", first) is None, "the record is gone, so it must be read again"
    record = await owners.read(QUEUE)
    assert record.sequence == 0
    written = await owners.write(QUEUE, "a", record, highest=first.epoch)
    assert written is not None
    assert written.epoch > first.epoch
