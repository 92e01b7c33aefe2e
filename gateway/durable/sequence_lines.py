"""`SequenceLines`: the durable requests of one sequence go one after another, and not at all once their state may be wrong.

Each waits until the one before has its terminal record: one that is tried again must not be overtaken. After a takeover a
request of a sequence may have been run by an owner that is gone; its model may have counted it already. Such a sequence is
lost: its requests are refused until one starts it anew.
Sans-IO: a request is whatever the caller passes; the caller starts what it is told to.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

MAX_LOST = 10_000
"""Lost sequences that are remembered; of more the oldest are forgotten, and the scheduler refuses them as not started."""

SequenceId = int | str
T = TypeVar("T")


class SequenceLines(Generic[T]):
    """See the module."""

    def __init__(self) -> None:
        self._lines: dict[SequenceId, deque[T]] = {}
        self._lost: dict[SequenceId, None] = {}
        self._restarted: dict[SequenceId, None] = {}

    def __len__(self) -> int:
        """Sequences with requests here."""
        return len(self._lines)

    @property
    def lost(self) -> int:
        """How many sequences are remembered as lost."""
        return len(self._lost)

    def join(self, id: SequenceId, item: T) -> bool:
        """`item` is the latest of its sequence; True when it may go at once, else `leave` of another tells."""
        line = self._lines.get(id)
        if line is None:
            self._lines[id] = deque((item,))
            return True
        line.append(item)
        return False

    def leave(self, id: SequenceId, item: T) -> T | None:
        """`item` has ended, or is not to be done; returns the one that may go now, if it is another's turn by that."""
        line = self._lines.get(id)
        if line is None or item not in line:
            return None
        was_first = line[0] == item
        line.remove(item)
        if not line:
            del self._lines[id]
            return None
        return line[0] if was_first else None

    def lose(self, id: SequenceId) -> None:
        """The state of the sequence may be wrong from now on."""
        self._restarted.pop(id, None)
        _remember(self._lost, id)

    def may_go(self, id: SequenceId, starts: bool, maybe_begun: bool = False) -> bool:
        """Whether a request of the sequence can be run: one that starts it always can, and makes the sequence whole.

        `maybe_begun`: an owner before may have run it. It is run again only behind its sequence's start, which was run
        again before it; else the sequence is lost.
        """
        if starts:
            self._lost.pop(id, None)
            self._restarted.pop(id, None)
            if maybe_begun:
                _remember(self._restarted, id)
            return True
        if maybe_begun and id not in self._restarted:
            self.lose(id)
        return id not in self._lost

    def clear(self) -> None:
        """Nothing is here any more."""
        self._lines.clear()
        self._lost.clear()
        self._restarted.clear()


def _remember(ids: dict[SequenceId, None], id: SequenceId) -> None:
    ids.pop(id, None)
    ids[id] = None
    if len(ids) > MAX_LOST:
        del ids[next(iter(ids))]
