"""Leases: one of several processes holds each, on a real nats-server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.support.waiting import eventually
from weir.bus.kv import leases as leases_module
from weir.bus.kv.leases import SAFETY_S, TTL_S, Leases
from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.streams.acked_publisher import AckedPublisher


@pytest.fixture(scope="module")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedNats(Path(tmp_path_factory.mktemp("nats")))
    yield server.start()
    server.stop()


class Process:
    """A process that wants leases, and records each time it gets or loses one."""

    def __init__(self, bus: Bus, leases: Leases) -> None:
        self.bus = bus
        self.leases = leases
        self.events: list[str] = []

    def acquire(self, key: str) -> None:
        self.leases.acquire(key, lambda: self.events.append(f"has {key}"), lambda: self.events.append(f"lost {key}"))


@asynccontextmanager
async def process(nats_url: str, name: str) -> AsyncIterator[Process]:
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(nats_url, name, background)
        publisher = AckedPublisher(bus, name)
        await publisher.start(background)
        leases = Leases(bus, publisher, name)
        await leases.start(background)
        try:
            yield Process(bus, leases)
        finally:
            leases.stop()
            await bus.flush()
            publisher.stop()
            await bus.close()


@pytest.fixture
async def two(nats_url: str) -> AsyncIterator[tuple[Process, Process]]:
    async with AsyncExitStack() as stack:
        yield (
            await stack.enter_async_context(process(nats_url, "a")),
            await stack.enter_async_context(process(nats_url, "b")),
        )


async def test_one_of_two_holds_a_lease_and_the_other_follows_when_it_is_released(two: tuple[Process, Process]) -> None:
    first, second = two
    first.acquire("k")
    await eventually(lambda: first.leases.holds("k"))
    second.acquire("k")
    await asyncio.sleep(1.2)
    assert (first.leases.held, second.leases.held) == (["k"], [])
    first.leases.release("k")
    await eventually(lambda: second.leases.holds("k"), TTL_S + 2)
    assert not first.leases.holds("k")
    assert (first.events, second.events) == (["has k"], ["has k"])


async def test_a_lease_is_renewed_beyond_its_lifetime(two: tuple[Process, Process]) -> None:
    first, second = two
    first.acquire("k")
    await eventually(lambda: first.leases.holds("k"))
    second.acquire("k")
    await asyncio.sleep(TTL_S + 1.0)
    assert first.events == ["has k"]
    assert second.events == []


async def test_many_want_the_same_and_each_lease_has_one_holder(two: tuple[Process, Process]) -> None:
    keys = [f"k{number}" for number in range(20)]
    for key in keys:
        for each in two:
            each.acquire(key)
    await eventually(lambda: sum(len(each.leases.held) for each in two) == len(keys))
    await asyncio.sleep(0.7)
    assert sorted(two[0].leases.held + two[1].leases.held) == sorted(keys)


async def test_a_holder_that_can_not_renew_knows_it_before_another_takes_over(
    two: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SAFETY_S < TTL_S
    first, second = two
    first.acquire("k")
    await eventually(lambda: first.leases.holds("k"))
    second.acquire("k")
    order: list[str] = []
    first.events.clear()
    monkeypatch.setattr(first.bus, "publish", lambda *_, **__: None)  # its messages no longer arrive
    async with asyncio.timeout(TTL_S + 5):
        while len(order) < 2:
            if first.events == ["lost k"] and "lost" not in order:
                order.append("lost")
            if second.leases.holds("k") and "taken" not in order:
                order.append("taken")
            await asyncio.sleep(0.01)
    assert order == ["lost", "taken"]


async def test_a_lease_released_while_it_is_requested_is_free(two: tuple[Process, Process]) -> None:
    first, second = two
    first.acquire("k")
    first.leases.release("k")
    second.acquire("k")
    await eventually(lambda: second.leases.holds("k"), TTL_S + 2)
    assert first.events == []


def test_a_lease_outlives_some_missed_renewals() -> None:
    assert leases_module.RENEWAL_S * 2 < SAFETY_S


async def test_a_holder_knows_whether_the_lease_was_free_and_whether_it_is_its_own(
    two: tuple[Process, Process],
) -> None:
    first, second = two
    found: list[tuple[str, bool, bool]] = []

    def acquire(process: Process, name: str) -> None:
        leases = process.leases
        leases.acquire(
            "never-held",
            lambda: found.append((name, leases.was_free("never-held"), leases.is_sure("never-held"))),
            lambda: None,
        )

    acquire(first, "first")
    await eventually(lambda: first.leases.holds("never-held"))
    acquire(second, "second")
    assert not second.leases.is_sure("never-held")
    second.acquire("another")
    await eventually(lambda: second.leases.holds("another"))  # the broker has refused the other before
    first.leases.release("never-held")
    await eventually(lambda: second.leases.holds("never-held"), TTL_S + 2)
    assert found == [("first", True, True), ("second", False, True)]
    assert not first.leases.is_sure("never-held")
