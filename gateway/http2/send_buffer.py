"""`SendBuffer`: bytes for the peer, within the windows that it grants (RFC 9113, sections 5.2 and 6.9)."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Protocol

from weir.gateway.http2.frames import MAX_FRAME_BYTES, MAX_WINDOW, Http2ConnectionError, Http2ErrorCode
from weir.runtime.memory_ledger import Account, MemoryLedger

DEFAULT_WINDOW_BYTES = 65_535
"""The initial size of windows (section 6.9.2)."""

_TURN_BYTES = 256 * 1024
"""The most data for one `take`: more would wait in the transport, where it can't be withdrawn."""

_BACKLOG_BYTES = 16 * 1024 * 1024

MAX_SENT_FRAME_BYTES = 1024 * 1024
"""The largest frame that is sent, even if the peer accepts larger ones."""

_UNSENT = "unsent"


class QueuedStream(Protocol):
    """What the buffer needs of a `Stream` with data that waits for windows."""

    is_queued: bool
    unsent_bytes: int
    window: int

    @property
    def held_bytes(self) -> int:
        """What is charged to the connection's account for its waiting data."""

    def send_waiting(self, limit: int) -> int:
        """Sends a frame of at most `limit` bytes of waiting data. Returns the bytes sent."""


class SendBuffer:
    """The send buffer of one connection. `on_output` is called once when there is something to take.

    `window` is the peer's window for all streams together, `frame_bytes` the largest frame to send. `unsent_bytes` is the
    data that waits for windows; it is charged to `account`, that of the connection (None: unbounded). `turn_bytes` is
    the data that was written since the last `take`.
    """

    __slots__ = (
        "_is_announced",
        "_is_paused",
        "_on_output",
        "_pieces",
        "_ready",
        "account",
        "frame_bytes",
        "turn_bytes",
        "unsent_bytes",
        "window",
    )

    def __init__(self, on_output: Callable[[], None], account: Account | None = None) -> None:
        self.account = account or MemoryLedger(sys.maxsize).account("")
        self._on_output = on_output
        self._is_announced = False
        self._is_paused = False
        self._pieces: list[bytes | memoryview] = []
        self._ready: deque[QueuedStream] = deque()
        self.frame_bytes = MAX_FRAME_BYTES
        self.turn_bytes = 0
        self.unsent_bytes = 0
        self.window = DEFAULT_WINDOW_BYTES

    def write(self, *pieces: bytes | memoryview) -> None:
        """Appends `pieces`, regardless of windows."""
        self._pieces += pieces
        if not self._is_announced:
            self._announce()

    def take(self) -> list[bytes | memoryview]:
        """Returns the pieces to send now; `on_output` is called again if there are more."""
        self._send_waiting()
        self._is_announced = False
        self.turn_bytes = 0
        pieces, self._pieces = self._pieces, []
        self._announce_waiting()
        return pieces

    def pause(self) -> None:
        """The transport is full: data waits."""
        self._is_paused = True

    def resume(self) -> None:
        """The transport accepts data again."""
        self._is_paused = False
        self._announce_waiting()

    @property
    def is_behind(self) -> bool:
        """Whether so much waits for the transport alone that reading from the peer should pause."""
        return self._is_paused or (self.unsent_bytes > _BACKLOG_BYTES and self._can_send_waiting())

    def can_write(self, size: int) -> bool:
        """Whether `size` bytes of data may be written now, all at once."""
        return (
            size <= self.window
            and (size <= _TURN_BYTES or size <= self.frame_bytes)
            and self.turn_bytes < _TURN_BYTES
            and not self._is_paused
        )

    def hold_back(self, stream: QueuedStream, size: int) -> bool:
        """Counts `size` bytes of a stream's data that have to wait. Returns False if the connection may hold no more."""
        if not self.account.charge(_UNSENT, size, stream):
            return False
        self.unsent_bytes += size
        return True

    def release(self, size: int) -> None:
        """Counts `size` waiting bytes as sent or dropped."""
        self.unsent_bytes -= size
        self.account.release(_UNSENT, size)

    @property
    def is_crowded(self) -> bool:
        """Whether so much waits for the peer that it gets no more request windows until it has read some."""
        return self.unsent_bytes > self.account.ledger.account_share_bytes // 2

    def widen(self, increment: int) -> None:
        """Adds `increment` bytes to the peer's window. Raises Http2ConnectionError if it exceeds the maximum."""
        self.window += increment
        if self.window > MAX_WINDOW:
            raise Http2ConnectionError(Http2ErrorCode.FLOW_CONTROL_ERROR, "the window of the connection is too large")
        self._announce_waiting()

    def enqueue(self, stream: QueuedStream) -> None:
        """Queues `stream`, which has waiting data within its own window."""
        if not stream.is_queued:
            stream.is_queued = True
            self._ready.append(stream)
            self._announce_waiting()

    def _announce(self) -> None:
        self._is_announced = True
        self._on_output()

    def _announce_waiting(self) -> None:
        if not self._is_announced and self._can_send_waiting():
            self._announce()

    def _can_send_waiting(self) -> bool:
        return bool(self._ready) and self.window > 0 and not self._is_paused

    def _send_waiting(self) -> None:
        # A frame of each stream in turn: a large response does not delay the others.
        budget = _TURN_BYTES
        while budget > 0 and self._can_send_waiting():
            stream = self._ready.popleft()
            stream.is_queued = False
            budget -= stream.send_waiting(min(self.window, self.frame_bytes))
            if stream.unsent_bytes and stream.window > 0:
                self.enqueue(stream)
