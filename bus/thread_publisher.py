"""`ThreadPublisher`: publishing from threads, without waking the event loop.

An instance's thread that hands its answers to the event loop pays for a wake-up, two hand-overs of the interpreter lock
and another turn of the loop, about 60 us a batch. Here it writes to a connection of its own, under a lock. The loop only
reads that connection, to answer the server's pings and to notice its end; it goes to the server that the `Bus` is connected
to, and ends with that connection, whose pings notice a server that hangs. While there is no such connection, messages
take the way through the loop's `Bus`, which keeps them until the broker is back.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Iterable

from bus.connection import Bus
from bus.dialing import dial_from_thread
from bus.tls_socket import TlsSocket
from runtime.containment import contained

logger = logging.getLogger("weir.bus")

_RECONNECT_WAIT_S = 0.2
_TIMEOUT_S = 5.0
_READ_BYTES = 4096

Outgoing = tuple[str, bytes]
"""A message to publish: (subject, data)."""


class ThreadPublisher:
    """See the module. `publish` may be called from any thread; everything else belongs to the event loop."""

    def __init__(self, bus: Bus, name: str) -> None:
        self._bus = bus
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._socket: socket.socket | TlsSocket | None = None
        self._ended = asyncio.Event()
        bus.on_loss(self._ended.set)
        self._keeper: asyncio.Task[None] | None = None

    def start(self, background: asyncio.TaskGroup) -> None:
        """Connects, and connects again whenever the connection is lost, in a task of `background`."""
        self._keeper = background.create_task(self._keep())

    def publish(self, messages: Iterable[Outgoing]) -> None:
        """Sends the messages, in order, in one write."""
        messages = list(messages)
        with self._lock:
            if self._socket is not None:
                pieces: list[bytes] = []
                for subject, data in messages:
                    pieces += (f"PUB {subject} {len(data)}\r\n".encode(), data, b"\r\n")
                try:
                    self._socket.sendall(b"".join(pieces))
                    return
                except OSError as error:
                    logger.warning("publishing failed: %s", error)
                    self._drop()
        self._loop.call_soon_threadsafe(self._publish_through_bus, messages)

    async def close(self) -> None:
        """Closes the connection; what is published from now on goes through the bus."""
        if self._keeper is not None:
            self._keeper.cancel()
        with self._lock:
            self._drop()

    def _publish_through_bus(self, messages: list[Outgoing]) -> None:
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

        def readable() -> None:
            try:
                with self._lock:  # reading and writing what is encrypted exclude each other
                    data = connection.recv(_READ_BYTES, socket.MSG_DONTWAIT)
                    if b"PING\r\n" in data and self._socket is connection:
                        connection.sendall(b"PONG\r\n")
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                ended.set()

        self._loop.add_reader(connection.fileno(), readable)
        with self._lock:
            self._socket = connection
        try:
            if self._bus.is_connected:
                await ended.wait()
        finally:
            self._loop.remove_reader(connection.fileno())
            with self._lock:
                if self._socket is connection:
                    self._socket = None
            connection.close()
