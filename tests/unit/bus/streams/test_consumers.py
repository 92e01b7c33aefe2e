"""The owner of a durable consumer gets its messages, a former owner none; with a real nats-server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.waiting import eventually
from weir.bus.naming import durable_subjects as subjects
from weir.bus.nats.connection import Bus, Message
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.streams.consumers import QueueConsumers
from weir.bus.streams.declarations import QueueLimits, ensure_durable_streams
from weir.bus.streams.pull import BoundedPull

LIMITS = QueueLimits(max_messages=100, max_bytes=1 << 24, result_ttl_s=300.0, result_max_bytes=1 << 24)


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path)
    server.start()
    yield server
    server.stop()


@asynccontextmanager
async def connected(nats: EmbeddedNats) -> AsyncIterator[Bus]:
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(nats.url, "test", background)
        yield bus
        await bus.close()


class Owner:
    def __init__(self, bus: Bus, name: str) -> None:
        self.bus = bus
        self.name = name
        self.got: list[bytes] = []
        consumer = subjects.durable_consumer("event", "m")
        self.pull = BoundedPull(bus, subjects.QUEUE_STREAM, consumer, lambda message: self.got.append(message.data))

    def receive(self, message: Message) -> None:
        self.pull.receive(message)

    async def acquire(self) -> str:
        taken = await QueueConsumers(self.bus).acquire("event", "m", self.name)
        await self.bus.subscribe(f"inbox.{self.name}", self.receive)
        self.pull.start(f"inbox.{self.name}", taken.group)
        return taken.previous_owner


async def test_a_former_owner_gets_no_messages(nats: EmbeddedNats) -> None:
    async with connected(nats) as bus:
        await ensure_durable_streams(bus, LIMITS)
        for number in range(3):
            await bus.jetstream.publish("event.m", b"%d" % number)
        first, second = Owner(bus, "first"), Owner(bus, "second")
        assert await first.acquire() == ""
        await eventually(lambda: len(first.got) == 3)
        taken = await QueueConsumers(bus).acquire("event", "m", "second")
        assert (taken.started_sequence, taken.previous_owner) == (3, "first")
        # As one that was paused, and does not know yet: it asks for more before anybody else does.
        first.pull.start()
        await eventually(lambda: first.pull.consumer_lost)
        assert await second.acquire() == "second"
        await eventually(lambda: len(second.got) == 3)
        assert len(first.got) == 3


async def test_a_consumer_without_an_owner_delivers_nothing(nats: EmbeddedNats) -> None:
    async with connected(nats) as bus:
        await ensure_durable_streams(bus, LIMITS)
        await bus.jetstream.publish("event.m", b"0")
        owner = Owner(bus, "owner")
        await owner.acquire()
        await eventually(lambda: len(owner.got) == 1)
        await QueueConsumers(bus).drop("event", "m")
        await QueueConsumers(bus).ensure("event", "m")
        await eventually(lambda: owner.pull.consumer_lost)
        owner.pull.start()
        await eventually(lambda: owner.pull.consumer_lost)
        found = await QueueConsumers(bus).look_up("event-m")
        assert found == ("event", "m", False, 1)
        assert len(owner.got) == 1
