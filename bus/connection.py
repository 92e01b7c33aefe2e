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
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from bus.nats_client import Client  # isort: skip  # ahead of all that imports nats-py
import orjson
from nats.errors import Error as NatsError
from nats.js import JetStreamContext

from bus import subjects
from bus.broker_access import NO_ACCESS, BrokerAccess, BrokerRefused, BrokerServer, without_secrets
from bus.dialing import dial
from bus.live_layout import LiveLayout
from bus.nats_protocol import Callback, Message, NatsProtocol
from bus.patient_jetstream import TRY_S, PatientJetStream, patiently
from bus.server_pool import ServerPool
from runtime.containment import call_each, report
from runtime.log_limiter import LogLimiter

logger = logging.getLogger("weir.bus")

_limited = LogLimiter(logger)

_RECONNECT_WAIT_S = 0.1
_REFUSED_WAIT_S = 1.0
_MAX_FAILED_WAIT_S = 30.0
_COMPLAINT_EVERY_S = 30.0
_PING_INTERVAL_S = 5.0
_CLUSTER_PING_INTERVAL_S = 1.0  # there is another server to go to
_MAX_PINGS_OUTSTANDING = 2
_CONNECT_TIMEOUT_S = 2.0
_API_TIMEOUT_S = 5.0
_OF_THE_MOMENT = (
    "heartbeat.",
    "presence.",
    "probe.",
    subjects.STATISTICS_QUERY,
    subjects.counters(""),
    "$JS.API.CONSUMER.MSG.NEXT.",
)
"""How subjects begin whose messages say nothing once the broker is back: they are sent again then, or every second. Kept,
each second of an outage would be answered and counted at its end."""

MAX_KEPT_BYTES = 64 << 20
"""What is published while the broker is away is kept up to this size; beyond it, it is dropped and logged."""


