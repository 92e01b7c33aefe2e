"""`InnerCalls` and a broker that goes away before anything was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

import worker.inner_calls
from bus.connection import Bus
from bus.embedded import EmbeddedNats
from calls.cache_config import CacheConfig
from schemas.errors import ErrorCode, WeirError
from schemas.requests import InferRequest
from worker.inner_calls import InnerCalls


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path / "nats")
    server.start()
    yield server
    server.stop()


async def test_a_broker_that_is_away_is_waited_for(nats: EmbeddedNats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.inner_calls, "OPEN_PATIENCE_S", 0.05)
    async with asyncio.timeout(30), asyncio.TaskGroup() as background:
        bus = await Bus.connect(nats.url, "test", background)
        calls = InnerCalls(bus, "worker-test", background, CacheConfig("nats", 1 << 20))
        await asyncio.to_thread(nats.stop)
        for refused in (calls.open, _asking(calls)):
            with pytest.raises(WeirError) as error:
                await refused()
            assert (error.value.code, error.value.message) == (
                ErrorCode.UNAVAILABLE,
                "the message broker is not available",
            )
        await asyncio.to_thread(nats.start)
        monkeypatch.setattr(worker.inner_calls, "OPEN_PATIENCE_S", 30.0)
        await calls.open()
        with pytest.raises(WeirError) as error:
            await _asking(calls)()
        assert error.value.code is ErrorCode.NOT_FOUND, "it knows what there is now"
        await calls.close()
        await bus.close()


async def test_what_was_closed_opens_no_more(nats: EmbeddedNats) -> None:
    async with asyncio.timeout(10), asyncio.TaskGroup() as background:
        bus = await Bus.connect(nats.url, "test", background)
        calls = InnerCalls(bus, "worker-test", background)
        calls.start_to_open()
        await calls.close()
        with pytest.raises(WeirError):
            await calls.open()
        await bus.close()


def _asking(calls: InnerCalls) -> Callable[[], Awaitable[None]]:
    async def ask() -> None:
        calls.submit(InferRequest("m"), lambda _answer, _is_final: None)

    return ask
