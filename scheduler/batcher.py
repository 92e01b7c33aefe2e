"""What every batcher promises, and the default one: requests run alone, in the order they came.

Source: Triton's default scheduler (a client's own batch runs as it is, nothing is combined, no queue policy applies).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from scheduler.queued_request import QueuedRequest
from schemas.errors import unavailable


class Batcher(Protocol):
    """The queue of one model version, and the rule by which batches are taken from it. Times are microseconds."""

    def enqueue(self, request: QueuedRequest) -> None:
        """Takes the request in, last. Raises WeirError when it refuses it."""

    def put_back(self, requests: Iterable[QueuedRequest]) -> None:
        """Takes requests of a lost batch in again, before all others, in the order given."""

    def next_batch(self, now_us: int, full_only: bool = False) -> list[QueuedRequest] | None:
        """The batch to run on a free instance now, or None; with `full_only`, only one that could not grow any more."""

    def wake_at_us(self) -> int | None:
        """When `next_batch` may answer otherwise without any new event; None for never."""

    def drain(self) -> list[QueuedRequest]:
        """Empties the queue: all requests not cancelled, in order."""

    def __len__(self) -> int:
        """Requests waiting, cancelled ones included."""


class DefaultBatcher:
    """Each request is a batch."""

    def __init__(self, max_queue_size: int) -> None:
        self._queue: deque[QueuedRequest] = deque()
        self._max_queue_size = max_queue_size

    def __len__(self) -> int:
        return len(self._queue)

    def enqueue(self, request: QueuedRequest) -> None:
        """See `Batcher`. Raises UNAVAILABLE when the queue is full."""
        if len(self._queue) >= self._max_queue_size:
            raise queue_full()
        self._queue.append(request)

    def put_back(self, requests: Iterable[QueuedRequest]) -> None:
        """See `Batcher`."""
        self._queue.extendleft(reversed(list(requests)))

    def next_batch(self, now_us: int, full_only: bool = False) -> list[QueuedRequest] | None:
        """See `Batcher`: a batch of one can never grow."""
        while self._queue:
            request = self._queue.popleft()
            if not request.cancelled:
                return [request]
        return None

    def wake_at_us(self) -> int | None:
        """See `Batcher`: there is nothing to wait for."""
        return None

    def drain(self) -> list[QueuedRequest]:
        """See `Batcher`."""
        requests = [request for request in self._queue if not request.cancelled]
        self._queue.clear()
        return requests


def queue_full() -> Exception:
    """The refusal of a full queue, in Triton's words."""
    return unavailable("Exceeds maximum queue size")
