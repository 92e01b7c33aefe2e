"""`Inflation`: bounded decompression of one zlib or gzip stream, step by step, in the event loop or in threads."""

from __future__ import annotations

import asyncio
import mmap
import zlib
from collections.abc import Callable

STEP_BYTES = 4 << 20
"""How much one step decompresses, before the memory ledger is charged for the next one."""

_OUTPUT_BYTES = 1 << 20
_INPUT_BYTES = 64 * 1024


_HEAP_BYTES = 1 << 20
"""The largest content on the heap. Roles keep the heap's freed blocks (`keep_freed_memory`): contents that grow there side
by side leave more free memory behind than they have.
"""


class _Content:
    """`size_bytes` bytes that grow: beyond `_HEAP_BYTES` in pages of their own, which go when the last view goes."""

    __slots__ = ("_heap", "_pages", "size_bytes")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._heap = bytearray()
        self._pages: mmap.mmap | None = None
        self.size_bytes = 0

    def append(self, piece: bytes) -> None:
        end = self.size_bytes + len(piece)
        if self._pages is None and end <= _HEAP_BYTES:
            self._heap += piece
        else:
            room_bytes = -(-end // STEP_BYTES) * STEP_BYTES
            if self._pages is None:
                self._pages = mmap.mmap(-1, room_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                self._pages[: self.size_bytes] = self._heap
                self._heap = bytearray()
            elif end > len(self._pages):
                self._pages.resize(room_bytes)
            self._pages[self.size_bytes : end] = piece
        self.size_bytes = end

    @property
    def view(self) -> memoryview:
        return memoryview(self._heap if self._pages is None else self._pages)[: self.size_bytes]


class Inflation:
    """The decompression of `compressed` to `content`, of at most `limit_bytes`. A step may run in any thread.

    Each step is bounded, so a stream that would expand beyond the limit costs no more than the limit. Subclasses say which
    errors to raise. Clearing `is_wanted` ends a running step.
    """

    __slots__ = ("_compressed", "_content", "_position", "_stream", "is_wanted", "limit_bytes")

    def __init__(self, compressed: bytes | bytearray | memoryview, window_bits: int, limit_bytes: int) -> None:
        self._compressed = memoryview(compressed)
        self._position = 0
        self._stream = zlib.decompressobj(window_bits)
        self._content = _Content()
        self.is_wanted = True
        self.limit_bytes = limit_bytes

    @property
    def content(self) -> memoryview:
        """What is decompressed by now."""
        return self._content.view

    @property
    def size_bytes(self) -> int:
        """The size of `content`."""
        return self._content.size_bytes

    def discard(self) -> None:
        """Gives the content back. Its pages go with the last view of it."""
        self._content.clear()

    def malformed(self) -> Exception:
        """The error for a malformed or truncated stream."""
        raise NotImplementedError

    def too_large(self) -> Exception:
        """The error for content beyond the limit."""
        raise NotImplementedError

    def advance(self, size_bytes: int) -> bool:
        """Decompresses until `content` has about `size_bytes`. Returns whether it is complete, or not wanted any more."""
        content, stream = self._content, self._stream
        while content.size_bytes < size_bytes and self.is_wanted:
            before = content.size_bytes
            room = min(_OUTPUT_BYTES, size_bytes - before, self.limit_bytes + 1 - before)
            try:
                content.append(stream.decompress(self._next_piece(), room))
            except zlib.error:
                raise self.malformed() from None
            if content.size_bytes > self.limit_bytes:
                raise self.too_large()
            if stream.eof:
                return True
            if content.size_bytes == before and self._position == len(self._compressed):
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
    Raises the errors of the steps, and `no_room()`. Then, and when it is cancelled or its caller has gone, it releases
    `content`.
    """
    is_complete = False
    try:
        while not is_complete:
            is_complete = await asyncio.to_thread(inflation.advance, inflation.size_bytes + STEP_BYTES)
            size = inflation.size_bytes
            if inflation.is_wanted and not charge(size - charged_bytes):
                raise no_room()
            charged_bytes = size
        if not inflation.is_wanted:
            inflation.discard()
    except BaseException:
        # At once: the traceback of an error keeps these frames, for as long as anything keeps the error.
        inflation.is_wanted = False
        inflation.discard()
        raise
