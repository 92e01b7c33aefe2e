"""`Bus`: one role's connection to nats-server.

`publish` neither blocks nor awaits, and callbacks run in the event loop, in order. The connection survives the broker: it
reconnects without limit, restores subscriptions and calls the role's listeners, which recreate streams and consumers that
the broker lost and send again what is not acknowledged. `jetstream` is the client for streams, consumers and buckets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from weir.bus.nats.jetstream import JetStream  # isort: skip  # imports nats-py without aiohttp
from nats.errors import Error as NatsError

from weir.bus.links.links import Links
from weir.bus.message import Callback, Message
from weir.bus.naming import subjects
from weir.bus.naming.live_queues import LiveLayout
from weir.bus.nats.access import NO_ACCESS, BrokerAccess, BrokerRefused, BrokerServer, ServerPool, without_secrets
from weir.bus.nats.dialing import dial
from weir.bus.nats.protocol import NatsProtocol
from weir.bus.turn import Turn
from weir.runtime.containment import call_each, report
from weir.runtime.log_limiter import LogLimiter

logger = logging.getLogger("weir.bus")

_limited = LogLimiter(logger)

_RECONNECT_WAIT_S = 0.1
_REFUSED_WAIT_S = 1.0
_MAX_FAILED_WAIT_S = 30.0
_REPEAT_LOG_S = 30.0
_PING_INTERVAL_S = 5.0
_CLUSTER_PING_INTERVAL_S = 1.0  # there is another server to go to
_MAX_PINGS_OUTSTANDING = 2
_CONNECT_TIMEOUT_S = 2.0
_TRANSIENT = (
    "heartbeat.",
    "presence.",
    "probe.",
    subjects.STATISTICS_QUERY,
    subjects.counters(""),
    "$JS.API.CONSUMER.MSG.NEXT.",
)
"""Prefixes of subjects whose messages are dropped while the broker is away: they are outdated at the next connection, and
are sent again then, or every second."""

BROKER_ERRORS = (NatsError, OSError)
"""What operations raise while the broker is away; a TimeoutError is an OSError."""

MAX_KEPT_BYTES = 64 << 20
"""Messages published while the broker is away are kept up to this size; more are dropped and logged."""


class Bus:
    """A connection for publishing and subscribing; `jetstream` is the client for streams, consumers and buckets.

    `live_layout` maps queues to the streams of live requests, as `weir.bus.streams.declarations.ensure_streams` read it.
    `dispatch`, `defer` and `at_turn_end` are those of the `Turn` that the connection and the links share.
    """

    def __init__(self, urls: list[str], name: str, access: BrokerAccess = NO_ACCESS, role: str = "admin") -> None:
        self.servers = ServerPool(urls)
        self.access = access
        self._name = name
        self.inbox_prefix = subjects.role_inbox(role)  # only this role may subscribe below it
        self._protocol: NatsProtocol | None = None
        self._callbacks: dict[bytes, Callback] = {}
        self._subjects: dict[bytes, tuple[str, str]] = {}  # and queue groups
        self._next_sid = 0
        self._kept: list[tuple[str, bytes, str, bytes]] = []
        self._kept_bytes = 0
        self.connections = 0  # how many there have been
        self.losses = 0  # of the connection, or of a server or stream behind it
        self._closing = False
        self._lost = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._background: asyncio.TaskGroup | None = None
        self._reconnect_listeners: list[Callable[[], Awaitable[None]]] = []
        self._loss_listeners: list[Callable[[], None]] = []
        self._recoveries: dict[Callable[[], Awaitable[None]], asyncio.Task[None]] = {}
        self._last_refusal: tuple[str, float] = "", 0.0
        self._turn = Turn()
        self.dispatch, self.defer, self.at_turn_end = self._turn.run, self._turn.defer, self._turn.at_end
        self.live_layout = LiveLayout()
        self.jetstream = JetStream(self)
        self.links = Links(self.publish, self._turn)

    @classmethod
    async def connect(  # noqa: PLR0913 - the settings of one connection, mostly given by name
        cls,
        url: str,
        name: str,
        background: asyncio.TaskGroup,
        connect_timeout_s: float = 10.0,
        access: BrokerAccess = NO_ACCESS,
        role: str = "admin",
    ) -> Bus:
        """Connects to the server(s) at `url` (comma-separated). Raises OSError if none accepts the connection in time.

        Tasks in `background` keep the connection and run the recoveries after it was lost; a recovery that fails is
        repeated until it succeeds. `role` is the user of `weir.bus.naming.permissions` that the process acts as.
        """
        try:
            bus = cls(url.split(","), name, access, role)
        except ValueError as error:
            raise OSError(str(error)) from error
        access.check()
        try:
            async with asyncio.timeout(connect_timeout_s):
                await bus._open(is_start=True)
        except TimeoutError as error:
            await bus.close()
            raise OSError(f"no NATS server answers at {without_secrets(url)}") from error
        except BrokerRefused:
            await bus.close()
            raise
        await bus.jetstream.start()
        bus._background = background
        bus._keeper = background.create_task(bus._keep())
        return bus

    @property
    def is_connected(self) -> bool:
        """Whether the connection stands at the moment."""
        return self._protocol is not None

    @property
    def hosts(self) -> list[str]:
        """The hosts of the URLs that were configured."""
        return self.servers.hosts

    @property
    def is_clustered(self) -> bool:
        """Whether the broker is a cluster of servers, of which one may be lost without the others."""
        return self.servers.is_clustered

    @property
    def replicas(self) -> int:
        """How many servers are to store each stream."""
        return self.access.replicas or self.servers.replicas

    @property
    def server_info(self) -> Mapping[str, Any]:
        """The INFO of the server, empty while the broker is away."""
        return {} if self._protocol is None else self._protocol.info

    @property
    def max_payload_bytes(self) -> int:
        """The largest message that the broker accepts."""
        return 1 << 20 if self._protocol is None else int(self._protocol.info.get("max_payload", 1 << 20))

    @property
    def unsent_bytes(self) -> int:
        """About how many published bytes the broker has not read yet."""
        return self._kept_bytes if self._protocol is None else self._protocol.unsent_bytes

    @property
    def local_host(self) -> str:
        """The address of this host on the connection, "" while the broker is away."""
        return "" if self._protocol is None else self._protocol.local_host

    def publish(self, subject: str, data: bytes, reply: str = "", header_block: bytes = b"") -> None:
        """Sends a message within this turn of the event loop. `header_block` is encoded by
        `weir.bus.nats.headers.pack_headers`.

        A message to a process with a link goes through that, without `reply`. While the broker is away other messages are
        kept up to MAX_KEPT_BYTES, except heartbeats and the like.
        """
        if not self.links.send(subject, data):
            self.publish_to_broker(subject, data, reply, header_block)

    def publish_to_broker(self, subject: str, data: bytes, reply: str = "", header_block: bytes = b"") -> None:
        """As `publish`, without links: a message behind one that went to the broker stays behind it."""
        if self._protocol is not None:
            self._protocol.publish(subject, data, reply, header_block)
        elif subject.startswith(_TRANSIENT):
            pass
        elif self._kept_bytes + len(data) + len(header_block) <= MAX_KEPT_BYTES:
            self._kept.append((subject, data, reply, header_block))
            self._kept_bytes += len(data) + len(header_block)
        else:
            # The publisher holds the request until its response, and sends it again.
            _limited.warning("dropped", "the broker is away: dropped a message of %d bytes on %s", len(data), subject)

    async def subscribe_with_links(self, subject: str, callback: Callback) -> None:
        """As `subscribe`, and calls `callback` with messages of processes that have a link to this one, too."""
        await self.subscribe(subject, callback)
        self.links.take(subject, callback)

    async def subscribe(
        self, subject: str, callback: Callback, queue: str = "", drains: bool = False
    ) -> Callable[[], None]:
        """Calls `callback` with each message on `subject`; returns the function that ends the subscription.

        Each message goes to one of the subscribers with the same `queue`. With `drains`, messages that are in flight when
        the subscription ends are still delivered, before a `flush` returns.
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
        """Returns when the broker has processed everything published before. Raises ConnectionError when it is lost."""
        if self._protocol is None:
            raise ConnectionError("the broker is away")
        await self._protocol.ping()

    def on_reconnect(self, listener: Callable[[], Awaitable[None]]) -> None:
        """Calls `listener` after each reconnection: the broker may have lost streams and pull requests.

        Also after the loss of another server of a cluster, which loses messages in flight: streams may have another leader,
        or none yet. A listener that raises is called again.
        """
        self._reconnect_listeners.append(listener)

    def on_loss(self, listener: Callable[[], None]) -> None:
        """Calls `listener` at once when the connection is lost."""
        self._loss_listeners.append(listener)

    def suspect_loss(self, why: str) -> None:
        """Recovers as after a reconnection, because messages may be lost with a server of the cluster or with a stream."""
        if self._protocol is None or self._background is None or self._closing:
            return
        logger.warning("%s: recovering as after a reconnection", why)
        self.losses += 1
        self._recover()

    async def close(self) -> None:
        """Sends what is queued and disconnects."""
        self._closing = True
        self.links.close()
        if self._keeper is not None:
            self._keeper.cancel()
        for task in self._recoveries.values():
            task.cancel()
        if self._protocol is not None:
            with contextlib.suppress(ConnectionError, TimeoutError):
                await asyncio.wait_for(self.flush(), _CONNECT_TIMEOUT_S)
        if self._protocol is not None:
            self._protocol.close()

    async def _open(self, is_start: bool = False) -> None:
        """Connects to the first server that accepts, without a time limit, and restores subscriptions.

        At the start raises BrokerRefused if every server that responds rejects the connection.
        """
        while True:
            refused: BrokerRefused | None = None
            for server in self.servers.candidates():
                try:
                    self._protocol = await asyncio.wait_for(self._dial(server), _CONNECT_TIMEOUT_S)
                except BrokerRefused as error:
                    refused = error
                    self._log_refusal(server, str(error))
                    continue
                except (OSError, TimeoutError) as error:
                    logger.debug("%s: %s", server.place, error)
                    continue
                self.servers.current = server
                self.connections += 1
                self.servers.learn(self._protocol.info)
                self._lost.clear()
                for sid, (subject, queue) in self._subjects.items():
                    self._protocol.send((_sub(subject, queue, sid),))
                kept, self._kept, self._kept_bytes = self._kept, [], 0
                for message in kept:
                    call_each(
                        "weir.bus.nats.connection: publishing a kept message", (self._protocol.publish,), *message
                    )
                return
            if refused is not None and is_start:
                raise refused
            await asyncio.sleep(_RECONNECT_WAIT_S if refused is None else _REFUSED_WAIT_S)

    def _log_refusal(self, server: BrokerServer, text: str) -> None:
        now_s = time.monotonic()
        if text != self._last_refusal[0] or now_s - self._last_refusal[1] >= _REPEAT_LOG_S:
            self._last_refusal = text, now_s
            logger.error("%s: %s", server.place, text)

    async def _dial(self, server: BrokerServer) -> NatsProtocol:
        first = self.servers.first
        return await dial(
            server,
            first,
            self.access,
            self._name,
            lambda: NatsProtocol(self._callbacks, self._turn, self._on_lost, self._on_info),
        )

    def _on_info(self, info: Mapping[str, Any]) -> None:
        if self.servers.learn(info):
            self.suspect_loss("a server of the NATS cluster was lost")

    def _on_lost(self) -> None:
        if self._protocol is not None and self._protocol.last_error:
            logger.warning("nats-server ended the connection: %s", self._protocol.last_error)
        self._protocol = None
        self.losses += 1
        self._lost.set()
        call_each("weir.bus.nats.connection: a listener for the loss of the connection", self._loss_listeners)

    async def _keep(self) -> None:
        """Pings the server, and reconnects whenever the connection is lost. Pings of `flush` do not count."""
        unanswered: list[asyncio.Future[None]] = []
        while True:
            interval_s = _CLUSTER_PING_INTERVAL_S if self.servers.is_clustered else _PING_INTERVAL_S
            try:
                await asyncio.wait_for(self._lost.wait(), interval_s)
            except TimeoutError:
                protocol = self._protocol
                if protocol is not None:
                    unanswered = [pong for pong in unanswered if not pong.done()]
                    if len(unanswered) >= _MAX_PINGS_OUTSTANDING:
                        protocol.abort()
                    else:
                        unanswered.append(protocol.ping())
                continue
            if self._closing:
                return  # `wait_for` drops the cancellation of a task whose event is set already
            unanswered.clear()
            logger.warning("lost the connection to nats-server")
            await self._open()
            logger.warning("connected to nats-server again")
            self._recover()

    def _recover(self) -> None:
        assert self._background is not None  # noqa: S101 - only a connected bus recovers
        for listener in self._reconnect_listeners:
            running = self._recoveries.get(listener)
            if running is None or running.done():  # else it repeats itself
                self._recoveries[listener] = self._background.create_task(self._run_listener(listener))

    async def _run_listener(self, listener: Callable[[], Awaitable[None]]) -> None:
        # JetStream may be ready later than the server's socket, and a cluster takes seconds to elect new leaders.
        losses, logged, logged_s = -1, "", 0.0
        wait_s = _RECONNECT_WAIT_S
        while losses != self.losses:
            losses = self.losses
            try:
                await listener()
            except (NatsError, TimeoutError, OSError) as error:
                if not self.is_connected:
                    return  # it is called again after the reconnection
                losses = -1
                text, now_s = f"{type(error).__name__}: {error}", time.monotonic()
                if text != logged or now_s - logged_s > _REPEAT_LOG_S:
                    logged, logged_s = text, now_s
                    logger.warning("not recovered yet, trying again: %s", text)
                await asyncio.sleep(_RECONNECT_WAIT_S)
            except Exception as error:  # noqa: BLE001 - contained: the other listeners and the role go on
                if not self.is_connected:
                    return
                report("weir.bus.nats.connection: a listener for reconnections", error)
                losses, wait_s = -1, min(2 * wait_s, _MAX_FAILED_WAIT_S)
                await asyncio.sleep(wait_s)


def _sub(subject: str, queue: str, sid: bytes) -> bytes:
    return b"SUB %s %s %s\r\n" % (subject.encode(), queue.encode(), sid)


__all__ = ["BROKER_ERRORS", "Bus", "Callback", "Message"]
