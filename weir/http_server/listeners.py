"""`HttpListeners`: the HTTP servers of a process and their ports."""

from __future__ import annotations

import asyncio
import functools
import socket
import time
from collections.abc import Callable

from weir.http_server.client_connection import FIRST_REQUEST_S
from weir.http_server.connection import HttpConnection
from weir.http_server.connection_cap import CappedConnection, ConnectionCap
from weir.http_server.tls import ServerTls
from weir.http_server.tls_listener import TlsListener

_BACKLOG = 2048
_POLL_S = 0.01
_CLOSE_TIMEOUT_S = 5.0


class HttpListeners:
    """Binds ports at once, so that a port that is taken ends the start; they are served later."""

    def __init__(self) -> None:
        self._sockets: dict[str, socket.socket] = {}
        self._servers: dict[str, asyncio.Server | TlsListener] = {}
        self._connections: dict[str, set[HttpConnection]] = {}
        self._tls: tuple[ServerTls, ConnectionCap] | None = None

    def encrypt(self, tls: ServerTls | None, cap: ConnectionCap) -> None:
        """Encrypts the connections to all ports that are served from now on, not where `tls` is None; they count in `cap`
        before they are agreed on.
        """
        self._tls = None if tls is None else (tls, cap)

    def bind(self, name: str, address: str, port: int, reuse: bool = False) -> None:
        """Binds a port (0: a free one) for `name`; `reuse` shares it with others that do so too. Raises OSError."""
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            listener.bind((address, port))
        except OSError as error:
            listener.close()
            raise OSError(f"{name} can't listen on {address}:{port}: {error.strerror}") from error
        listener.setblocking(False)
        self._sockets[name] = listener

    def has(self, name: str) -> bool:
        """Whether a port was bound for `name`."""
        return name in self._sockets

    def port(self, name: str) -> int:
        """The port of `name`."""
        return int(self._sockets[name].getsockname()[1])

    async def serve(self, name: str, make_connection: Callable[..., HttpConnection]) -> None:
        """Accepts connections on the port of `name`; `make_connection` takes the set that holds the open ones."""
        connections = self._connections[name] = set()
        make, listener = functools.partial(make_connection, connections=connections), self._sockets[name]
        if self._tls is None:
            loop = asyncio.get_running_loop()
            self._servers[name] = await loop.create_server(make, sock=listener, backlog=_BACKLOG)
            return

        def make_encrypted(handshake: CappedConnection) -> HttpConnection:
            connection = make()
            connection.handshake = handshake
            return connection

        tls, cap = self._tls
        listener.listen(_BACKLOG)
        self._servers[name] = TlsListener(listener, make_encrypted, lambda: tls.context, cap, FIRST_REQUEST_S)

    def connections(self, name: str) -> list[HttpConnection]:
        """The open connections to the port of `name`."""
        return list(self._connections.get(name, ()))

    def all_connections(self) -> list[HttpConnection]:
        """The open connections to all ports."""
        return [connection for connections in self._connections.values() for connection in connections]

    def stop(self, name: str, at_once: bool = False) -> None:
        """Accepts no more connections for `name`, if it is served. Open ones end with their next response, or when they
        stay idle for a while (`HttpConnection.linger_s`), or `at_once`.
        """
        if name in self._servers:
            self._servers[name].close()
        for connection in self.connections(name):
            if at_once:
                connection.transport.close()
            else:
                connection.shutdown()

    async def wait_disconnected(self, name: str, timeout_s: float) -> None:
        """Returns when `name`, which was stopped, has no open connection any more, or after `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        while self._connections.get(name) and time.monotonic() < end_s:
            await asyncio.sleep(_POLL_S)

    async def wait_closed(self) -> None:
        """Returns when all connections have ended, or after a timeout."""
        end_s = time.monotonic() + _CLOSE_TIMEOUT_S
        for name in self._servers:
            await self.wait_disconnected(name, end_s - time.monotonic())
