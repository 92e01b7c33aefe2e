"""Lookups in a broker that replies, is slow, has no entry or is disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from weir.bus.naming import subjects
from weir.bus.nats.connection import Message
from weir.calls.cache import stores as shared_cache
from weir.calls.cache.stores import CachedOutput, CachedResponse, SharedCache

KEPT = CachedResponse(1, (CachedOutput("OUT", "UINT8", (3,), b"abc"),), None)
KEY = bytes(32)


class Broker:
    """A bus that notes what is published."""

    is_connected = True
    max_payload_bytes = 1 << 20

    def __init__(self) -> None:
        self.published: list[tuple[str, bytes, str]] = []
        self.cache = SharedCache(self, "me", 1 << 20, 0)  # type: ignore[arg-type]
        self.found: list[CachedResponse | None] = []

    def publish(self, subject: str, data: bytes, reply: str = "") -> None:
        self.published.append((subject, data, reply))

    def find(self) -> Callable[[bytes, str], None]:
        """Looks up; what is returned answers."""
        self.cache.find(KEY, self.found.append)
        subject, data, reply = self.published[-1]
        assert (subject, data) == (f"$JS.API.DIRECT.GET.KV_response-cache.$KV.response-cache.{KEY.hex()}", b"")
        return lambda data, status: self.cache._on_reply(Message(reply, "", data, status))


@pytest.fixture
async def broker() -> Broker:
    return Broker()


async def test_a_stored_response_is_found(broker: Broker) -> None:
    answers = [broker.find() for _ in range(2)]
    answers[1](KEPT.pack(), "")
    assert broker.found == [KEPT]
    answers[0](b"", "404")
    assert broker.found == [KEPT, None]
    answers[0](KEPT.pack(), "")
    assert broker.found == [KEPT, None], "told once"


async def test_malformed_entries_are_counted_and_ignored(broker: Broker) -> None:
    broker.find()(b"rubbish", "")
    assert broker.found == [None]
    assert broker.cache.malformed_messages == 1


async def test_a_lookup_without_a_reply_finds_nothing(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_cache, "LOOKUP_TIMEOUT_S", 0.01)
    late = broker.find()
    while not broker.found:
        await asyncio.sleep(0.002)
    late(KEPT.pack(), "")
    assert broker.found == [None]


async def test_without_a_connection_nothing_is_found_or_stored(broker: Broker) -> None:
    broker.is_connected = False
    broker.cache.find(KEY, broker.found.append)
    assert broker.found == [], "later, as always"
    await asyncio.sleep(0)
    assert broker.found == [None]
    assert broker.cache.insert(KEY, KEPT)
    assert broker.published == []


async def test_a_response_too_large_for_a_message_is_not_stored(broker: Broker) -> None:
    large: Any = KEPT._replace(outputs=(CachedOutput("OUT", "UINT8", (1 << 20,), bytes(1 << 20)),))
    assert not broker.cache.insert(KEY, large)
    assert broker.cache.insert(KEY, KEPT)
    assert broker.published == [(subjects.cached(KEY.hex()), KEPT.pack(), "")]
