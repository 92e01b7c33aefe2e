"""`AckLine`: which messages of a subject are done with, and how the broker is told so at the least cost.

On a disk that syncs before it acknowledges, nats-server writes and syncs for each acknowledged message of a work queue:
200 us, and at most some hundreds a second (2.15, measured). One purge of everything on a subject below a sequence removes
many for little more: 28 us a message, 6 000 a second. Requests end nearly in order, so what has ended below the first that
is open is purged; what ended behind one that takes long is acknowledged by itself, in a while.
Sans-IO: the caller does what `due` says. Messages are delivered in the order of their sequences.
"""

from __future__ import annotations

import heapq
from itertools import islice
from typing import NamedTuple

FLUSH_S = 0.025
"""Messages that end within so long are told together."""

BLOCKED_PATIENCE_S = 1.0
"""So long a message that is done with waits for those before it."""

MAX_SINGLES = 64
"""Messages that are acknowledged by themselves at a time, where others before them take long."""

_MIN_PURGE = 3
_MAX_REMEMBERED = 8192


class DueAcks(NamedTuple):
    """What is to be told: purge the subject below a sequence (0: don't), and acknowledge these on their subjects."""

    purge_below: int
    purged: list[tuple[int, str]]
    singles: list[str]


class AckLine:
    """See the module."""

    def __init__(self) -> None:
        self._open: dict[int, None] = {}  # in order
        self._ended: dict[int, tuple[str, float]] = {}  # ack subjects, and when they ended
        self._order: list[int] = []  # a heap of what is in `_ended`, and of some that was
        self._told: dict[int, None] = {}  # the broker was told, but may not have heard

    def __len__(self) -> int:
        """Messages that are done with and not told yet."""
        return len(self._ended)

    def opened(self, sequence: int) -> None:
        """A message was delivered for the first time."""
        self._open[sequence] = None

    def ended(self, sequence: int, ack_subject: str, now_s: float) -> None:
        """It is done with."""
        if self._open.pop(sequence, sequence) is None:
            self._ended[sequence] = ack_subject, now_s
            heapq.heappush(self._order, sequence)

    def delivered_again(self, sequence: int, ack_subject: str) -> bool:
        """Whether a message that is delivered is done with already; then its `ack_subject` is the right one."""
        if sequence in self._ended:
            self._ended[sequence] = ack_subject, self._ended[sequence][1]
            return True
        if sequence in self._told:
            del self._told[sequence]
            self._ended[sequence] = ack_subject, 0.0
            heapq.heappush(self._order, sequence)
            return True
        return False

    def due(self, now_s: float, everything: bool = False) -> DueAcks:
        """What is to be told by now; with `everything` nothing is left."""
        first_open = next(iter(self._open), None)
        prefix: list[tuple[int, str]] = []
        while self._order and (first_open is None or self._order[0] < first_open):
            sequence = heapq.heappop(self._order)
            found = self._ended.pop(sequence, None)
            if found is not None:
                prefix.append((sequence, found[0]))
                self._remember(sequence)
        singles: list[str] = []
        oldest = islice(self._ended.items(), None if everything else MAX_SINGLES)
        for sequence, (ack_subject, ended_s) in list(oldest):
            if not everything and now_s - ended_s < BLOCKED_PATIENCE_S:
                break
            del self._ended[sequence]
            self._remember(sequence)
            singles.append(ack_subject)
        if len(self._order) > 2 * len(self._ended) + _MAX_REMEMBERED:
            self._order = sorted(self._ended)  # one that stays open for long lets nothing leave the heap
        if len(prefix) < _MIN_PURGE:
            return DueAcks(0, [], [ack_subject for _, ack_subject in prefix] + singles)
        return DueAcks(prefix[-1][0] + 1, prefix, singles)

    def clear(self) -> None:
        """None of the messages is ours any more."""
        self._open.clear()
        self._ended.clear()
        self._order.clear()
        self._told.clear()

    def _remember(self, sequence: int) -> None:
        self._told[sequence] = None
        if len(self._told) > _MAX_REMEMBERED:
            del self._told[next(iter(self._told))]
