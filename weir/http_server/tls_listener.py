"""`TlsListener`: accepts connections and shakes hands on them; each counts from the moment it is accepted.

A server of asyncio that has a TLS context makes no protocol before the handshake is over: until then nothing counts the
connection, or can end it for another one, so that clients which only connect could use up the files of the process.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial

from weir.http_server.connection_cap import CappedConnection, ConnectionCap, principal_of
from weir.runtime.log_limiter import LogLimiter

_limited = LogLimiter(logging.getLogger("weir.connections"))

_RETRY_S = 0.5
"""After a failure to accept a connection, which is nearly always a lack of files."""


SHUTDOWN_TIMEOUT_S = 3600.0
"""How long the event loop waits for what was written to be read, and for the client to agree to the end of the connection.
The connections have bounds of their own: a response that a client reads slowly must not be cut short."""


class TlsListener:
    """Listens on `listener`, a bound and listening socket, on the running event loop.

    `make_protocol` gets what counts in `cap` for the connection so far: the protocol removes it when it counts itself.
    `current_context` returns the context for the next connection: certificates change while the server runs. A handshake
    that takes longer than `timeout_s` seconds ends the connection.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[CappedConnection], asyncio.Protocol],
        current_context: Callable[[], ssl.SSLContext],
        cap: ConnectionCap,
        timeout_s: float,
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._current_context = current_context
        self._cap = cap
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[_Handshake] = set()
        listener.setblocking(False)
        self._accepting = self._loop.create_task(self._accept())
        self._accepting.add_done_callback(lambda _task: listener.close())

    def close(self) -> None:
        """Stops listening, and ends the connections on which TLS is not agreed on yet."""
        self._accepting.cancel()
        for handshake in list(self._handshakes):
            # Of a connection that counts itself by now, the task only has to end: cancelled, it would close the transport,
            # which could not be aborted any more.
            if self._cap.counts(handshake):
                handshake.task.cancel()

    async def _accept(self) -> None:
        while True:
            try:
                connection, address = await self._loop.sock_accept(self._listener)
            except OSError as error:
                _limited.warning("accept", "can't accept a connection: %s; trying again in %.1f s", error, _RETRY_S)
                await asyncio.sleep(_RETRY_S)
                continue
            handshake = _Handshake(self._loop)
            if not self._cap.admit(handshake, principal_of(address[0])):
                connection.close()
                continue
            handshake.task = self._loop.create_task(self._shake_hands(handshake, connection))
            self._handshakes.add(handshake)
            handshake.task.add_done_callback(partial(self._forget, handshake))

    def _forget(self, handshake: _Handshake, _task: asyncio.Task[None]) -> None:
        self._handshakes.discard(handshake)

    async def _shake_hands(self, handshake: _Handshake, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._make_protocol(handshake),
                connection,
                ssl=self._current_context(),
                ssl_handshake_timeout=self._timeout_s,
                ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            )
        except OSError:  # the client speaks no TLS, has shown no certificate, was too slow, or has gone
            if handshake.idle_s() >= self._timeout_s:
                self._cap.count_silent()
        finally:
            self._cap.remove(handshake)


class _Handshake:
    """Counts for a connection on which TLS is not agreed on yet."""

    has_served = False
    task: asyncio.Task[None]

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._began_s = loop.time()

    def idle_s(self) -> float:
        """Implements `CappedConnection.idle_s`."""
        return self._loop.time() - self._began_s

    def make_room(self) -> None:
        """Implements `CappedConnection.make_room`."""
        self.task.cancel()
