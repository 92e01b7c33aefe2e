"""`FetchPlan`: which pieces of which payloads a reader asks their owners for, and when it gives up. Sans-IO.

A reader asks for a few pieces at a time, over all that it fetches: so what is on its way to it is bounded, whatever the
broker's limits. Payloads take turns. Messages may be lost, with a connection: a piece that does not come is asked for
again. Times are seconds of any clock.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import NamedTuple

import numpy as np

from schemas.tensors import PayloadRef

PIECE_BYTES = 256 * 1024
"""One piece, where the broker takes messages of that size."""

MAX_OUTSTANDING = 16
"""Pieces that one reader has asked for and not got."""

MAX_OF_ONE = 4
"""Of them, those of one payload."""

MAX_FETCHED_BYTES = 2047 << 20
"""The largest payload that is fetched."""

RETRY_S = 1.0
"""After so long without a piece those that are outstanding are asked for again."""

PATIENCE_S = 5.0
"""After so long without a piece the owner counts as gone."""

NOBODY_RETRY_S = 0.05
NOBODY_PATIENCE_S = 0.5
"""How long nats-server must go on saying that the owner is not there: it may be about to connect again."""


class Loss(Enum):
    """Why a payload could not be fetched."""

    STALE = "its owner has given it up"
    UNREACHABLE = "its owner can't be reached"


Content = memoryview | bytes
Outcome = Content | Loss


class Ask(NamedTuple):
    """The owner of `piece` is to be asked for it."""

    fetch: int
    number: int
    piece: PayloadRef


class Ended(NamedTuple):
    """A fetch is over."""

    fetch: int
    outcome: Outcome


class _Fetch:
    __slots__ = ("asked_s", "buffer", "missing", "next_piece", "nobody_s", "outstanding", "progress_s", "ref", "waits")

    def __init__(self, ref: PayloadRef, pieces: int, now_s: float) -> None:
        self.ref = ref
        self.buffer: memoryview | None = None  # from the first piece of several on
        self.missing = pieces
        self.next_piece = 0
        self.outstanding: set[int] = set()
        self.progress_s = self.asked_s = now_s
        self.nobody_s = 0.0  # since when the owner is not there, 0: it is
        self.waits = False  # in the line of those that would ask for more


class FetchPlan:
    """See the module. Each method returns what is to be done; each fetch ends once, unless it is given up."""

    def __init__(self, piece_bytes: int = PIECE_BYTES) -> None:
        self._piece_bytes = piece_bytes
        self._fetches: dict[int, _Fetch] = {}
        self._line: deque[int] = deque()
        self._outstanding = 0

    def __len__(self) -> int:
        return len(self._fetches)

    @property
    def outstanding(self) -> int:
        """Pieces that were asked for and have not come."""
        return self._outstanding

    def begin(self, number: int, ref: PayloadRef, now_s: float) -> list[Ask | Ended]:
        """A payload is to be fetched, under a number that no other fetch has had."""
        if not 0 <= ref.size <= MAX_FETCHED_BYTES:
            return [Ended(number, Loss.STALE)]
        if ref.size == 0:
            return [Ended(number, b"")]
        fetch = self._fetches[number] = _Fetch(ref, -(-ref.size // self._piece_bytes), now_s)
        self._join(number, fetch)
        return self._asks()

    def received(self, number: int, piece: int, data: bytes, now_s: float) -> list[Ask | Ended]:
        """A piece has come; none of its length is the owner's word that it has gone."""
        fetch = self._fetches.get(number)
        if fetch is None or piece not in fetch.outstanding:
            return []  # it has come before
        start = piece * self._piece_bytes
        size = min(self._piece_bytes, fetch.ref.size - start)
        if len(data) != size:
            return self._end(number, fetch, Loss.STALE)
        fetch.progress_s, fetch.nobody_s = now_s, 0.0
        fetch.outstanding.discard(piece)
        self._outstanding -= 1
        fetch.missing -= 1
        if size == fetch.ref.size:
            return self._end(number, fetch, data)
        if fetch.buffer is None:
            try:
                fetch.buffer = np.empty(fetch.ref.size, np.uint8).data
            except MemoryError:
                return self._end(number, fetch, Loss.UNREACHABLE)
        fetch.buffer[start : start + size] = data
        if not fetch.missing:
            return self._end(number, fetch, fetch.buffer)
        self._join(number, fetch)
        return self._asks()

    def nobody(self, number: int, now_s: float) -> list[Ask | Ended]:
        """Nats-server says that the owner does not listen."""
        fetch = self._fetches.get(number)
        if fetch is None:
            return []
        if not fetch.nobody_s:
            fetch.nobody_s = now_s
        elif now_s - fetch.nobody_s >= NOBODY_PATIENCE_S:
            return self._end(number, fetch, Loss.UNREACHABLE)
        return []

    def give_up(self, number: int) -> list[Ask | Ended]:
        """Nobody wants it any more."""
        fetch = self._fetches.pop(number, None)
        if fetch is None:
            return []
        self._outstanding -= len(fetch.outstanding)
        return self._asks()

    def tick(self, now_s: float, is_connected: bool) -> list[Ask | Ended]:
        """Time has passed; while the broker is away nobody's patience is."""
        actions: list[Ask | Ended] = []
        for number, fetch in list(self._fetches.items()):
            if not is_connected or not fetch.outstanding:
                fetch.progress_s = now_s
            elif now_s - fetch.progress_s >= PATIENCE_S:
                actions += self._end(number, fetch, Loss.UNREACHABLE)
            elif now_s - max(fetch.asked_s, fetch.progress_s) >= (NOBODY_RETRY_S if fetch.nobody_s else RETRY_S):
                fetch.asked_s = now_s
                actions += [self._ask(number, fetch, piece) for piece in sorted(fetch.outstanding)]
        return actions

    def _join(self, number: int, fetch: _Fetch) -> None:
        if not fetch.waits and fetch.next_piece * self._piece_bytes < fetch.ref.size:
            fetch.waits = True
            self._line.append(number)

    def _asks(self) -> list[Ask | Ended]:
        asks: list[Ask | Ended] = []
        while self._line and self._outstanding < MAX_OUTSTANDING:
            number = self._line.popleft()
            fetch = self._fetches.get(number)
            if fetch is None:
                continue
            fetch.waits = False
            if len(fetch.outstanding) >= MAX_OF_ONE:
                continue  # it joins the line again with its next piece
            fetch.outstanding.add(fetch.next_piece)
            self._outstanding += 1
            asks.append(self._ask(number, fetch, fetch.next_piece))
            fetch.next_piece += 1
            self._join(number, fetch)
        return asks

    def _ask(self, number: int, fetch: _Fetch, piece: int) -> Ask:
        ref, start = fetch.ref, piece * self._piece_bytes
        size = min(self._piece_bytes, ref.size - start)
        return Ask(number, piece, ref._replace(offset=ref.offset + start, size=size))

    def _end(self, number: int, fetch: _Fetch, outcome: Outcome) -> list[Ask | Ended]:
        del self._fetches[number]
        self._outstanding -= len(fetch.outstanding)
        return [Ended(number, outcome), *self._asks()]
