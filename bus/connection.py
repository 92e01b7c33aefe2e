"""`Bus`: one role's connection to nats-server.

Promises the roles a small, synchronous data path (`publish` never blocks and never awaits; callbacks run in the event
loop, in order) and survives the broker: it reconnects for ever, restores subscriptions, and tells the role, which then
re-creates what the broker lost and re-sends what it still owes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext

from bus import subjects

logger = logging.getLogger("weir.bus")

_RECONNECT_WAIT_S = 0.1
_UNLIMITED = 1 << 40
_SEND_BUFFER_BYTES = 64 << 20


class Message(NamedTuple):
    """What arrived on a subject. `status` is nats-server's own word in a peer's stead ("503": nobody listens)."""

    subject: str
    reply: str
    data: bytes
    status: str


Callback = Callable[[Message], None]


class Bus:
    """A connection for publishing and subscribing; `jetstream` is for streams, consumers and buckets."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._outbox: list[tuple[str, bytes, str]] = []
        self._sending: asyncio.Task[None] | None = None
        self._reconnect_listeners: list[Callable[[], Awaitable[None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.jetstream: JetStreamContext = client.jetstream()

    @classmethod
    async def connect(cls, url: str, name: str, connect_timeout_s: float = 10.0) -> Bus:
        """Connects to the server(s) at `url` (comma-separated). Raises OSError when none answers in time."""
        client = Client()
        bus = cls(client)
        deadline = asyncio.get_running_loop().time() + connect_timeout_s
        while True:
            try:
                await client.connect(
                    servers=url.split(","),
                    name=name,
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=_RECONNECT_WAIT_S,  # type: ignore[arg-type]
                    connect_timeout=2,
                    ping_interval=5,
                    max_outstanding_pings=2,
                    pending_size=_SEND_BUFFER_BYTES,
                    disconnected_cb=bus._on_disconnected,
                    reconnected_cb=bus._on_reconnected,
                    error_cb=bus._on_error,
                )
                return bus
            except (TimeoutError, NatsError, OSError) as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise OSError(f"no NATS server answers at {url}: {error}") from error
                await asyncio.sleep(_RECONNECT_WAIT_S)

    @property
    def is_connected(self) -> bool:
        """Whether the broker is there at this moment."""
        return self._client.is_connected

    @property
    def max_payload_bytes(self) -> int:
        """The largest message the broker takes."""
        return self._client.max_payload

    def publish(self, subject: str, data: bytes, reply: str = "") -> None:
        """Sends `data` within this turn of the event loop; while the broker is away it is kept, up to a limit."""
        self._outbox.append((subject, data, reply))
        if self._sending is None:
            self._sending = asyncio.get_running_loop().create_task(self._send())

    async def _send(self) -> None:
        while self._outbox:
            outbox, self._outbox = self._outbox, []
            for subject, data, reply in outbox:
                try:
                    await self._client.publish(subject, data, reply)
                except NatsError as error:
                    # Whoever published holds the request until its answer and sends again: nothing is lost here.
                    logger.warning("dropped a message of %d bytes on %s: %s", len(data), subject, error)
        self._sending = None

    async def subscribe(self, subject: str, callback: Callback) -> Callable[[], Awaitable[None]]:
        """Calls `callback` with each message on `subject`; returns the function that ends the subscription."""

        async def receive(message: Msg) -> None:
            headers = message.headers
            callback(
                Message(
                    message.subject,
                    message.reply,
                    message.data,
                    headers.get(subjects.STATUS_HEADER, "") if headers else "",
                )
            )

        subscription = await self._client.subscribe(
            subject, cb=receive, pending_msgs_limit=_UNLIMITED, pending_bytes_limit=_UNLIMITED
        )
        return subscription.unsubscribe

    async def flush(self) -> None:
        """Returns once the broker has seen everything published before."""
        while self._sending is not None:
            await self._sending
        await self._client.flush()

    def on_reconnect(self, listener: Callable[[], Awaitable[None]]) -> None:
        """Calls `listener` after each reconnection: the broker may have come back without streams and pulls."""
        self._reconnect_listeners.append(listener)

    async def close(self) -> None:
        """Sends what is waiting and disconnects."""
        if self._client.is_connected:
            try:
                await self.flush()
            except (TimeoutError, NatsError) as error:
                logger.warning("the broker did not take the last messages: %s", error)
        await self._client.close()

    async def _on_disconnected(self) -> None:
        logger.warning("lost the connection to nats-server")

    async def _on_reconnected(self) -> None:
        logger.warning("connected to nats-server again")
        for listener in self._reconnect_listeners:
            # A task each, because nats-py reads nothing from the broker until this callback has returned.
            task = asyncio.get_running_loop().create_task(_run(listener))
            self._tasks.add(task)
            task.add_done_callback(self._listener_done)

    def _listener_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logger.error("recovery after a reconnection failed", exc_info=error)

    async def _on_error(self, error: Exception) -> None:
        logger.debug("nats: %s", error)


async def _run(listener: Callable[[], Awaitable[None]]) -> None:
    await listener()


__all__ = ["Bus", "Callback", "Message"]
