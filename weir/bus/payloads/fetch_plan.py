"""`FetchPlan`: which pieces of which payloads a reader requests from their owners, and when a fetch fails. Sans-IO.

One plan has the fetches by core NATS, and each link to an owner has one of its own. A reader requests a few pieces at a
time over all its fetches, which bounds the data in flight, whatever the broker's limits. Payloads take turns. Messages may
be lost with a connection to the broker: `tick` requests a piece that does not arrive again. A link loses none, or ends, and
its `unfinished` fetches go through the broker. Times are seconds of any clock.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import NamedTuple

import numpy as np

from weir.schemas.core.tensors import PayloadRef

PIECE_BYTES = 256 * 1024
"""The size of a piece, if the broker accepts messages of that size."""

MAX_OUTSTANDING = 16
"""Pieces that one reader has requested and not received."""

MAX_OF_ONE = 4
"""The same of one payload."""

MAX_FETCHED_BYTES = 2047 << 20
"""The largest payload that is fetched."""

RETRY_S = 1.0
"""Without a piece for so long the outstanding ones are requested again."""

PIECE_TIMEOUT_S = 5.0
"""Without a piece for so long the owner counts as gone."""

NO_OWNER_RETRY_S = 0.05
NO_OWNER_TIMEOUT_S = 0.5
"""How long nats-server must report that the owner does not subscribe: it may be about to reconnect."""


class Loss(Enum):
    """Why a payload could not be fetched."""

    STALE = "its owner has freed it"
    UNREACHABLE = "its owner can't be reached"


Content = memoryview | bytes
Outcome = Content | Loss


class PieceRequest(NamedTuple):
    """`piece` is to be requested from its owner."""

    fetch: int
    number: int
    piece: PayloadRef


class FetchEnd(NamedTuple):
    """The result of a fetch."""

    fetch: int
    outcome: Outcome


class _Fetch:
    __slots__ = (
        "absent_s",
        "buffer",
        "is_queued",
        "missing",
        "next_piece",
        "outstanding",
        "progress_s",
        "ref",
        "requested_s",
    )

    def __init__(self, ref: PayloadRef, pieces: int, now_s: float) -> None:
        self.ref = ref
        self.buffer: Content | None = None  # of a payload in one message that message, else all pieces
        self.missing = pieces
        self.next_piece = 0
        self.outstanding: set[int] = set()
        self.progress_s = self.requested_s = now_s
        self.absent_s = 0.0  # since when the owner does not subscribe, 0: it does
        self.is_queued = False  # whether it is queued for its next piece


class FetchPlan:
    """The fetches of one reader. Each method returns the actions to take. Each fetch ends once, unless it is cancelled."""

    def __init__(self, piece_bytes: int = PIECE_BYTES, max_outstanding: int = MAX_OUTSTANDING) -> None:
        self._piece_bytes = piece_bytes
        self._max_outstanding = max_outstanding
        self._fetches: dict[int, _Fetch] = {}
        self._queue: deque[int] = deque()
        self._outstanding = 0

    def __len__(self) -> int:
        return len(self._fetches)

    @property
    def outstanding(self) -> int:
        """Pieces that were requested and have not arrived."""
        return self._outstanding

    def begin(self, number: int, ref: PayloadRef, now_s: float) -> list[PieceRequest | FetchEnd]:
        """Starts to fetch a payload, under a number that no other fetch has had."""
        if not 0 <= ref.size <= MAX_FETCHED_BYTES:
            return [FetchEnd(number, Loss.STALE)]
        if ref.size == 0:
            return [FetchEnd(number, b"")]
        fetch = self._fetches[number] = _Fetch(ref, -(-ref.size // self._piece_bytes), now_s)
        self._enqueue(number, fetch)
        return self._requests()

    def received(self, number: int, piece: int, data: bytes, now_s: float) -> list[PieceRequest | FetchEnd]:
        """Takes a piece. One of another length means that the owner has freed the payload."""
        fetch = self._fetches.get(number)
        if fetch is None or piece not in fetch.outstanding:
            return []  # a duplicate
        start, size = self._extent(fetch, piece)
        if len(data) != size:
            return self._end(number, fetch, Loss.STALE)
        if size == fetch.ref.size:
            fetch.buffer = data
        else:
            try:
                self._buffer(fetch)[start : start + size] = data
            except MemoryError:
                return self._end(number, fetch, Loss.UNREACHABLE)
        return self.placed(number, piece, now_s)

    def place(self, number: int, piece: int, size: int) -> memoryview | None:
        """Returns where the content of a requested piece is to be put, before `placed`; None if it is not wanted any more.

        Raises ValueError for a piece of another size, and MemoryError.
        """
        fetch = self._fetches.get(number)
        if fetch is None or piece not in fetch.outstanding:
            return None
        start, wanted = self._extent(fetch, piece)
        if size != wanted:
            raise ValueError(f"a piece of {size} bytes instead of {wanted}")
        return self._buffer(fetch)[start : start + size]

    def placed(self, number: int, piece: int, now_s: float) -> list[PieceRequest | FetchEnd]:
        """Takes a piece whose content lies in its place."""
        fetch = self._fetches.get(number)
        if fetch is None or piece not in fetch.outstanding:
            return []
        fetch.progress_s, fetch.absent_s = now_s, 0.0
        fetch.outstanding.discard(piece)
        self._outstanding -= 1
        fetch.missing -= 1
        if not fetch.missing and fetch.buffer is not None:
            return self._end(number, fetch, fetch.buffer)
        self._enqueue(number, fetch)
        return self._requests()

    def unfinished(self) -> list[tuple[int, PayloadRef]]:
        """Returns the fetches that have not ended."""
        return [(number, fetch.ref) for number, fetch in self._fetches.items()]

    def no_responder(self, number: int, now_s: float) -> list[PieceRequest | FetchEnd]:
        """nats-server reports that the owner does not subscribe."""
        fetch = self._fetches.get(number)
        if fetch is None:
            return []
        if not fetch.absent_s:
            fetch.absent_s = now_s
        elif now_s - fetch.absent_s >= NO_OWNER_TIMEOUT_S:
            return self._end(number, fetch, Loss.UNREACHABLE)
        return []

    def cancel(self, number: int) -> list[PieceRequest | FetchEnd]:
        """Ends a fetch without a result."""
        fetch = self._fetches.pop(number, None)
        if fetch is None:
            return []
        self._outstanding -= len(fetch.outstanding)
        return self._requests()

    def tick(self, now_s: float, is_connected: bool) -> list[PieceRequest | FetchEnd]:
        """Handles timeouts. No time counts while the broker is away."""
        actions: list[PieceRequest | FetchEnd] = []
        for number, fetch in list(self._fetches.items()):
            if not is_connected or not fetch.outstanding:
                fetch.progress_s = now_s
            elif now_s - fetch.progress_s >= PIECE_TIMEOUT_S:
                actions += self._end(number, fetch, Loss.UNREACHABLE)
            elif now_s - max(fetch.requested_s, fetch.progress_s) >= (NO_OWNER_RETRY_S if fetch.absent_s else RETRY_S):
                fetch.requested_s = now_s
                actions += [self._request(number, fetch, piece) for piece in sorted(fetch.outstanding)]
        return actions

    def _enqueue(self, number: int, fetch: _Fetch) -> None:
        if not fetch.is_queued and fetch.next_piece * self._piece_bytes < fetch.ref.size:
            fetch.is_queued = True
            self._queue.append(number)

    def _requests(self) -> list[PieceRequest | FetchEnd]:
        requests: list[PieceRequest | FetchEnd] = []
        while self._queue and self._outstanding < self._max_outstanding:
            number = self._queue.popleft()
            fetch = self._fetches.get(number)
            if fetch is None:
                continue
            fetch.is_queued = False
            if len(fetch.outstanding) >= MAX_OF_ONE:
                continue  # it is queued again with its next piece
            fetch.outstanding.add(fetch.next_piece)
            self._outstanding += 1
            requests.append(self._request(number, fetch, fetch.next_piece))
            fetch.next_piece += 1
            self._enqueue(number, fetch)
        return requests

    def _request(self, number: int, fetch: _Fetch, piece: int) -> PieceRequest:
        ref, (start, size) = fetch.ref, self._extent(fetch, piece)
        return PieceRequest(number, piece, ref._replace(offset=ref.offset + start, size=size))

    def _extent(self, fetch: _Fetch, piece: int) -> tuple[int, int]:
        """The offset of a piece in its payload, and its size."""
        start = piece * self._piece_bytes
        return start, min(self._piece_bytes, fetch.ref.size - start)

    def _buffer(self, fetch: _Fetch) -> memoryview:
        if not isinstance(fetch.buffer, memoryview):
            fetch.buffer = np.empty(fetch.ref.size, np.uint8).data
        return fetch.buffer

    def _end(self, number: int, fetch: _Fetch, outcome: Outcome) -> list[PieceRequest | FetchEnd]:
        del self._fetches[number]
        self._outstanding -= len(fetch.outstanding)
        return [FetchEnd(number, outcome), *self._requests()]
