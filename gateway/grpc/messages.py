"""gRPC's message framing and compression: length-prefixed messages in the data of a stream (gRPC over HTTP/2).

Threads compress and decompress large messages; the messages of a call keep their order.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from weir.gateway.grpc.status import CallError, Status
from weir.gateway.inflation import Inflation
from weir.runtime.memory_ledger import Account

PREFIX_BYTES = 5
"""One byte with the compressed flag, and four with the length."""

Message = bytes | memoryview
"""A message; a large one is a view over what was received."""


def message_prefix(length: int, flag: int = 0) -> bytes:
    """The prefix of a message of `length` bytes; `flag` is 1 for a compressed one."""
    return bytes((flag,)) + length.to_bytes(4, "big")


class MessageReader:
    """Assembles the messages of one stream.

    `encoding` is the compression of the request; `limit` bounds each message, in bytes. `admit` is called with the length
    of a message before its content arrives, and `arrive` with the received bytes and the length whenever some have
    arrived; both raise CallError to reject the message.
    """

    __slots__ = ("_admit", "_arrive", "_body", "_encoding", "_filled", "_limit", "_prefix")

    def __init__(
        self, encoding: str, limit: int, admit: Callable[[int], None], arrive: Callable[[int, int], None]
    ) -> None:
        self._admit = admit
        self._arrive = arrive
        self._body: memoryview | None = None
        self._encoding = encoding
        self._filled = 0
        self._limit = limit
        self._prefix = b""

    @property
    def is_between_messages(self) -> bool:
        """Whether no message is incomplete."""
        return not self._prefix

    @property
    def filled_bytes(self) -> int:
        """How much of the incomplete message has arrived."""
        return self._filled

    def feed(self, data: bytes | memoryview) -> Iterator[Message | MessageInflation]:
        """The messages that `data` completes. Raises CallError for one that is too large or malformed.

        A compressed message that takes long to decompress is returned as `MessageInflation`, to be run in a thread.
        """
        rest = memoryview(data)
        while rest:
            if self._body is None:
                missing = PREFIX_BYTES - len(self._prefix)
                self._prefix += rest[:missing]
                rest = rest[missing:]
                if len(self._prefix) < PREFIX_BYTES:
                    return
                self._body = self._room_for_message()
            part = rest[: len(self._body) - self._filled]
            self._body[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            self._arrive(self._filled, len(self._body))
            rest = rest[len(part) :]
            if self._filled == len(self._body):
                flag, body = self._prefix[0], self._body
                self._prefix, self._body, self._filled = b"", None, 0
                yield self._message(flag, body)

    def _room_for_message(self) -> memoryview:
        length = int.from_bytes(self._prefix[1:], "big")
        if length > self._limit:
            raise too_large(length, self._limit)
        self._admit(length)
        # Untouched memory costs nothing, so all of it is allocated at once: growing a buffer would be the largest cost.
        return np.empty(length, np.uint8).data

    def _message(self, flag: int, data: memoryview) -> Message | MessageInflation:
        if not flag:
            return data
        if flag != 1:
            raise CallError(Status.INTERNAL, "a message has an unknown flag")
        inflation = MessageInflation(data, self._encoding, self._limit)
        message = inflation.run_if_short()
        return inflation if message is None else message


MAX_EXPANDED_BYTES = 256 * 1024 * 1024
"""The largest decompressed message: a compressed one of a thousandth of the size can expand to it."""

LEVELS = {"none": 0, "low": 1, "medium": 6, "high": 9}
"""zlib's levels by the names in Triton's option; 0 for no compression."""

_WINDOW_BITS = {"gzip": 31, "deflate": 15}

ENCODINGS = frozenset(["identity", *_WINDOW_BITS])
"""The supported values of `grpc-encoding`."""

_INLINE_BYTES = 32 * 1024
_INLINE_EXPANDED_BYTES = 512 * 1024  # a millisecond, or two
_UNSENT = "unsent"


class MessageInflation(Inflation):
    """The decompression of one message. Raises CallError."""

    __slots__ = ()

    def __init__(self, data: bytes | memoryview, encoding: str, limit_bytes: int) -> None:
        if encoding not in _WINDOW_BITS:
            raise CallError(Status.INTERNAL, "a message is compressed, but the call announced no compression")
        super().__init__(data, _WINDOW_BITS[encoding], min(limit_bytes, MAX_EXPANDED_BYTES))

    def malformed(self) -> CallError:
        """The error for a malformed or truncated stream."""
        return _malformed()

    def too_large(self) -> CallError:
        """The error for a message beyond the limit."""
        return too_large(self.limit_bytes + 1, self.limit_bytes)

    def run_if_short(self) -> Message | None:
        """The message if it is short; None if it has to be decompressed in steps."""
        if len(self._compressed) > _INLINE_BYTES:
            return None
        return bytes(self.message()) if self.advance(_INLINE_EXPANDED_BYTES) else None

    def message(self) -> Message:
        """The decompressed message. Raises CallError if data follows its end."""
        if self.is_wanted and self.has_trailing_data:
            raise _malformed()
        return self.content


class MessageDeflater:
    """Compresses the messages of one call and passes them to `send` in order: flag, pieces, and whether it is the last.

    `waiting_bytes` is the size of messages that have not been passed to `send` yet; it is charged to `account`. `on_idle`,
    if set, is called whenever none waits any more.
    """

    __slots__ = ("_account", "_level", "_send", "_waiting", "_window_bits", "on_idle", "waiting_bytes")

    def __init__(
        self, encoding: str, level: int, send: Callable[[int, Sequence[bytes], bool], None], account: Account
    ) -> None:
        self._account = account
        self._level = level
        self._send = send
        self._waiting: deque[tuple[Sequence[bytes], bool]] = deque()
        self._window_bits = _WINDOW_BITS[encoding]
        self.on_idle: Callable[[], None] | None = None
        self.waiting_bytes = 0

    @property
    def held_bytes(self) -> int:
        """What is charged to the account."""
        return self.waiting_bytes

    @property
    def is_busy(self) -> bool:
        """Whether a message has not been passed to `send` yet."""
        return bool(self._waiting)

    def put(self, pieces: Sequence[bytes], is_last: bool) -> bool:
        """Takes the next message. Returns False, and drops it, if there is no room for it to wait."""
        size = sum(map(len, pieces))
        if not self._waiting and size <= _INLINE_BYTES:
            self._send(*self._compress(pieces), is_last)
            return True
        if not self._account.charge(_UNSENT, size, self):
            return False
        self._waiting.append((pieces, is_last))
        self.waiting_bytes += size
        if len(self._waiting) == 1:
            self._start()
        return True

    def close(self) -> None:
        """Drops the waiting messages: the call has ended."""
        self._waiting.clear()
        self._account.release(_UNSENT, self.waiting_bytes)
        self.waiting_bytes = 0

    def _start(self) -> None:
        waiting = self._waiting[0]
        job = asyncio.get_running_loop().run_in_executor(None, self._compress, waiting[0])
        job.add_done_callback(lambda done: self._finish(waiting, done))

    def _finish(self, waiting: tuple[Sequence[bytes], bool], job: asyncio.Future[tuple[int, Sequence[bytes]]]) -> None:
        if not self._waiting or self._waiting[0] is not waiting or job.cancelled():
            return
        self._waiting.popleft()
        size = sum(map(len, waiting[0]))
        self.waiting_bytes -= size
        self._account.release(_UNSENT, size)
        self._send(*job.result(), waiting[1])
        if self._waiting:
            self._start()
        elif self.on_idle is not None:
            self.on_idle()

    def _compress(self, pieces: Sequence[bytes]) -> tuple[int, Sequence[bytes]]:
        """(flag, pieces) of a message; uncompressed if compression does not make it shorter."""
        deflater = zlib.compressobj(self._level, zlib.DEFLATED, self._window_bits)
        packed = [*(deflater.compress(piece) for piece in pieces), deflater.flush()]
        return (1, packed) if sum(map(len, packed)) < sum(map(len, pieces)) else (0, pieces)


def accepted_encoding(accepted: str) -> str:
    """The preferred encoding in a client's `grpc-accept-encoding`; "" if none is supported."""
    names = {name.strip() for name in accepted.split(",")}
    return next((name for name in _WINDOW_BITS if name in names), "")


def too_large(length: int, limit: int) -> CallError:
    """The error for a message of `length` bytes, in gRPC's wording."""
    return CallError(Status.RESOURCE_EXHAUSTED, f"Received message larger than max ({length} vs. {limit})")


def _malformed() -> CallError:
    return CallError(Status.INTERNAL, "a message can't be decompressed")
