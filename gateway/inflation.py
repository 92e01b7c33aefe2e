"""`Inflation`: bounded decompression of one zlib or gzip stream, step by step, in the event loop or in threads."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable

STEP_BYTES = 4 << 20
"""How much one step decompresses, before the memory ledger is charged for the next one."""

_OUTPUT_BYTES = 1 << 20
_INPUT_BYTES = 64 * 1024


class Inflation:
    """The decompression of `compressed` to `content`, of at most `limit_bytes`. A step may run in any thread.

    Each step is bounded, so a stream that would expand beyond the limit costs no more than the limit. Subclasses say which
    errors to raise. Clearing `is_wanted` ends a running step.
    """

    __slots__ = ("_compressed", "_position", "_stream", "content", "is_wanted", "limit_bytes")

    def __init__(self, compressed: bytes | bytearray | memoryview, window_bits: int, limit_bytes: int) -> None:
        self._compressed = memoryview(compressed)
        self._position = 0
        self._stream = zlib.decompressobj(window_bits)
        self.content = bytearray()
        self.is_wanted = True
        self.limit_bytes = limit_bytes

    def malformed(self) -> Exception:
        """The error for a malformed or truncated stream."""
        raise NotImplementedError

    def too_large(self) -> Exception:
        """The error for content beyond the limit."""
        raise NotImplementedError

    def advance(self, size_bytes: int) -> bool:
        """Decompresses until `content` has about `size_bytes`. Returns whether it is complete, or not wanted any more."""
        content, stream = self.content, self._stream
        while len(content) < size_bytes and self.is_wanted:
            before = len(content)
            room = min(_OUTPUT_BYTES, size_bytes - before, self.limit_bytes + 1 - before)
            try:
                content += stream.decompress(self._next_piece(), room)
            except zlib.error:
                raise self.malformed() from None
            if len(content) > self.limit_bytes:
                raise self.too_large()
            if stream.eof:
                return True
            if len(content) == before and self._position == len(self._compressed):
                raise self.malformed()  # the stream is truncated
        return not self.is_wanted

    @property
    def has_trailing_data(self) -> bool:
        """Whether data follows the end of the stream."""
        return bool(self._stream.unused_data) or self._position < len(self._compressed)

    def _next_piece(self) -> bytes | memoryview:
        # zlib copies what a step does not consume, so it gets the input in pieces.
        if self._stream.unconsumed_tail:
            return self._stream.unconsumed_tail
        piece = self._compressed[self._position : self._position + _INPUT_BYTES]
        self._position += len(piece)
        return piece


async def inflate(
    inflation: Inflation, charge: Callable[[int], bool], no_room: Callable[[], Exception], charged_bytes: int = 0
) -> None:
    """Runs the remaining steps of `inflation` in threads.

    Calls `charge` with the growth of `content` beyond `charged_bytes` after each step; it returns whether there is room.
    Raises the errors of the steps, and `no_room()`. Then, and where it is cancelled, `content` is given back.
    """
    is_complete = False
    try:
        while not is_complete:
            is_complete = await asyncio.to_thread(inflation.advance, len(inflation.content) + STEP_BYTES)
            size = len(inflation.content)
            if inflation.is_wanted and not charge(size - charged_bytes):
                raise no_room()
            charged_bytes = size
    except BaseException:
        # At once: the traceback of an error keeps these frames, for as long as anything keeps the error.
        inflation.is_wanted = False
        inflation.content.clear()
        raise
