"""Long polls over the bus do not take the places of requests that need work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from weir.bus.naming import subjects
from weir.bus.nats.connection import Message
from weir.gateway.nats import api_bridge
from weir.gateway.nats.api_bridge import ApiBridge
from weir.runtime.memory_ledger import MemoryLedger
from weir.schemas.wire.gateway_api import ApiRequest, ApiResponse


class Bus:
    """Delivers requests, and keeps the responses."""

    max_payload_bytes = 1 << 20

    def __init__(self) -> None:
        self.deliver: Callable[[Message], None]
        self.responses: list[ApiResponse] = []

    async def subscribe(self, _subject: str, handler: Any, *_of: Any, **_more: Any) -> Callable[[], None]:
        self.deliver = handler
        return lambda: None

    async def flush(self) -> None:
        pass

    def publish(self, _subject: str, data: bytes) -> None:
        self.responses.append(ApiResponse.unpack(data))

    def send(self, target: str, *headers: tuple[str, str]) -> None:
        request = ApiRequest("GET", target, list(headers))
        self.deliver(Message(subjects.API_REQUEST, subjects.api_replies("test"), request.pack(), ""))


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Waits until its client has left if it is told to wait, and shows whether it was."""
    waits = any(name == b"prefer" for name, _ in scope["headers"])
    if waits or scope["path"] == "/work":
        await receive()
        await receive()
    await send({"type": "http.response.start", "status": 200 if waits else 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def test_long_polls_have_places_of_their_own(monkeypatch: Any) -> None:
    monkeypatch.setattr(api_bridge, "MAX_POLLS", 5)
    monkeypatch.setattr(api_bridge, "MAX_IN_FLIGHT", 2)
    bus = Bus()
    bridge = ApiBridge(cast(Any, bus), app, MemoryLedger())
    await bridge.start()
    for _ in range(5):
        bus.send("/v2/jobs/a", ("Prefer", "wait=60"))
    await asyncio.sleep(0)
    assert bus.responses == []
    bus.send("/v2")
    await asyncio.sleep(0.01)
    assert [response.status for response in bus.responses] == [204]
    bus.send("/v2/jobs/a", ("prefer", "wait=60"))
    await asyncio.sleep(0.01)
    assert [response.status for response in bus.responses[1:]] == [204], "at once: there is no place to wait in"
    for _ in range(3):
        bus.send("/work")
    bus.send("/other", ("prefer", "wait=60"))
    assert [response.status for response in bus.responses[2:]] == [503, 503]
    await bridge.stop(0)
    await asyncio.sleep(0)
