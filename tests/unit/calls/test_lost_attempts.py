"""What a gateway hears of requests that were lost and are done again."""

from __future__ import annotations

from typing import Any

from bus.connection import Callback, Message
from bus.live_layout import LiveLayout
from calls.inference import Inference
from schemas.lost_attempts import pack_lost_attempts


class HeardBus:
    """Keeps who has subscribed to what."""

    losses = 0

    def __init__(self) -> None:
        self.live_layout = LiveLayout()
        self.callbacks: dict[str, Callback] = {}

    async def subscribe(self, subject: str, callback: Callback) -> None:
        self.callbacks[subject] = callback


async def test_whoever_asks_hears_of_them() -> None:
    bus: Any = HeardBus()
    inference = Inference(bus, "gateway", None, None)  # type: ignore[arg-type]
    assert bus.callbacks == {}  # nobody asked
    heard: list[tuple[list[int], str]] = []
    await inference.on_lost_attempts(lambda keys, reason: heard.append((keys, reason)))
    (subject,) = bus.callbacks
    assert subject == "lost-attempts.gateway"
    for data in (pack_lost_attempts([6, 7], "worker w was lost"), b"garbage"):
        bus.callbacks[subject](Message(subject, "", data, ""))
    assert heard == [([6, 7], "worker w was lost")]
    assert inference.malformed_messages == 1
