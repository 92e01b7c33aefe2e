"""Bodies and answers in object stores: a broker that is away for long fails no request."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from typing import Any, cast

import orjson
import pytest
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.errors import ServerError

from weir.bus.nats.connection import Bus
from weir.bus.nats.jetstream import JetStream, StoredMessage
from weir.calls.inference.documents import digest_of
from weir.durable.records import object_bodies as objects
from weir.durable.records.object_bodies import FetchedBody, ObjectBodies
from weir.runtime.memory_ledger import MemoryLedger
from weir.schemas.core.errors import ErrorCode, WeirError


class Broker:
    """A bus whose object store fails until it is back."""

    def __init__(self, away: int, error: Exception) -> None:
        self.losses = 0
        self.is_connected = True
        self.failures = 0
        self.stored: dict[str, bytes] = {}
        self.is_clustered = False
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

    async def last(self, _stream: str, _subject: str) -> StoredMessage:
        if self.failures < self._away:
            self.failures += 1
            raise self._error
        data = self.stored["n"]
        digest = "SHA-256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
        described = {"nuid": "n", "size": len(data), "digest": digest}
        return StoredMessage("", 1, 0, {}, b"", orjson.dumps(described))

    async def next(self, _stream: str, _subject: str, _sequence: int) -> StoredMessage:
        return StoredMessage("", 1, 0, {}, b"", self.stored["n"])


@pytest.fixture(autouse=True)
def stop_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_RETRY_S", 0.01)
    monkeypatch.setattr(objects, "OBJECT_TIMEOUT_S", 0.1)


async def put(broker: Broker) -> list[WeirError | None]:
    told: list[WeirError | None] = []
    async with asyncio.TaskGroup() as background:
        bodies = ObjectBodies(cast(Bus, broker), cast(JetStream, broker), 100, MemoryLedger())
        bodies.start(background)
        bodies.put("n", b"answer", told.append)
    return told


async def test_a_broker_that_is_away_is_waited_for() -> None:
    broker = Broker(50, NatsTimeoutError())
    broker.is_connected = False
    assert await put(broker) == [None]
    assert (broker.failures, broker.stored) == (50, {"n": b"answer"})
    broker.failures, got = 0, list[FetchedBody | WeirError]()
    async with asyncio.TaskGroup() as background:
        bodies = ObjectBodies(cast(Bus, broker), cast(JetStream, broker), 100, MemoryLedger())
        bodies.start(background)
        bodies.fetch("n", got.append)
    assert got == [FetchedBody(b"answer", digest_of(b"answer"))]


async def test_a_broker_that_refuses_is_told_in_a_while() -> None:
    [error] = await put(Broker(1000, ServerError(code=500, err_code=1, description="no room")))
    assert error is not None
    assert error.message == "the response could not be stored"


async def test_one_that_stops_tells_nothing() -> None:
    broker, told = Broker(1000, NatsTimeoutError()), list[WeirError | None]()
    broker.is_connected = False
    async with asyncio.TaskGroup() as background:
        bodies = ObjectBodies(cast(Bus, broker), cast(JetStream, broker), 100, MemoryLedger())
        bodies.start(background)
        bodies.put("n", b"answer", told.append)
        await asyncio.sleep(0.05)
        bodies.stop()
    assert told == []


async def test_what_nobody_foresaw_ends_one_request_and_no_other() -> None:
    broker = Broker(1, RuntimeError("not foreseen"))
    broker.stored["n"] = b"answer"
    got: list[FetchedBody | WeirError] = []
    async with asyncio.TaskGroup() as background:
        bodies = ObjectBodies(cast(Bus, broker), cast(JetStream, broker), 100, MemoryLedger())
        bodies.start(background)
        bodies.fetch("first", got.append)
        bodies.fetch("n", got.append)
    [error, body] = got
    assert isinstance(error, WeirError)
    assert error.code is ErrorCode.INTERNAL
    assert isinstance(body, FetchedBody)
    assert body.data == b"answer"


async def test_an_object_larger_than_a_body_may_be_is_not_read() -> None:
    broker, got = Broker(0, RuntimeError()), list[FetchedBody | WeirError]()
    broker.stored["n"] = bytes(101)
    async with asyncio.TaskGroup() as background:
        bodies = ObjectBodies(cast(Bus, broker), cast(JetStream, broker), 100, MemoryLedger())
        bodies.start(background)
        bodies.fetch("n", got.append)
    [error] = got
    assert isinstance(error, WeirError)
    assert error.code is ErrorCode.INVALID_ARG


async def test_a_body_is_read_when_the_ledger_has_room_for_it() -> None:
    broker, got = Broker(0, RuntimeError()), list[FetchedBody | WeirError]()
    broker.stored["n"] = bytes(60)
    ledger = MemoryLedger(120)
    async with asyncio.TaskGroup() as background:
        bodies = ObjectBodies(cast(Bus, broker), cast(JetStream, broker), 100, ledger)
        bodies.start(background)
        bodies.fetch("n", got.append)
        bodies.fetch("n", got.append)
        told: list[WeirError | None] = []
        while not got:
            await asyncio.sleep(0.01)
        bodies.put("answer", b"answer", told.append)  # answers do not wait behind bodies
        while not told:
            await asyncio.sleep(0.01)
        assert (len(got), ledger.held_bytes) == (1, {"object": 60})
        bodies.release(bytes(60))
    assert (len(got), ledger.held_bytes) == (2, {"object": 60})


async def test_a_body_that_can_not_be_read_is_not_charged() -> None:
    broker, got = Broker(0, RuntimeError()), list[FetchedBody | WeirError]()
    broker.stored["n"] = b"answer"
    broker.next = lambda *_: asyncio.sleep(0)  # type: ignore[method-assign, assignment, return-value]  # it is gone
    ledger = MemoryLedger(120)
    async with asyncio.TaskGroup() as background:
        bodies = ObjectBodies(cast(Bus, broker), cast(JetStream, broker), 100, ledger)
        bodies.start(background)
        bodies.fetch("n", got.append)
    assert isinstance(got[0], WeirError)
    assert ledger.total_bytes == 0
