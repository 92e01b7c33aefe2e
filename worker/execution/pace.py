"""`Pace`: whether an instance is so fast that the event loop may run its next batch."""

from __future__ import annotations

from weir.bus.naming.identity import SEGMENT_PREFIX
from weir.schemas.wire.request_body import is_body_ref
from weir.worker.execution.batch import Batch

_SEGMENT = SEGMENT_PREFIX.encode()  # in a body, the beginning of a reference to shared memory
UNBOUNDED = 1 << 62

FAST_US = 1000
"""A batch that takes no longer does not delay the event loop noticeably. This is time on the clock: on a busy machine a
small batch takes several times as long as alone."""

FAST_BATCHES = 64
"""So many batches in a row must have been fast before the event loop runs one."""


class Pace:
    """Whether batches of an instance are so short that the next may run in the event loop. For one thread at a time."""

    __slots__ = ("_fast", "_fast_bytes")

    def __init__(self) -> None:
        self._fast = 0  # fast batches since the last slow one
        self._fast_bytes = 0  # the largest of them

    def note(self, size_bytes: int, busy_us: int) -> None:
        """Notes how long a batch with bodies of this size has taken."""
        if busy_us > FAST_US:
            self._fast = self._fast_bytes = 0
            return
        self._fast += 1
        self._fast_bytes = max(self._fast_bytes, size_bytes)

    def is_fast(self, size_bytes: int) -> bool:
        """Whether a batch with bodies of this size is expected to be fast: so many were, some of them as large."""
        return self._fast >= FAST_BATCHES and size_bytes <= self._fast_bytes


def measured_bytes(batch: Batch) -> int:
    """The size of the bodies of a batch; beyond all bounds where content lies in shared memory."""
    size_bytes = 0
    for entry in batch.message.entries:
        body = entry.body
        if is_body_ref(body) or _SEGMENT in body:
            return UNBOUNDED
        size_bytes += len(body)
    return size_bytes
