"""Bodies and answers in object stores: a broker that is away for long fails no request."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.errors import ServerError

from bus.connection import Bus
from gateway.durable import objects
from gateway.durable.objects import ObjectBodies
from schemas.errors import WeirError


class Broker:
    """A bus whose object store fails until it is back."""

    def __init__(self, away: int, error: Exception) -> None:
        self.losses = 0
        self.is_connected = True
        self.failures = 0
        self.stored: dict[str, bytes] = {}
        self.jetstream = self
        self._away = away
        self._error = error

    async def object_store(self, _name: str) -> Any:
        if self.failures < self._away:
            self.failures += 1
            raise self._error
        return self

    async def put(self, name: str, data: bytes) -> None:
        self.stored[name] = data

    async def get_info(self, name: str) -> Any:
        return SimpleNamespace(size=len(self.stored[name]))

    async def get(self, name: str, writeinto: Any) -> None:
        writeinto.write(self.stored[name])


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_RETRY_S", 0.01)
    monkeypatch.setattr(objects, "PATIENCE_S", 0.1)


async def put(broker: Broker) -> list[WeirError | None]:
    told: list[WeirError | None] = []
    async with asyncio.TaskGroup() as background:
        bodies = ObjectBodies(cast(Bus, broker), 100)
        bodies.start(background)
        bodies.put("n", b"answer", told.append)
    return told


async def test_a_broker_that_is_away_is_waited_for() -> None:
    broker = Broker(50, NatsTimeoutError())
    broker.is_connected = False
    assert await put(broker) == [None]
    assert (broker.failures, broker.stored) == (50, {"n": b"answer"})
    broker.failures, got = 0, list[bytes | WeirError]()
    async with asyncio.TaskGroup() as background:
        bodies = ObjectBodies(cast(Bus, broker), 100)
        bodies.start(background)
        bodies.fetch("n", got.append)
    assert got == [b"answer"]


async def test_a_broker_that_refuses_is_told_in_a_while() -> None:
    [error] = await put(Broker(1000, ServerError(code=500, err_code=1, description="no room")))
    assert error is not None
    assert error.message == "the response could not be stored"


async def test_one_that_stops_tells_nothing() -> None:
    broker, told = Broker(1000, NatsTimeoutError()), list[WeirError | None]()
    broker.is_connected = False
    async with asyncio.TaskGroup() as background:
        bodies = ObjectBodies(cast(Bus, broker), 100)
        bodies.start(background)
        bodies.put("n", b"answer", told.append)
        await asyncio.sleep(0.05)
        bodies.stop()
    assert told == []
