"""`SequenceQueues`: the durable requests of one sequence run one after another. Each waits until the one before has its
terminal record, so that a request is not overtaken while it is retried. After a takeover a request may have been run by
an earlier owner, and the model may have counted it already. Such a sequence is lost: its requests are rejected until
one starts it again. Sans-IO: an item is whatever the caller passes, and the caller starts those that are returned.

`DeliveryOrder`: finds deliveries that were lost on the way, as with a server of a NATS cluster.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

MAX_LOST = 10_000
"""Lost sequences that are remembered. Beyond it the oldest are forgotten; the scheduler rejects them as not started."""

SequenceId = int | str


class DeliveryOrder:
    """Checks that no delivery of a consumer is missing. A consumer numbers its deliveries from 1 on.

    It begins at 1 again where it was created again or delivers everything unacknowledged again.
    """

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 1

    def begin(self) -> None:
        """Expects the first delivery."""
        self._next = 1

    def follows(self, number: int) -> bool:
        """Whether the delivery is the next one, or the first: all before it have arrived, or arrive again."""
        if number not in (1, self._next):
            return False
        self._next = number + 1
        return True


T = TypeVar("T")


class SequenceQueues(Generic[T]):
    """Queues of requests by sequence."""

    def __init__(self) -> None:
        self._lines: dict[SequenceId, deque[T]] = {}
        self._lost: dict[SequenceId, None] = {}
        self._restarted: dict[SequenceId, None] = {}

    def __len__(self) -> int:
        """Sequences that have requests."""
        return len(self._lines)

    @property
    def lost(self) -> int:
        """The number of sequences remembered as lost."""
        return len(self._lost)

    def join(self, id: SequenceId, item: T) -> bool:
        """Adds the latest item of a sequence. True if it may run now; else `leave` of an earlier item returns it."""
        line = self._lines.get(id)
        if line is None:
            self._lines[id] = deque((item,))
            return True
        line.append(item)
        return False

    def leave(self, id: SequenceId, item: T) -> T | None:
        """Removes an item that has ended. Returns the next item, if that may run now."""
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
        """Marks a sequence as lost: the state that its model has of it may be wrong."""
        self._restarted.pop(id, None)
        _remember_sequence(self._lost, id)

    def may_go(self, id: SequenceId, starts: bool, maybe_started: bool = False) -> bool:
        """Whether a request of the sequence may run. One that starts the sequence always may, and clears its loss.

        With `maybe_started` an earlier owner may have run it. Then it runs only after the start of its sequence was run
        again; else the sequence is lost.
        """
        if starts:
            self._lost.pop(id, None)
            self._restarted.pop(id, None)
            if maybe_started:
                _remember_sequence(self._restarted, id)
            return True
        if maybe_started and id not in self._restarted:
            self.lose(id)
        return id not in self._lost

    def clear(self) -> None:
        """Forgets everything."""
        self._lines.clear()
        self._lost.clear()
        self._restarted.clear()


def _remember_sequence(ids: dict[SequenceId, None], id: SequenceId) -> None:
    ids.pop(id, None)
    ids[id] = None
    if len(ids) > MAX_LOST:
        del ids[next(iter(ids))]
