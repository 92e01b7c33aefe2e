"""`ThreadPublisher`: sends messages from threads without waking the event loop.

Messages to processes with a link (`weir.bus.links`) go through it. What follows is about the others.

A thread of an instance that passes its responses to the event loop costs a wake-up, two hand-overs of the interpreter lock
and another turn of the loop, about 60 us a batch. Here it writes to a separate connection, under a lock. The loop only
reads that connection, to answer the server's pings and to notice its end. The connection goes to the server that the `Bus`
is connected to, and ends with that one, whose pings detect a server that hangs. Without it, messages go through the
`Bus`, which keeps them until the broker is connected again.

The event loop never waits for the connection or for a thread that writes to it: messages of its own that can't be written
at once are queued for a writer thread, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from weir.bus.links.framing import Outgoing
from weir.bus.links.link import Link, Sent, WhenWritten
from weir.bus.nats.connection import Bus
from weir.bus.nats.dialing import TlsSocket, dial_from_thread
from weir.runtime.containment import contained

logger = logging.getLogger("weir.bus")

_RECONNECT_WAIT_S = 0.2
_TIMEOUT_S = 5.0
_READ_BYTES = 4096

MAX_LOOP_BYTES = 4096
"""The most that the event loop writes itself: a connection that is writable accepts so much without blocking."""

_BUSY_WAIT_S = 0.01
"""How long the event loop waits before it reads again while a thread writes to the connection."""

OnSent = Callable[[], None]
"""Must not raise, and must not publish."""


class ThreadPublisher:
    """A second connection for publishing. `publish` may be called from any thread, the rest only in the event loop."""

    def __init__(self, bus: Bus, name: str) -> None:
        self._bus = bus
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._socket: socket.socket | TlsSocket | None = None
        self._loop_thread = threading.get_ident()
        self._queued: deque[tuple[Sequence[Outgoing], OnSent]] = (
            deque()
        )  # by the loop, for the next thread that takes the lock
        self._has_queued = threading.Event()
        self._owes_pong = False
        self._writer: threading.Thread | None = None
        self._is_closed = False
        self._busy: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()
        bus.on_loss(self._ended.set)
        bus.links.send_unsent = self.send
        self._keeper: asyncio.Task[None] | None = None

    def start(self, background: asyncio.TaskGroup) -> None:
        """Connects and reconnects in a task of `background`."""
        self._keeper = background.create_task(self._keep())

    def publish(self, messages: Iterable[Outgoing], on_sent: OnSent = lambda: None) -> None:
        """Sends the messages to the broker in order, in one write, then calls `on_sent` in the thread that wrote them."""
        messages = list(messages)
        if threading.get_ident() != self._loop_thread:
            with self._lock:
                self._write_queued()
                self._write(messages)
            on_sent()
        elif self._written_at_once(messages):
            on_sent()
        else:
            self._queued.append((messages, on_sent))
            self._wake_writer()

    def send(self, messages: Sequence[Outgoing], last: Sequence[Outgoing] = (), on_sent: OnSent = lambda: None) -> None:
        """Sends `messages`, each through the link to its process or, without one, to the broker; then those in `last`.

        `last` leaves once the kernel has all others, so that none of them is lost with this process; behind others that go
        to the broker, because their link has ended, it goes to the broker, too. Calls `on_sent` in the end, in any thread.
        """
        by_link, others = self._by_link(messages)
        ends, other_ends = self._by_link(last)
        if not others and not other_ends and len(ends) == 1 and by_link.keys() <= ends.keys():
            # A process that is both caller and scheduler takes everything in one write.
            ((end, linked),) = ends.items()
            by_link, ends = {end: [*by_link.get(end, ()), *linked]}, {}
        buffering: list[Link] = []
        for link, linked in by_link.items():
            sent = link.send(linked)
            if sent is Sent.REJECTED:
                others += linked
            elif sent is Sent.BUFFERED and last:
                buffering.append(link)
        _when_written(buffering, partial(self._send_last, others, ends, other_ends, on_sent))

    def _send_last(
        self,
        others: list[Outgoing],
        ends: dict[Link, list[Outgoing]],
        other_ends: list[Outgoing],
        on_sent: OnSent,
        are_written: bool,
    ) -> None:
        to_broker = [*others, *other_ends]
        for link, linked in ends.items():
            # Behind messages to the broker only the broker keeps the order.
            if others or not are_written or link.send(linked) is Sent.REJECTED:
                to_broker += linked
        if to_broker:
            self.publish(to_broker, on_sent)
        else:
            on_sent()

    def _by_link(self, messages: Iterable[Outgoing]) -> tuple[dict[Link, list[Outgoing]], list[Outgoing]]:
        """The messages by the link to their process, and those to processes without one."""
        route, by_link, others = self._bus.links.route, {}, []  # type: ignore[var-annotated]
        for message in messages:
            link = route(message[0])
            if link is None:
                others.append(message)
            elif link in by_link:
                by_link[link].append(message)
            else:
                by_link[link] = [message]
        return by_link, others

    async def close(self) -> None:
        """Closes the connection; later messages go through the bus."""
        if self._keeper is not None:
            self._keeper.cancel()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._lock:
            self._write_queued()
            self._drop()
        self._is_closed = True
        self._has_queued.set()

    def _written_at_once(self, messages: Sequence[Outgoing]) -> bool:
        """Writes the messages in the event loop if that needs no waiting; returns whether it did."""
        if sum(len(data) for _, data in messages) > MAX_LOOP_BYTES or not self._lock.acquire(blocking=False):
            return False
        try:
            if self._queued or not self._is_writable():
                return False
            self._write(messages)
            return True
        finally:
            self._lock.release()

    def _is_writable(self) -> bool:
        """Called with the lock held: whether a write would not block. Without a connection the bus takes the messages."""
        if self._socket is None:
            return True
        poller = select.poll()
        poller.register(self._socket.fileno(), select.POLLOUT)
        return bool(poller.poll(0))

    def _wake_writer(self) -> None:
        if self._writer is None:
            self._writer = threading.Thread(target=self._run_writer, name="publisher", daemon=True)
            self._writer.start()
        self._has_queued.set()

    def _run_writer(self) -> None:
        while not self._is_closed:
            self._has_queued.wait()
            self._has_queued.clear()
            with self._lock:
                self._write_queued()

    def _write_queued(self) -> None:
        """Called with the lock held."""
        if self._owes_pong and self._socket is not None:
            self._owes_pong = False
            self._sent(b"PONG\r\n")
        while self._queued:
            messages, on_sent = self._queued.popleft()
            self._write(messages)
            on_sent()

    def _write(self, messages: Sequence[Outgoing]) -> None:
        """Called with the lock held."""
        if self._socket is not None:
            pieces: list[bytes] = []
            for subject, data in messages:
                pieces += (f"PUB {subject} {len(data)}\r\n".encode(), data, b"\r\n")
            if self._sent(b"".join(pieces)):
                return
        self._loop.call_soon_threadsafe(self._publish_through_bus, messages)

    def _sent(self, data: bytes) -> bool:
        assert self._socket is not None  # noqa: S101 - checked by the caller
        try:
            self._socket.sendall(data)
            return True
        except OSError as error:
            logger.warning("publishing failed: %s", error)
            self._drop()
            return False

    def _publish_through_bus(self, messages: Sequence[Outgoing]) -> None:
        for subject, data in messages:
            self._publish_one(subject, data)

    @contained()
    def _publish_one(self, subject: str, data: bytes) -> None:
        self._bus.publish_to_broker(subject, data)

    def _drop(self) -> None:
        """Called with the lock held."""
        if self._socket is not None:
            # Shut down, not closed: the loop still watches the descriptor. It need not report the end: after a reset uvloop
            # stops watching.
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the peer has closed it
            self._socket = None
            self._loop.call_soon_threadsafe(self._ended.set)

    async def _keep(self) -> None:
        while True:
            if self._bus.is_connected:
                try:
                    connection = await asyncio.to_thread(self._connect)
                except OSError as error:
                    logger.debug("no second connection for responses: %s", error)
                else:
                    await self._watch(connection)
            await asyncio.sleep(_RECONNECT_WAIT_S)

    def _connect(self) -> socket.socket | TlsSocket:
        servers = self._bus.servers
        server = servers.current or servers.first
        return dial_from_thread(server, servers.first, self._bus.access, f"{self._name} answers", _TIMEOUT_S)

    async def _watch(self, connection: socket.socket | TlsSocket) -> None:
        """Uses the connection until it ends, or the bus's does."""
        self._ended.clear()
        self._loop.add_reader(connection.fileno(), self._read, connection)
        with self._lock:
            self._socket = connection
        try:
            if self._bus.is_connected:
                await self._ended.wait()
        finally:
            if self._busy is not None:
                self._busy.cancel()
            self._loop.remove_reader(connection.fileno())
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # ends a write that blocks a thread, which holds the lock
            with self._lock:
                if self._socket is connection:
                    self._socket = None
            connection.close()

    def _read(self, connection: socket.socket | TlsSocket) -> None:
        """Called when the connection is readable."""
        if not self._lock.acquire(blocking=False):
            # An encrypted connection is not read and written at once, and the write of a thread may block.
            self._loop.remove_reader(connection.fileno())
            self._busy = self._loop.call_later(
                _BUSY_WAIT_S, self._loop.add_reader, connection.fileno(), self._read, connection
            )
            return
        try:
            data = connection.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        finally:
            self._lock.release()
        if b"PING\r\n" in data:
            self._owes_pong = True
            self._wake_writer()
        if not data:
            self._ended.set()


def _when_written(links: Sequence[Link], then: WhenWritten, are_written: bool = True) -> None:
    """Calls `then` once none of the links has anything buffered, or has ended, with whether all has been written."""
    if links:
        links[0].when_written(lambda is_written: _when_written(links[1:], then, are_written and is_written))
    else:
        then(are_written)
