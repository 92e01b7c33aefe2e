"""`ReadTurns`: how much of one client connection is read in a turn of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TURN_BYTES = 512 * 1024
"""How much of one connection is read in a turn of the event loop. libuv would go on while the client is faster, up to 32
times; a few large requests would then hold up all small ones for tens of milliseconds."""


class ReadTurns:
    """Counts what is read of a connection. After `TURN_BYTES` it reads on in the next turn of the event loop.

    `is_paused` returns whether the connection has stopped reading for another reason.
    """

    __slots__ = ("_is_paused", "_loop", "_read_bytes", "_transport")

    def __init__(self, transport: asyncio.Transport, is_paused: Callable[[], bool]) -> None:
        self._transport = transport
        self._is_paused = is_paused
        self._loop = asyncio.get_running_loop()
        self._read_bytes = 0  # since the connection last gave way to others

    def count(self, size_bytes: int) -> None:
        """Counts bytes that were read."""
        self._read_bytes += size_bytes
        if self._read_bytes >= TURN_BYTES:
            self._read_bytes = 0
            if not self._is_paused() and not self._transport.is_closing():
                self._transport.pause_reading()
                self._loop.call_soon(self._read_on)

    def close(self) -> None:
        """Forgets the connection, which has ended."""
        self._is_paused = _always

    def _read_on(self) -> None:
        if not self._is_paused() and not self._transport.is_closing():
            self._transport.resume_reading()


def _always() -> bool:
    return True