class Bus:
    """A connection for publishing and subscribing; `jetstream` is for streams, consumers and buckets.

    `live_layout` says in which streams live requests lie, as `bus.streams.ensure_streams` has found it.
    """

    def __init__(self, urls: list[str], name: str, access: BrokerAccess = NO_ACCESS, role: str = "admin") -> None:
        self.servers = ServerPool(urls)
        self.access = access
        self._name = name
        self.inbox_prefix = subjects.role_inbox(role)  # this role alone may subscribe below it
        self._protocol: NatsProtocol | None = None
        self._callbacks: dict[bytes, Callback] = {}
        self._subjects: dict[bytes, tuple[str, str]] = {}  # and queue groups
        self._next_sid = 0
        self._kept: list[tuple[str, bytes, str, bytes]] = []
        self._kept_bytes = 0
        self.connections = 0  # how often it was connected
        self.losses = 0  # how often the connection was lost, or what lies behind it may have been
        self._closing = False
        self._lost = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._background: asyncio.TaskGroup | None = None
        self._reconnect_listeners: list[Callable[[], Awaitable[None]]] = []
        self._loss_listeners: list[Callable[[], None]] = []
        self._recoveries: dict[Callable[[], Awaitable[None]], asyncio.Task[None]] = {}
        self._complaint: tuple[str, float] = "", 0.0
        self.live_layout = LiveLayout()
        self._admin = Client()
        self._has_admin = False  # nats-py can't close what was never opened
        self.jetstream: JetStreamContext = PatientJetStream(self._admin, lambda: self.is_clustered)

    @classmethod
    async def connect(
        cls,
        url: str,
        name: str,
        background: asyncio.TaskGroup,
        connect_timeout_s: float = 10.0,
        access: BrokerAccess = NO_ACCESS,
        role: str = "admin",
    ) -> Bus:
        """Connects to the server(s) at `url` (comma-separated). Raises OSError when none answers in time, or will have us.

        The connection is kept by a task in `background`, and so is each recovery after it was lost: one that fails is
        tried again, until it succeeds. `role` is the user of `bus.permissions` that it acts as.
        """
        try:
            bus = cls(url.split(","), name, access, role)
        except ValueError as error:
            raise OSError(str(error)) from error
        access.check()
        try:
            async with asyncio.timeout(connect_timeout_s):
                await bus._open(is_start=True)
                await bus._connect_admin()
        except TimeoutError as error:
            await bus.close()
            raise OSError(f"no NATS server answers at {without_secrets(url)}") from error
        except BrokerRefused:
            await bus.close()
            raise
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
        return self.servers.hosts

    @property
    def is_clustered(self) -> bool:
        """Whether the broker is more than one server, of which one may go without the others."""
        return self.servers.is_clustered

    @property
    def replicas(self) -> int:
        """How many servers are to keep what is stored."""
        return self.access.replicas or self.servers.replicas

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

    @property
    def local_host(self) -> str:
        """The address of this host from which the broker is reached, "" while it is away."""
        return "" if self._protocol is None else self._protocol.local_host

    def publish(self, subject: str, data: bytes, reply: str = "", header_block: bytes = b"") -> None:
        """Sends `data` within this turn of the event loop; while the broker is away it is kept, up to a limit.

        Heartbeats and the like are not kept (`_OF_THE_MOMENT`).

        `header_block` is what `bus.headers.pack_headers` makes.
        """
        if self._protocol is not None:
            self._protocol.publish(subject, data, reply, header_block)
        elif subject.startswith(_OF_THE_MOMENT):
            pass
        elif self._kept_bytes + len(data) + len(header_block) <= MAX_KEPT_BYTES:
            self._kept.append((subject, data, reply, header_block))
            self._kept_bytes += len(data) + len(header_block)
        else:
            # Whoever published holds the request until its answer and sends again: nothing is lost here.
            _limited.warning("dropped", "the broker is away: dropped a message of %d bytes on %s", len(data), subject)

    def defer(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once all that has arrived by now is dispatched, before what it set off is sent."""
        if self._protocol is not None:
            self._protocol.defer(callback)
        else:
            asyncio.get_running_loop().call_soon(callback)

    def at_turn_end(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once all that arrives in this turn of the event loop is taken in, on whichever connection.

        What it publishes leaves in one write, without another turn.
        """
        if self._protocol is not None:
            self._protocol.at_turn_end(callback)
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

    async def ask(
        self, subject: str, question: Mapping[str, Any] | None = None, once_s: float | None = None
    ) -> dict[str, Any]:
        """The answer of JetStream's API, which may be an `error`. Raises NatsError or TimeoutError when there is none.

        While a cluster chooses a leader it is asked again; but with `once_s` once, and waited for so long.
        """
        data = orjson.dumps(question) if question else b""
        patience_s = once_s or (TRY_S if self.is_clustered else _API_TIMEOUT_S)
        is_asked_again = self.is_clustered and once_s is None
        message = await patiently(is_asked_again, lambda: self._admin.request(subject, data, timeout=patience_s))
        answer = orjson.loads(message.data)
        return answer if isinstance(answer, dict) else {}

    def on_reconnect(self, listener: Callable[[], Awaitable[None]]) -> None:
        """Calls `listener` after each reconnection: the broker may have come back without streams and pulls.

        So it is after the loss of another server of a cluster: what was on its way there is lost, whoever holds the streams
        may have changed, and they may have no leader yet.
        """
        self._reconnect_listeners.append(listener)

    def on_loss(self, listener: Callable[[], None]) -> None:
        """Calls `listener` at once when the connection is lost."""
        self._loss_listeners.append(listener)

    def doubt(self, why: str) -> None:
        """What was sent may be gone, with a server of the cluster or a stream: all is recovered as after a reconnection."""
        if self._protocol is None or self._background is None or self._closing:
            return
        logger.warning("%s: recovering", why)
        self.losses += 1
        self._recover()

    async def close(self) -> None:
        """Sends what is waiting and disconnects."""
        self._closing = True
        if self._keeper is not None:
            self._keeper.cancel()
        for task in self._recoveries.values():
            task.cancel()
        if self._protocol is not None:
            with contextlib.suppress(ConnectionError, TimeoutError):
                await asyncio.wait_for(self.flush(), _CONNECT_TIMEOUT_S)
        if self._protocol is not None:
            self._protocol.close()
        if self._has_admin and (self._admin.is_connected or self._admin.is_reconnecting):
            # What asyncio and uvloop say of a write to a connection whose other end has gone.
            with contextlib.suppress(OSError, RuntimeError):
                await self._admin.close()

    async def _open(self, is_start: bool = False) -> None:
        """Connects to the first server that answers, trying for ever, and restores what stood.

        At the start raises BrokerRefused when no server is there that will have us.
        """
        while True:
            refused: BrokerRefused | None = None
            for server in self.servers.candidates():
                try:
                    self._protocol = await asyncio.wait_for(self._dial(server), _CONNECT_TIMEOUT_S)
                except BrokerRefused as error:
                    refused = error
                    self._complain(server, str(error))
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
                    call_each("bus.connection: publishing what was kept", (self._protocol.publish,), *message)
                return
            if refused is not None and is_start:
                raise refused
            await asyncio.sleep(_RECONNECT_WAIT_S if refused is None else _REFUSED_WAIT_S)

    def _complain(self, server: BrokerServer, text: str) -> None:
        now_s = time.monotonic()
        if text != self._complaint[0] or now_s - self._complaint[1] >= _COMPLAINT_EVERY_S:
            self._complaint = text, now_s
            logger.error("%s: %s", server.place, text)

    async def _dial(self, server: BrokerServer) -> NatsProtocol:
        first = self.servers.first
        return await dial(server, first, self.access, self._name, self._callbacks, self._on_lost, self._on_info)

    def _on_info(self, info: Mapping[str, Any]) -> None:
        if self.servers.learn(info):
            self.doubt("a server of the NATS cluster has gone")

    def _on_lost(self) -> None:
        if self._protocol is not None and self._protocol.last_error:
            logger.warning("nats-server ended the connection: %s", self._protocol.last_error)
        self._protocol = None
        self.losses += 1
        self._lost.set()
        call_each("bus.connection: a listener for the loss of the connection", self._loss_listeners)

    async def _keep(self) -> None:
        """Pings, and connects again whenever the connection is lost.

        Only pings of its own count: a `flush` may have sent some a moment ago.
        """
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
            unanswered.clear()
            logger.warning("lost the connection to nats-server")
            await self._open()
            logger.warning("connected to nats-server again")
            self._recover()

    def _recover(self) -> None:
        assert self._background is not None  # noqa: S101 - only a connected bus recovers
        for listener in self._reconnect_listeners:
            running = self._recoveries.get(listener)
            if running is None or running.done():  # else it begins again by itself
                self._recoveries[listener] = self._background.create_task(self._run_listener(listener))

    async def _run_listener(self, listener: Callable[[], Awaitable[None]]) -> None:
        # JetStream may need a moment more than the server's socket, and so may nats-py to connect again; a cluster takes
        # seconds to choose new leaders.
        losses, told, told_s = -1, "", 0.0
        wait_s = _RECONNECT_WAIT_S
        while losses != self.losses:
            losses = self.losses
            try:
                await listener()
            except (NatsError, TimeoutError, OSError) as error:
                if not self.is_connected:
                    return  # it is called again when the broker is back
                losses = -1
                text, now_s = f"{type(error).__name__}: {error}", time.monotonic()
                if text != told or now_s - told_s > _COMPLAINT_EVERY_S:
                    told, told_s = text, now_s
                    logger.warning("not recovered yet: %s", text)
                await asyncio.sleep(_RECONNECT_WAIT_S)
            except Exception as error:  # noqa: BLE001 - contained: the other listeners and the role go on
                if not self.is_connected:
                    return
                report("bus.connection: a listener for reconnections", error)
                losses, wait_s = -1, min(2 * wait_s, _MAX_FAILED_WAIT_S)
                await asyncio.sleep(wait_s)

    async def _connect_admin(self) -> None:
        self._has_admin = True
        first = self.servers.first
        self._admin.needs_tls = self.access.wants_tls(first, {})
        while True:
            try:
                await self._admin.connect(
                    servers=[f"nats://{server.place}" for server in self.servers.candidates()],
                    name=f"{self._name} admin",
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=_RECONNECT_WAIT_S,  # type: ignore[arg-type]
                    connect_timeout=2,
                    ping_interval=1 if self.servers.is_clustered else 5,
                    inbox_prefix=self.inbox_prefix,
                    error_cb=_on_admin_error,
                    **self.access.nats_py_options(first),
                )
                return
            except (NatsError, OSError) as error:
                logger.debug("admin connection: %s", error)
                await asyncio.sleep(_RECONNECT_WAIT_S)


async def _on_admin_error(error: Exception) -> None:
    logger.debug("nats-py: %s", error)


def _sub(subject: str, queue: str, sid: bytes) -> bytes:
    return b"SUB %s %s %s\r\n" % (subject.encode(), queue.encode(), sid)


__all__ = ["Bus", "Callback", "Message"]
