"""`Output`: what is on its way to the peer, within the windows it grants (RFC 9113, sections 5.2 and 6.9)."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from gateway.http2.faults import ConnectionFault, FaultCode
from gateway.http2.frames import MAX_FRAME_BYTES, MAX_WINDOW
from runtime.memory_ledger import Account, MemoryLedger

if TYPE_CHECKING:
    from gateway.http2.stream import Stream

DEFAULT_WINDOW_BYTES = 65_535
"""The windows before anybody has changed them (section 6.9.2)."""

_TURN_BYTES = 256 * 1024
"""Data that is taken at once: more would only wait in the transport, where it can't be withdrawn."""

_BACKLOG_BYTES = 16 * 1024 * 1024

MAX_SENT_FRAME_BYTES = 1024 * 1024
"""The largest frame that is sent, whatever the peer takes."""

_UNSENT = "unsent"


class Output:
    """See the module. `on_output` is called when there is something to take, once until it is taken.

    `window` is what the peer takes on all streams together, `frame_bytes` the largest frame it is sent, `unsent_bytes` the
    data that had to be kept: it is charged to `account`, that of the connection (None: data is kept without a bound).
    `turn_bytes` of data were written at once since the output was taken last.
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
        self._ready: deque[Stream] = deque()
        self.frame_bytes = MAX_FRAME_BYTES
        self.turn_bytes = 0
        self.unsent_bytes = 0
        self.window = DEFAULT_WINDOW_BYTES

    def write(self, *pieces: bytes | memoryview) -> None:
        """Puts `pieces` out, whatever the windows."""
        self._pieces += pieces
        if not self._is_announced:
            self._announce()

    def take(self) -> list[bytes | memoryview]:
        """What is to be sent now; `on_output` is called again if there is more."""
        self._send_kept()
        self._is_announced = False
        self.turn_bytes = 0
        pieces, self._pieces = self._pieces, []
        self._announce_kept()
        return pieces

    def pause(self) -> None:
        """The transport takes no more for now: data is kept."""
        self._is_paused = True

    def resume(self) -> None:
        """The transport takes more again."""
        self._is_paused = False
        self._announce_kept()

    @property
    def is_behind(self) -> bool:
        """Whether so much waits for the transport alone that the peer should not be listened to until it has gone."""
        return self._is_paused or (self.unsent_bytes > _BACKLOG_BYTES and self._can_send_kept())

    def takes(self, size: int) -> bool:
        """Whether `size` bytes of data may be written at once, in one frame."""
        return (
            size <= self.window and size <= self.frame_bytes and self.turn_bytes < _TURN_BYTES and not self._is_paused
        )

    def keep(self, size: int) -> bool:
        """Counts `size` bytes of data that have to be kept. False where the connection may hold no more: drop them then."""
        if not self.account.charge(_UNSENT, size):
            return False
        self.unsent_bytes += size
        return True

    def release(self, size: int) -> None:
        """Counts `size` kept bytes as sent, or dropped."""
        self.unsent_bytes -= size
        self.account.release(_UNSENT, size)

    @property
    def is_crowded(self) -> bool:
        """Whether so much waits for the peer that it is granted no more requests until it has read some."""
        return self.unsent_bytes > self.account.ledger.account_share_bytes // 2

    def widen(self, increment: int) -> None:
        """The peer takes `increment` more bytes. Raises ConnectionFault where that is more than there can be."""
        self.window += increment
        if self.window > MAX_WINDOW:
            raise ConnectionFault(FaultCode.FLOW_CONTROL_ERROR, "the window of the connection is too large")
        self._announce_kept()

    def enqueue(self, stream: Stream) -> None:
        """`stream` has kept data that its own window lets through."""
        if not stream.is_queued:
            stream.is_queued = True
            self._ready.append(stream)
            self._announce_kept()

    def _announce(self) -> None:
        self._is_announced = True
        self._on_output()

    def _announce_kept(self) -> None:
        if not self._is_announced and self._can_send_kept():
            self._announce()

    def _can_send_kept(self) -> bool:
        return bool(self._ready) and self.window > 0 and not self._is_paused

    def _send_kept(self) -> None:
        # A frame of each stream in turn: a large response does not hold up the others.
        budget = _TURN_BYTES
        while budget > 0 and self._can_send_kept():
            stream = self._ready.popleft()
            stream.is_queued = False
            budget -= stream.send_kept(min(self.window, self.frame_bytes))
            if stream.unsent_bytes and stream.window > 0:
                self.enqueue(stream)
