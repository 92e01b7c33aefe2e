"""`FetchPlan`: which pieces of which payloads a reader requests from one owner, and where they are put. Sans-IO.

Pieces come on one link, in the order in which they were requested. A few are requested at a time, and payloads take turns,
so that a large one does not delay small ones. When the link ends, the fetches go on at their offset on the next one, once.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import NamedTuple

import numpy as np

from weir.schemas.core.tensors import PayloadRef

PIECE_BYTES = 2 << 20
"""The size of a piece; small, so that a payload of 2 GB does not delay small ones for long."""

MAX_OUTSTANDING = 4
"""Pieces that were requested from one owner and have not arrived."""

MAX_FETCHED_BYTES = 2047 << 20
"""The largest payload that is fetched."""


class Loss(Enum):
    """Why a payload could not be fetched."""

    STALE = "its owner has freed it"
    UNREACHABLE = "its owner can't be reached"
    NO_ADDRESS = "it lies on another host, in a process without --payload-listen"


Content = memoryview | bytes
Outcome = Content | Loss


class FetchEnd(NamedTuple):
    """The result of a fetch."""

    fetch: int
    outcome: Outcome


class _Fetch:
    __slots__ = ("arrived", "buffer", "ref", "requested", "was_resumed")

    def __init__(self, ref: PayloadRef) -> None:
        self.ref = ref
        self.buffer = np.empty(ref.size, np.uint8).data
        self.requested = 0  # bytes, and those of them that are in the buffer
        self.arrived = 0
        self.was_resumed = False


class FetchPlan:
    """The fetches from one owner. Each ends once, unless it is cancelled."""

    def __init__(self, piece_bytes: int = PIECE_BYTES, max_outstanding: int = MAX_OUTSTANDING) -> None:
        self._piece_bytes = piece_bytes
        self._max_outstanding = max_outstanding
        self._fetches: dict[int, _Fetch] = {}
        self._queue: deque[int] = deque()  # fetches with further pieces to request
        self._requested: deque[tuple[int, int]] = deque()  # the fetch and the size of each piece
        self._is_placed = False  # whether the first of them lies in its place

    def __len__(self) -> int:
        return len(self._fetches)

    @property
    def is_waiting(self) -> bool:
        """Whether pieces were requested that have not arrived."""
        return bool(self._requested)

    def begin(self, number: int, ref: PayloadRef) -> None:
        """Starts to fetch a payload that is not empty, under a number that no other fetch has had. Raises MemoryError."""
        self._fetches[number] = _Fetch(ref)
        self._queue.append(number)

    def requests(self) -> list[PayloadRef]:
        """Returns the pieces to request now on the link."""
        pieces: list[PayloadRef] = []
        while self._queue and len(self._requested) < self._max_outstanding:
            number = self._queue.popleft()
            fetch = self._fetches.get(number)
            if fetch is None:
                continue
            size = min(self._piece_bytes, fetch.ref.size - fetch.requested)
            pieces.append(fetch.ref._replace(offset=fetch.ref.offset + fetch.requested, size=size))
            fetch.requested += size
            self._requested.append((number, size))
            if fetch.requested < fetch.ref.size:
                self._queue.append(number)
        return pieces

    def place(self, size: int) -> memoryview:
        """Returns where the next piece is to be put. Raises ValueError if it is not the one requested."""
        if not self._requested or self._is_placed or self._requested[0][1] != size:
            raise ValueError(f"{size} bytes instead of the next piece")
        self._is_placed = True
        fetch = self._fetches.get(self._requested[0][0])
        if fetch is None:
            return memoryview(bytearray(size))  # it was cancelled
        return fetch.buffer[fetch.arrived : fetch.arrived + size]

    def end_piece(self, is_kept: bool) -> list[FetchEnd]:
        """Takes whether the payload was still there when its owner had sent the piece. Raises ValueError without one."""
        if not self._requested or (is_kept and not self._is_placed):
            raise ValueError("the end of a piece that was not sent")
        number, size = self._requested.popleft()
        self._is_placed = False
        fetch = self._fetches.get(number)
        if fetch is None:
            return []
        if not is_kept:
            return [self._end(number, Loss.STALE)]
        fetch.arrived += size
        return [self._end(number, fetch.buffer)] if fetch.arrived == fetch.ref.size else []

    def lost(self) -> list[FetchEnd]:
        """The link has ended: fetches go on at their offset on the next one, except those that have lost one before."""
        self._requested.clear()
        self._queue.clear()
        self._is_placed = False
        ended: list[FetchEnd] = []
        for number, fetch in list(self._fetches.items()):
            if fetch.was_resumed:
                ended.append(self._end(number, Loss.UNREACHABLE))
            else:
                fetch.was_resumed, fetch.requested = True, fetch.arrived
                self._queue.append(number)
        return ended

    def fail(self, loss: Loss) -> list[FetchEnd]:
        """Ends all fetches, because there is no link."""
        return [self._end(number, loss) for number in list(self._fetches)]

    def cancel(self, number: int) -> None:
        """Ends a fetch without a result."""
        self._fetches.pop(number, None)

    def _end(self, number: int, outcome: Outcome) -> FetchEnd:
        del self._fetches[number]
        return FetchEnd(number, outcome)
