"""`InferenceClient` while the broker is not available."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

import weir.worker.backend_api.inference_client
from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.calls.cache.config import CacheConfig
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.requests import InferRequest
from weir.worker.backend_api.inference_client import ClientOptions, InferenceClient


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path / "nats")
    server.start()
    yield server
    server.stop()


async def test_open_waits_for_a_broker_that_is_not_available(
    nats: EmbeddedNats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weir.worker.backend_api.inference_client, "OPEN_TIMEOUT_S", 0.05)
    async with asyncio.timeout(30), asyncio.TaskGroup() as background:
        bus = await Bus.connect(nats.url, "test", background)
        client = InferenceClient(bus, "worker-test", background, ClientOptions(cache=CacheConfig("nats", 1 << 20)))
        await asyncio.to_thread(nats.stop)
        for refused in (client.open, _sending(client)):
            with pytest.raises(WeirError) as error:
                await refused()
            assert (error.value.code, error.value.message) == (
                ErrorCode.UNAVAILABLE,
                "the message broker is not available",
            )
        await asyncio.to_thread(nats.start)
        monkeypatch.setattr(weir.worker.backend_api.inference_client, "OPEN_TIMEOUT_S", 30.0)
        await client.open()
        with pytest.raises(WeirError) as error:
            await _sending(client)()
        assert error.value.code is ErrorCode.NOT_FOUND, "the registry is complete now"
        await client.close()
        await bus.close()


async def test_a_closed_client_does_not_open(nats: EmbeddedNats) -> None:
    async with asyncio.timeout(10), asyncio.TaskGroup() as background:
        bus = await Bus.connect(nats.url, "test", background)
        client = InferenceClient(bus, "worker-test", background)
        client.open_soon()
        await client.close()
        with pytest.raises(WeirError):
            await client.open()
        await bus.close()


def _sending(client: InferenceClient) -> Callable[[], Awaitable[None]]:
    async def send() -> None:
        client.submit(InferRequest("m"), lambda _response, _is_final: None)

    return send
