"""`Batcher`: the queue of one model version, and the rule by which batches are taken from it.

`DefaultBatcher` is the simplest rule: requests run alone, in the order they came.
Source: Triton's default scheduler (a client's own batch runs as it is, nothing is combined, no queue policy applies).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable

from scheduler.queued_request import QueuedRequest, arrival


class Batcher(ABC):
    """Requests in the order they came, at most `max_queue_size`; a subclass says what a batch is.

    Times are microseconds. A cancelled request leaves the queue by `drop_cancelled`, so that no rule meets one.
    """

    def __init__(self, max_queue_size: int) -> None:
        self._queue: deque[QueuedRequest] = deque()
        self._max_queue_size = max_queue_size

    def __len__(self) -> int:
        """Requests waiting."""
        return len(self._queue)

    @abstractmethod
    def next_batch(self, now_us: int, full_only: bool = False) -> list[QueuedRequest] | None:
        """The batch to run on a free instance now, or None; with `full_only`, only one that could not grow any more."""

    @abstractmethod
    def ready_at_us(self) -> int:
        """From when on `next_batch` has a batch for a free instance, if nothing else happens; the queue is not empty."""

    def enqueue(self, requests: list[QueuedRequest]) -> list[QueuedRequest]:
        """Takes requests in, last, as many as there is room for; returns the others."""
        room = max(0, self._max_queue_size - len(self._queue))  # what was put back is more than there is room for
        if room >= len(requests):
            self._queue.extend(requests)
            return []
        self._queue.extend(requests[:room])
        return requests[room:]

    def put_back(self, requests: Iterable[QueuedRequest]) -> None:
        """Takes requests in again that were in a queue before, whatever the queue's size, at the places they had."""
        queue, first = self._queue, list(requests)
        last = max(map(arrival, first), default=None)
        while last is not None and queue and arrival(queue[0]) < last:
            first.append(queue.popleft())
        queue.extendleft(sorted(first, key=arrival, reverse=True))

    def drop_cancelled(self) -> None:
        """Forgets the requests that were cancelled."""
        self.put_back([request for request in self.drain() if not request.cancelled])

    def drain(self) -> list[QueuedRequest]:
        """Empties the queue: all requests, in order."""
        requests = list(self._queue)
        self._queue.clear()
        return requests


class DefaultBatcher(Batcher):
    """Each request is a batch."""

    def next_batch(self, now_us: int, full_only: bool = False) -> list[QueuedRequest] | None:
        """See `Batcher`: a batch of one can never grow."""
        return [self._queue.popleft()] if self._queue else None

    def ready_at_us(self) -> int:
        """See `Batcher`: there is nothing to wait for."""
        return self._queue[0].enqueued_us
