"""Compressed messages (gRPC over HTTP/2, "Compression"): what takes long is done in a thread, in the order of its call."""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Callable, Sequence

from gateway.grpc.status import CallError, Status
from runtime.memory_ledger import Account

MAX_EXPANDED_BYTES = 256 * 1024 * 1024
"""The largest message that a compressed one may become: a thousandth of it can be asked to become so."""

LEVELS = {"none": 0, "low": 1, "medium": 6, "high": 9}
"""zlib's levels by the names that Triton's option has for them; 0 leaves messages as they are."""

_WINDOW_BITS = {"gzip": 31, "deflate": 15}

ENCODINGS = frozenset(["identity", *_WINDOW_BITS])
"""The values of `grpc-encoding` that are known."""

_INLINE_BYTES = 32 * 1024
_INLINE_EXPANDED_BYTES = 512 * 1024  # a millisecond, or two
_SLICE_BYTES = 64 * 1024
_UNSENT = "unsent"
_STEP_BYTES = 4 * 1024 * 1024


class Inflation:
    """A compressed message; `run_step` expands it, step by step and in whichever thread, to at most `limit` bytes.

    Once it is not wanted any more, it ends early. `size_bytes` is what it has become so far.
    """

    __slots__ = ("_data", "_inflater", "_limit", "_pieces", "_start", "_window_bits", "is_wanted", "size_bytes")

    def __init__(self, data: bytes | memoryview, encoding: str, limit: int) -> None:
        self._data = memoryview(data)
        self._limit = min(limit, MAX_EXPANDED_BYTES)
        self._window_bits = _WINDOW_BITS.get(encoding)
        self.is_wanted = True
        self._restart()

    def run_if_short(self) -> bytes | None:
        """The message, if that takes no time to speak of. Raises CallError as `run`."""
        if self._window_bits is None:
            raise CallError(Status.INTERNAL, "a message is compressed, but not in the way that the call announced")
        if len(self._data) > _INLINE_BYTES:
            return None
        message = self._expand(min(self._limit, _INLINE_EXPANDED_BYTES))
        if message is None:
            self._restart()
        return message

    def run_step(self) -> bytes | None:
        """Expands some megabytes more. Returns the message once it is complete, b"" once nobody wants it, None before.

        Raises CallError for what is malformed or becomes larger than `limit`.
        """
        message = self._expand(min(self._limit, self.size_bytes + _STEP_BYTES))
        if message is None and self.size_bytes > self._limit:
            raise too_large(self._limit + 1, self._limit)
        return message

    def _restart(self) -> None:
        self._inflater = zlib.decompressobj(self._window_bits or 0)
        self._pieces: list[bytes] = []
        self._start = 0
        self.size_bytes = 0

    def _expand(self, limit: int) -> bytes | None:
        """The message; None where it is longer than `limit`: then a later call goes on."""
        inflater = self._inflater
        try:
            while not inflater.eof:
                if not self.is_wanted:
                    return b""
                data: bytes | memoryview = inflater.unconsumed_tail
                if not data:
                    data = self._data[self._start : self._start + _SLICE_BYTES]
                    self._start += len(data)
                piece = inflater.decompress(data, limit + 1 - self.size_bytes)
                if not data and not piece:
                    raise _malformed()  # it ends before its end
                self._pieces.append(piece)
                self.size_bytes += len(piece)
                if self.size_bytes > limit:
                    return None
        except zlib.error as error:
            raise _malformed() from error
        if inflater.unused_data or self._start < len(self._data):
            raise _malformed()
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)


class Deflater:
    """Compresses the messages of one call. `send` takes each in its turn: its flag, its pieces, and whether it is the last.

    `waiting_bytes` is what has not been given to `send` yet, and is charged to `account`; `on_idle`, if set, is called each
    time it has.
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
    def is_busy(self) -> bool:
        """Whether something has not been given to `send` yet."""
        return bool(self._waiting)

    def put(self, pieces: Sequence[bytes], is_last: bool) -> bool:
        """The next message. False where there is no room for it to wait: it is dropped."""
        size = sum(map(len, pieces))
        if not self._waiting and size <= _INLINE_BYTES:
            self._send(*self._compress(pieces), is_last)
            return True
        if not self._account.charge(_UNSENT, size):
            return False
        self._waiting.append((pieces, is_last))
        self.waiting_bytes += size
        if len(self._waiting) == 1:
            self._start()
        return True

    def close(self) -> None:
        """Nothing is to be sent any more."""
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
        """(flag, pieces) of a message: as it was where that is no longer than compressed."""
        deflater = zlib.compressobj(self._level, zlib.DEFLATED, self._window_bits)
        packed = [*(deflater.compress(piece) for piece in pieces), deflater.flush()]
        return (1, packed) if sum(map(len, packed)) < sum(map(len, pieces)) else (0, pieces)


def accepted_encoding(accepted: str) -> str:
    """The best of a client's `grpc-accept-encoding`; "" where it accepts none that is known here."""
    names = {name.strip() for name in accepted.split(",")}
    return next((name for name in _WINDOW_BITS if name in names), "")


def too_large(length: int, limit: int) -> CallError:
    """The refusal of a message of `length` bytes, in grpc's words."""
    return CallError(Status.RESOURCE_EXHAUSTED, f"Received message larger than max ({length} vs. {limit})")


def _malformed() -> CallError:
    return CallError(Status.INTERNAL, "a message can't be decompressed")
