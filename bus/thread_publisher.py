"""`ThreadPublisher`: publishing from threads, without waking the event loop.

An instance's thread that hands its answers to the event loop pays for a wake-up, two hand-overs of the interpreter lock
and another turn of the loop, about 60 us a batch. Here it writes to a connection of its own, under a lock. The loop only
reads that connection, to answer the server's pings and to notice its end; it goes to the server that the `Bus` is connected
to, and ends with that connection, whose pings notice a server that hangs. While there is no such connection, messages
take the way through the loop's `Bus`, which keeps them until the broker is back.

The event loop never waits for the connection, nor for a thread that writes to it: what it publishes itself and can't be
written at once is handed to a thread of this module's, and stays in its place in the order.
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

from bus.connection import Bus
from bus.dialing import dial_from_thread
from bus.tls_socket import TlsSocket
from runtime.containment import contained

logger = logging.getLogger("weir.bus")

_RECONNECT_WAIT_S = 0.2
_TIMEOUT_S = 5.0
_READ_BYTES = 4096

MAX_LOOP_BYTES = 4096
"""What the event loop writes itself where the connection takes more: so much it takes without waiting."""

_BUSY_WAIT_S = 0.01
"""How long the event loop leaves the connection alone while a thread writes to it."""

Outgoing = tuple[str, bytes]
"""A message to publish: (subject, data)."""

OnSent = Callable[[], None]
"""Must not raise, and must not publish."""


class ThreadPublisher:
    """See the module. `publish` may be called from any thread; everything else belongs to the event loop."""

    def __init__(self, bus: Bus, name: str) -> None:
        self._bus = bus
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._socket: socket.socket | TlsSocket | None = None
        self._loop_thread = threading.get_ident()
        self._handed: deque[tuple[Sequence[Outgoing], OnSent]] = deque()  # by the loop, for the thread that locks next
        self._is_handed = threading.Event()
        self._owes_pong = False
        self._writer: threading.Thread | None = None
        self._is_closed = False
        self._ended = asyncio.Event()
        bus.on_loss(self._ended.set)
        self._keeper: asyncio.Task[None] | None = None

    def start(self, background: asyncio.TaskGroup) -> None:
        """Connects, and connects again whenever the connection is lost, in a task of `background`."""
        self._keeper = background.create_task(self._keep())

    def publish(self, messages: Iterable[Outgoing], on_sent: OnSent = lambda: None) -> None:
        """Sends the messages, in order, in one write; calls `on_sent` after that, in whatever thread has written them."""
        messages = list(messages)
        if threading.get_ident() != self._loop_thread:
            with self._lock:
                self._write_handed()
                self._write(messages)
            on_sent()
        elif self._written_at_once(messages):
            on_sent()
        else:
            self._handed.append((messages, on_sent))
            self._wake_writer()

    async def close(self) -> None:
        """Closes the connection; what is published from now on goes through the bus."""
        if self._keeper is not None:
            self._keeper.cancel()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._lock:
            self._write_handed()
            self._drop()
        self._is_closed = True
        self._is_handed.set()

    def _written_at_once(self, messages: Sequence[Outgoing]) -> bool:
        """Whether the event loop has written the messages, without waiting for anything."""
        if sum(len(data) for _, data in messages) > MAX_LOOP_BYTES or not self._lock.acquire(blocking=False):
            return False
        try:
            if self._handed or not self._is_writable():
                return False
            self._write(messages)
            return True
        finally:
            self._lock.release()

    def _is_writable(self) -> bool:
        """Called with the lock held: whether the connection takes something at once. So does the bus, without one."""
        if self._socket is None:
            return True
        poller = select.poll()
        poller.register(self._socket.fileno(), select.POLLOUT)
        return bool(poller.poll(0))

    def _wake_writer(self) -> None:
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_what_is_handed, name="publisher", daemon=True)
            self._writer.start()
        self._is_handed.set()

    def _write_what_is_handed(self) -> None:
        while not self._is_closed:
            self._is_handed.wait()
            self._is_handed.clear()
            with self._lock:
                self._write_handed()

    def _write_handed(self) -> None:
        """Called with the lock held."""
        if self._owes_pong and self._socket is not None:
            self._owes_pong = False
            self._sent(b"PONG\r\n")
        while self._handed:
            messages, on_sent = self._handed.popleft()
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
        assert self._socket is not None  # noqa: S101 - its caller has looked
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
        self._bus.publish(subject, data)

    def _drop(self) -> None:
        """Called with the lock held."""
        if self._socket is not None:
            # Shut down, not closed: the loop still watches the descriptor, and closes it when it reads the end.
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the peer was faster
            self._socket = None

    async def _keep(self) -> None:
        while True:
            if self._bus.is_connected:
                try:
                    connection = await asyncio.to_thread(self._connect)
                except OSError as error:
                    logger.debug("no connection for answers: %s", error)
                else:
                    await self._watch(connection)
            await asyncio.sleep(_RECONNECT_WAIT_S)

    def _connect(self) -> socket.socket | TlsSocket:
        servers = self._bus.servers
        server = servers.current or servers.first
        return dial_from_thread(server, servers.first, self._bus.access, f"{self._name} answers", _TIMEOUT_S)

    async def _watch(self, connection: socket.socket | TlsSocket) -> None:
        ended = self._ended
        ended.clear()

        busy: asyncio.TimerHandle | None = None

        def watch() -> None:
            self._loop.add_reader(connection.fileno(), readable)

        def readable() -> None:
            nonlocal busy
            if not self._lock.acquire(blocking=False):
                # Reading and writing what is encrypted exclude each other, and a thread may have to wait with its write.
                self._loop.remove_reader(connection.fileno())
                busy = self._loop.call_later(_BUSY_WAIT_S, watch)
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
                ended.set()

        watch()
        with self._lock:
            self._socket = connection
        try:
            if self._bus.is_connected:
                await ended.wait()
        finally:
            if busy is not None:
                busy.cancel()
            self._loop.remove_reader(connection.fileno())
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # so that no thread is left waiting with its write, and the lock
            with self._lock:
                if self._socket is connection:
                    self._socket = None
            connection.close()
