"""Who owns a durable consumer gets its messages, and who owned it before gets none; over a real nats-server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bus import durable_subjects as subjects
from bus.connection import Bus, Message
from bus.durable_streams import QueueLimits, ensure_durable_streams
from bus.embedded import EmbeddedNats
from bus.message_pull import MessagePull
from bus.queue_consumers import QueueConsumers

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


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


class Owner:
    def __init__(self, bus: Bus, name: str) -> None:
        self.bus = bus
        self.name = name
        self.got: list[bytes] = []
        consumer = subjects.durable_consumer("event", "m")
        self.pull = MessagePull(bus, subjects.QUEUE_STREAM, consumer, lambda message: self.got.append(message.data))

    def receive(self, message: Message) -> None:
        self.pull.receive(message, time.monotonic())

    async def take(self) -> str:
        taken = await QueueConsumers(self.bus).take("event", "m", self.name)
        await self.bus.subscribe(f"inbox.{self.name}", self.receive)
        self.pull.start(time.monotonic(), f"inbox.{self.name}", taken.group)
        return taken.previous_owner


async def test_who_was_the_owner_before_takes_no_message_away(nats: EmbeddedNats) -> None:
    async with connected(nats) as bus:
        await ensure_durable_streams(bus, LIMITS)
        for number in range(3):
            await bus.jetstream.publish("event.m", b"%d" % number)
        first, second = Owner(bus, "first"), Owner(bus, "second")
        assert await first.take() == ""
        await until(lambda: len(first.got) == 3)
        group = first.pull._group
        taken = await QueueConsumers(bus).take("event", "m", "second")
        assert (taken.begun_sequence, taken.previous_owner) == (3, "first")
        # As one that was paused, and does not know yet: it asks for more before anybody else does.
        first.pull.start(time.monotonic(), "inbox.first", group)
        await until(lambda: first.pull.consumer_lost)
        assert await second.take() == "second"
        await until(lambda: len(second.got) == 3)
        assert len(first.got) == 3


async def test_a_consumer_that_nobody_took_yet_gives_nothing(nats: EmbeddedNats) -> None:
    async with connected(nats) as bus:
        await ensure_durable_streams(bus, LIMITS)
        await bus.jetstream.publish("event.m", b"0")
        owner = Owner(bus, "owner")
        await owner.take()
        await until(lambda: len(owner.got) == 1)
        group = owner.pull._group
        await QueueConsumers(bus).drop("event", "m")
        await QueueConsumers(bus).ensure("event", "m")
        await until(lambda: owner.pull.consumer_lost)
        owner.pull.start(time.monotonic(), "inbox.owner", group)
        await until(lambda: owner.pull.consumer_lost)
        found = await QueueConsumers(bus).look_up("event-m")
        assert found == ("event", "m", False, 1)
        assert len(owner.got) == 1
