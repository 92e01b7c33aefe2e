"""What a gateway hears of requests that were lost and are done again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from bus.connection import Callback, Message
from calls.inference import Inference
from schemas.lost_attempts import pack_lost_attempts


class HeardBus:
    """Keeps who has subscribed to what."""

    losses = 0

    def __init__(self) -> None:
        self.callbacks: dict[str, Callback] = {}

    async def subscribe(self, subject: str, callback: Callback) -> None:
        self.callbacks[subject] = callback


async def test_only_requests_in_flight_are_told_of() -> None:
    bus: Any = HeardBus()
    inference = Inference(bus, "gateway", None, None)  # type: ignore[arg-type]
    assert bus.callbacks == {}  # nobody asked
    heard: list[tuple[int, str]] = []
    await inference.on_lost_attempts(lambda pending, reason: heard.append((pending.key, reason)))
    inference._in_flight.add(SimpleNamespace(key=7, part=SimpleNamespace(body=b"")))  # type: ignore[arg-type]
    (subject,) = bus.callbacks
    assert subject == "lost-attempts.gateway"
    for data in (pack_lost_attempts([6, 7], "worker w was lost"), b"garbage", pack_lost_attempts([], "")):
        bus.callbacks[subject](Message(subject, "", data, ""))
    assert heard == [(7, "worker w was lost")]
    assert inference.malformed_messages == 1
