"""`BodyReader`: receives the rest of a large request body where its worker reads it, without copies on the way.

An event loop passes what it reads to the protocol as new `bytes`, and the parser passes the body on as new `bytes` again.
For a body in a payload slot, both are copies of all of it. While such a body arrives, a `BodyReader` is the protocol of
the transport instead of its `HttpConnection`: the loop asks it for memory, and reads into the slot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from weir.http_server.asgi import HttpExchange
from weir.http_server.read_turns import TURN_BYTES, ReadTurns

DIRECT_FROM_BYTES = 32 * 1024
"""The smallest rest of a body, in bytes, that is received directly; exchanging the protocol costs some 10 us."""

_DROPPED_AT_ONCE_BYTES = 64 * 1024


class BodyConnection(Protocol):
    """The connection that a `BodyReader` stands in for: `weir.http_server.connection.HttpConnection`."""

    turns: ReadTurns

    def connection_lost(self, exc: Exception | None) -> None:
        """As `asyncio.BaseProtocol.connection_lost`."""

    def pause_writing(self) -> None:
        """As `asyncio.BaseProtocol.pause_writing`."""

    def resume_writing(self) -> None:
        """As `asyncio.BaseProtocol.resume_writing`."""


class BodyReader(asyncio.BufferedProtocol):
    """Receives exactly `left_bytes` for `exchange`, the rest of its body, then calls `on_complete`.

    What comes after the exchange has given up its memory, because its request was rejected, is dropped.
    """

    def __init__(
        self, connection: BodyConnection, exchange: HttpExchange, left_bytes: int, on_complete: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._exchange = exchange
        self._left_bytes = left_bytes
        self._on_complete = on_complete
        self._is_dropping = False

    def get_buffer(self, sizehint: int) -> memoryview:
        """The memory for what is read next: never more than belongs to the body."""
        space = self._exchange.body_space()
        self._is_dropping = space is None
        if space is None:
            space = memoryview(bytearray(min(self._left_bytes, _DROPPED_AT_ONCE_BYTES)))
        return space[:TURN_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """`nbytes` were read into the memory that `get_buffer` returned last."""
        self._left_bytes -= nbytes
        if not self._is_dropping:
            self._exchange.filled(nbytes)
        self._connection.turns.count(nbytes)
        if not self._left_bytes:
            self._on_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not read as fast as it is sent responses."""
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """The client has read enough of what it was sent."""
        self._connection.resume_writing()


def exchange_protocol(transport: Any, protocol: asyncio.BaseProtocol, is_read_paused: bool) -> None:
    """Makes `protocol` receive what `transport` reads from now on. `is_read_paused`: whether its reading is paused now."""
    if is_read_paused:
        transport.set_protocol(protocol)
        return
    # uvloop chooses how it passes on what it reads when it starts to read.
    transport.pause_reading()
    transport.set_protocol(protocol)
    transport.resume_reading()
