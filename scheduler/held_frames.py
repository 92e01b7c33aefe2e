"""`HeldFrames`: the bytes of frames that a scheduler holds in memory, for one queue and for all of them.

What is beyond stays in the stream, whose limits refuse publishes.
"""

from __future__ import annotations

MAX_HELD_BYTES = 256 << 20
"""Frames of one queue held in memory."""

MAX_ALL_HELD_BYTES = 512 << 20
"""Those of all queues of a scheduler."""

MIN_HELD_BYTES = 4 << 20
"""So much a queue may always hold: nobody starves because others have too much."""


class AllHeldFrames:
    """How much all queues hold together."""

    __slots__ = ("size_bytes",)

    def __init__(self) -> None:
        self.size_bytes = 0

    @property
    def is_over(self) -> bool:
        """Whether it is too much."""
        return self.size_bytes > MAX_ALL_HELD_BYTES


class HeldFrames:
    """How much one queue holds. From a bound on it is full until half of it has gone, so that it isn't pulled in drops."""

    __slots__ = ("_all", "_size_bytes", "is_full")

    def __init__(self, of_all: AllHeldFrames) -> None:
        self._all = of_all
        self._size_bytes = 0
        self.is_full = False

    def took(self, size_bytes: int) -> bool:
        """A frame of this size is in memory now; True where the queue is full by that."""
        self._size_bytes += size_bytes
        self._all.size_bytes += size_bytes
        was_full = self.is_full
        if self._size_bytes > MAX_HELD_BYTES or (self._all.is_over and self._size_bytes > MIN_HELD_BYTES):
            self.is_full = True
        return self.is_full and not was_full

    def forget(self) -> None:
        """None of them is held any more: the queue is another's."""
        self._all.size_bytes -= self._size_bytes
        self._all = AllHeldFrames()  # what ends of them later is nobody's matter

    def released(self, size_bytes: int) -> bool:
        """A frame of this size has gone; True where the queue is full no more by that."""
        self._size_bytes -= size_bytes
        self._all.size_bytes -= size_bytes
        if not self.is_full:
            return False
        most = MIN_HELD_BYTES if self._all.size_bytes > MAX_ALL_HELD_BYTES // 2 else MAX_HELD_BYTES
        self.is_full = self._size_bytes > most // 2
        return not self.is_full
