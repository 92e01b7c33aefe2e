"""Look-ups in a broker that answers, is slow, knows nothing or is away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from bus import subjects
from bus.connection import Message
from calls import shared_cache
from calls.cached_answer import CachedAnswer, CachedOutput
from calls.shared_cache import SharedCache

KEPT = CachedAnswer(1, (CachedOutput("OUT", "UINT8", (3,), b"abc"),), None)
KEY = bytes(32)


class Broker:
    """A bus that notes what is published."""

    is_connected = True
    max_payload_bytes = 1 << 20

    def __init__(self) -> None:
        self.published: list[tuple[str, bytes, str]] = []
        self.cache = SharedCache(self, "me", 1 << 20, 0)  # type: ignore[arg-type]
        self.found: list[CachedAnswer | None] = []

    def publish(self, subject: str, data: bytes, reply: str = "") -> None:
        self.published.append((subject, data, reply))

    def find(self) -> Callable[[bytes, str], None]:
        """Looks up; what is returned answers."""
        self.cache.find(KEY, self.found.append)
        subject, data, reply = self.published[-1]
        assert (subject, data) == (f"$JS.API.DIRECT.GET.KV_response-cache.$KV.response-cache.{KEY.hex()}", b"")
        return lambda data, status: self.cache._on_answer(Message(reply, "", data, status))


@pytest.fixture
async def broker() -> Broker:
    return Broker()


async def test_an_answer_is_found(broker: Broker) -> None:
    answers = [broker.find() for _ in range(2)]
    answers[1](KEPT.pack(), "")
    assert broker.found == [KEPT]
    answers[0](b"", "404")
    assert broker.found == [KEPT, None]
    answers[0](KEPT.pack(), "")
    assert broker.found == [KEPT, None], "told once"


async def test_rubbish_is_no_answer_and_is_counted(broker: Broker) -> None:
    broker.find()(b"rubbish", "")
    assert broker.found == [None]
    assert broker.cache.malformed_messages == 1


async def test_a_cache_that_does_not_answer_knows_nothing(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_cache, "PATIENCE_S", 0.01)
    late = broker.find()
    async with asyncio.timeout(5):
        while not broker.found:
            await asyncio.sleep(0.002)
    late(KEPT.pack(), "")
    assert broker.found == [None]


async def test_without_a_broker_nothing_is_found_or_kept(broker: Broker) -> None:
    broker.is_connected = False
    broker.cache.find(KEY, broker.found.append)
    assert broker.found == [], "later, as always"
    await asyncio.sleep(0)
    assert broker.found == [None]
    assert broker.cache.insert(KEY, KEPT)
    assert broker.published == []


async def test_what_fits_no_message_is_not_kept(broker: Broker) -> None:
    large: Any = KEPT._replace(outputs=(CachedOutput("OUT", "UINT8", (1 << 20,), bytes(1 << 20)),))
    assert not broker.cache.insert(KEY, large)
    assert broker.cache.insert(KEY, KEPT)
    assert broker.published == [(subjects.cached(KEY.hex()), KEPT.pack(), "")]
