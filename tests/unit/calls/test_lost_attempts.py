"""Reports of lost attempts reach their listener."""

from __future__ import annotations

from typing import Any

from weir.bus.naming.live_queues import LiveLayout
from weir.bus.nats.connection import Callback, Message
from weir.calls.dispatch import RequestDispatcher
from weir.schemas.wire.calls import LostAttempts


class HeardBus:
    """Keeps who has subscribed to what."""

    losses = 0

    def __init__(self) -> None:
        self.live_layout = LiveLayout()
        self.callbacks: dict[str, Callback] = {}

    async def subscribe(self, subject: str, callback: Callback) -> None:
        self.callbacks[subject] = callback


async def test_a_listener_receives_lost_attempts() -> None:
    bus: Any = HeardBus()
    inference = RequestDispatcher(bus, "gateway", None, None)  # type: ignore[arg-type]
    assert bus.callbacks == {}  # nobody asked
    heard: list[tuple[list[int], str]] = []
    await inference.on_lost_attempts(lambda keys, reason: heard.append((keys, reason)))
    (subject,) = bus.callbacks
    assert subject == "lost-attempts.gateway"
    for data in (LostAttempts([6, 7], "worker w was lost").pack(), b"garbage"):
        bus.callbacks[subject](Message(subject, "", data, ""))
    assert heard == [([6, 7], "worker w was lost")]
    assert inference.malformed_messages == 1
