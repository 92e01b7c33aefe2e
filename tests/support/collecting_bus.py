"""A bus without a broker: it collects published messages and delivers messages to subscribers synchronously."""

from __future__ import annotations

from collections.abc import Callable

from weir.bus.links.links import Links
from weir.bus.naming.live_queues import LiveLayout
from weir.bus.nats.connection import Message
from weir.bus.turn import Turn

Callback = Callable[[Message], None]


class UnscheduledTurn(Turn):
    """A turn that ends when it is told to, so without an event loop."""

    def _schedule(self) -> None:
        pass

    def end(self) -> None:
        while self._at_end or self._writes:
            self._end()


class CollectingBus:
    """Stands in for `weir.bus.nats.connection.Bus`; each `deliver` is one turn of the event loop."""

    is_connected = True
    is_clustered = False
    unsent_bytes = 0

    def __init__(self) -> None:
        self.live_layout = LiveLayout()
        self._turn = UnscheduledTurn()
        self.dispatch, self.defer = self._turn.run, self._turn.defer
        self.links = Links(self.publish, self._turn)
        self.published: list[tuple[str, bytes, str]] = []
        self._callbacks: dict[str, Callback] = {}

    async def subscribe(self, subject: str, callback: Callback) -> Callable[[], None]:
        self._callbacks[subject] = callback
        return lambda: None

    async def subscribe_with_links(self, subject: str, callback: Callback) -> None:
        await self.subscribe(subject, callback)

    def publish(self, subject: str, data: bytes, reply: str = "") -> None:
        self.published.append((subject, data, reply))

    def publish_to_broker(self, subject: str, data: bytes, reply: str = "") -> None:
        self.published.append((subject, data, reply))

    def deliver(self, subject: str, data: bytes, reply: str = "", status: str = "") -> None:
        callback = self._callbacks.get(subject) or self._callbacks[subject.rsplit(".", 1)[0] + ".*"]
        callback(Message(subject, reply, data, status))
        self.turn()

    def turn(self) -> None:
        self._turn.end()

    def taken(self, prefix: str) -> list[bytes]:
        """What was published on subjects that begin so, which are then forgotten."""
        found = [data for subject, data, _ in self.published if subject.startswith(prefix)]
        self.published = [message for message in self.published if not message[0].startswith(prefix)]
        return found
