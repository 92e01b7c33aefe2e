"""`Bus`: one role's connection to nats-server.

Promises the roles a small, synchronous data path (`publish` never blocks and never awaits; callbacks run in the event
loop, in order) and survives the broker: it reconnects for ever, restores subscriptions, and tells the role, which then
re-creates what the broker lost and re-sends what it still owes. Streams, consumers and buckets are nats-py's part, on a
connection of its own (`jetstream`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from bus.nats_client import Client  # isort: skip  # ahead of all that imports nats-py
import orjson
from nats.errors import Error as NatsError
from nats.js import JetStreamContext

from bus.live_layout import LiveLayout
from bus.nats_protocol import Callback, Message, NatsProtocol, connect_options

logger = logging.getLogger("weir.bus")

_RECONNECT_WAIT_S = 0.1
_PING_INTERVAL_S = 5.0
_MAX_PINGS_OUTSTANDING = 2
_CONNECT_TIMEOUT_S = 2.0
_API_TIMEOUT_S = 5.0
MAX_KEPT_BYTES = 64 << 20
"""What is published while the broker is away is kept up to this size; beyond it, it is dropped and logged."""


class Bus:
    """A connection for publishing and subscribing; `jetstream` is for streams, consumers and buckets.

    `live_layout` says in which streams live requests lie, as `bus.streams.ensure_streams` has found it.
    """

    def __init__(self, urls: list[str], name: str) -> None:
        self._urls = urls
        self._name = name
        self._protocol: NatsProtocol | None = None
        self._callbacks: dict[bytes, Callback] = {}
        self._subjects: dict[bytes, tuple[str, str]] = {}  # and queue groups
        self._next_sid = 0
        self._kept: list[tuple[str, bytes, str, bytes]] = []
        self._kept_bytes = 0
        self.losses = 0  # how often the connection was lost
        self._closing = False
        self._lost = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._background: asyncio.TaskGroup | None = None
        self._reconnect_listeners: list[Callable[[], Awaitable[None]]] = []
        self._recoveries: set[asyncio.Task[None]] = set()
        self.live_layout = LiveLayout()
        self._admin = Client()
        self._has_admin = False  # nats-py can't close what was never opened
        self.jetstream: JetStreamContext = self._admin.jetstream()

    @classmethod
    async def connect(cls, url: str, name: str, background: asyncio.TaskGroup, connect_timeout_s: float = 10.0) -> Bus:
        """Connects to the server(s) at `url` (comma-separated). Raises OSError when none answers in time.

        The connection is kept by a task in `background`, and so is each recovery after it was lost: one that fails ends
        the role, whose supervisor starts it anew.
        """
        bus = cls(url.split(","), name)
        try:
            async with asyncio.timeout(connect_timeout_s):
                await bus._open()
                await bus._connect_admin()
        except TimeoutError as error:
            await bus.close()
            raise OSError(f"no NATS server answers at {_without_secrets(url)}") from error
        bus._background = background
        bus._keeper = background.create_task(bus._keep())
        return bus

    @property
    def is_connected(self) -> bool:
        """Whether the broker is there at this moment."""
        return self._protocol is not None

    @property
    def hosts(self) -> list[str]:
        """The hosts that the connection was given."""
        return [connect_options(url, self._name)[0] for url in self._urls]

    @property
    def server_info(self) -> Mapping[str, Any]:
        """What the server said of itself when it was connected to; nothing while it is away."""
        return {} if self._protocol is None else self._protocol.info

    @property
    def max_payload_bytes(self) -> int:
        """The largest message the broker takes."""
        return 1 << 20 if self._protocol is None else int(self._protocol.info.get("max_payload", 1 << 20))

    @property
    def unsent_bytes(self) -> int:
        """About how much of what was published the broker has not taken yet."""
        return self._kept_bytes if self._protocol is None else self._protocol.unsent_bytes

    def publish(self, subject: str, data: bytes, reply: str = "", header_block: bytes = b"") -> None:
        """Sends `data` within this turn of the event loop; while the broker is away it is kept, up to a limit.

        `header_block` is what `bus.headers.pack_headers` makes.
        """
        if self._protocol is not None:
            self._protocol.publish(subject, data, reply, header_block)
        elif self._kept_bytes + len(data) + len(header_block) <= MAX_KEPT_BYTES:
            self._kept.append((subject, data, reply, header_block))
            self._kept_bytes += len(data) + len(header_block)
        else:
            # Whoever published holds the request until its answer and sends again: nothing is lost here.
            logger.warning("the broker is away: dropped a message of %d bytes on %s", len(data), subject)

    def defer(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once all that has arrived by now is dispatched, before what it set off is sent."""
        if self._protocol is not None:
            self._protocol.defer(callback)
        else:
            asyncio.get_running_loop().call_soon(callback)

    async def subscribe(
        self, subject: str, callback: Callback, queue: str = "", drains: bool = False
    ) -> Callable[[], None]:
        """Calls `callback` with each message on `subject`; returns the function that ends the subscription.

        Each message goes to one of those who subscribe with the same `queue`. With `drains`, what is on its way when the
        subscription is ended is still delivered: all of it has come when a `flush` returns.
        """
        self._next_sid += 1
        sid = str(self._next_sid).encode()
        self._callbacks[sid] = callback
        self._subjects[sid] = subject, queue
        if self._protocol is not None:
            self._protocol.send((_sub(subject, queue, sid),))

        def unsubscribe() -> None:
            if self._subjects.pop(sid, None) is None:
                return
            if self._protocol is not None:
                self._protocol.send((b"UNSUB %s\r\n" % sid,))
            if drains and self._protocol is not None:
                self._protocol.ping().add_done_callback(lambda _: self._callbacks.pop(sid, None))
            else:
                self._callbacks.pop(sid, None)

        return unsubscribe

    async def flush(self) -> None:
        """Returns once the broker has seen everything published before. Raises ConnectionError when it goes away."""
        if self._protocol is None:
            raise ConnectionError("the broker is away")
        await self._protocol.ping()

    async def ask(self, subject: str, question: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer of JetStream's API, which may be an `error`. Raises NatsError or TimeoutError when there is none."""
        message = await self._admin.request(
            subject, orjson.dumps(question) if question else b"", timeout=_API_TIMEOUT_S
        )
        answer = orjson.loads(message.data)
        return answer if isinstance(answer, dict) else {}

    def on_reconnect(self, listener: Callable[[], Awaitable[None]]) -> None:
        """Calls `listener` after each reconnection: the broker may have come back without streams and pulls."""
        self._reconnect_listeners.append(listener)

    async def close(self) -> None:
        """Sends what is waiting and disconnects."""
        self._closing = True
        if self._keeper is not None:
            self._keeper.cancel()
        for task in self._recoveries:
            task.cancel()
        if self._protocol is not None:
            with contextlib.suppress(ConnectionError, TimeoutError):
                await asyncio.wait_for(self.flush(), _CONNECT_TIMEOUT_S)
        if self._protocol is not None:
            self._protocol.close()
        if self._has_admin and not self._admin.is_closed:
            # What uvloop says of a write to a connection whose other end has gone.
            with contextlib.suppress(RuntimeError):
                await self._admin.close()

    async def _open(self) -> None:
        """Connects to the first server that answers, trying for ever, and restores what stood."""
        loop = asyncio.get_running_loop()
        while True:
            for url in self._urls:
                try:
                    self._protocol = await asyncio.wait_for(self._dial(loop, url), _CONNECT_TIMEOUT_S)
                except (OSError, TimeoutError) as error:
                    logger.debug("%s: %s", _without_secrets(url), error)
                    continue
                self._lost.clear()
                for sid, (subject, queue) in self._subjects.items():
                    self._protocol.send((_sub(subject, queue, sid),))
                kept, self._kept, self._kept_bytes = self._kept, [], 0
                for message in kept:
                    self._protocol.publish(*message)
                return
            await asyncio.sleep(_RECONNECT_WAIT_S)

    async def _dial(self, loop: asyncio.AbstractEventLoop, url: str) -> NatsProtocol:
        host, port, options = connect_options(url, self._name)
        _, protocol = await loop.create_connection(
            lambda: NatsProtocol(self._callbacks, options, self._on_lost), host, port
        )
        try:
            await protocol.established
        except BaseException:
            protocol.abort()
            raise
        return protocol

    def _on_lost(self) -> None:
        self._protocol = None
        self.losses += 1
        self._lost.set()

    async def _keep(self) -> None:
        """Pings, and connects again whenever the connection is lost."""
        while True:
            try:
                await asyncio.wait_for(self._lost.wait(), _PING_INTERVAL_S)
            except TimeoutError:
                protocol = self._protocol
                if protocol is not None:
                    if protocol.pings_outstanding >= _MAX_PINGS_OUTSTANDING:
                        protocol.abort()
                    else:
                        protocol.ping()
                continue
            logger.warning("lost the connection to nats-server")
            await self._open()
            logger.warning("connected to nats-server again")
            self._recover()

    def _recover(self) -> None:
        for listener in self._reconnect_listeners:
            assert self._background is not None  # noqa: S101 - only a connected bus recovers
            task = self._background.create_task(self._run_listener(listener))
            self._recoveries.add(task)
            task.add_done_callback(self._recoveries.discard)

    async def _run_listener(self, listener: Callable[[], Awaitable[None]]) -> None:
        # JetStream may need a moment more than the server's socket, and so may nats-py to connect again.
        while self.is_connected:
            try:
                await listener()
                return
            except (NatsError, TimeoutError, OSError) as error:
                logger.warning("not recovered yet: %s: %s", type(error).__name__, error)
                await asyncio.sleep(_RECONNECT_WAIT_S)

    async def _connect_admin(self) -> None:
        self._has_admin = True
        while True:
            try:
                await self._admin.connect(
                    servers=self._urls,
                    name=f"{self._name} admin",
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=_RECONNECT_WAIT_S,  # type: ignore[arg-type]
                    connect_timeout=2,
                    ping_interval=5,
                    error_cb=_on_admin_error,
                )
                return
            except (NatsError, OSError) as error:
                logger.debug("admin connection: %s", error)
                await asyncio.sleep(_RECONNECT_WAIT_S)


async def _on_admin_error(error: Exception) -> None:
    logger.debug("nats-py: %s", error)


def _sub(subject: str, queue: str, sid: bytes) -> bytes:
    return b"SUB %s %s %s\r\n" % (subject.encode(), queue.encode(), sid)


def _without_secrets(url: str) -> str:
    return ",".join(part.rsplit("@", 1)[-1] for part in url.split(","))


__all__ = ["Bus", "Callback", "Message"]
