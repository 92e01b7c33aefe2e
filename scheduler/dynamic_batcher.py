"""`DynamicBatcher`: requests that may share a batch do.

Source: Triton's dynamic batcher (`dynamic_batching` in `config.pbtxt`). Requests are taken in the order they came and are
never split; a request whose shapes differ ends the batch before it. With a free instance, the batch that is sent is:

1. the largest prefix of the queue whose size is a preferred one, unless the oldest request has waited too long;
2. else the whole prefix when it cannot grow: the next request differs or would not fit, or no preferred size is larger;
3. else the whole prefix when no delay is configured, or the oldest request has waited for it;
4. else none, until the delay is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from scheduler.batcher import queue_full
from scheduler.queued_request import QueuedRequest

MAX_BATCH_BYTES = 4 << 20
"""Bodies of one batch together: its message must stay well below the broker's largest."""


class DynamicBatcher:
    """See `scheduler.batcher.Batcher` and the rules above.

    `preferred_batch_sizes` empty means [`max_batch_size`]; a `max_batch_size` of 0 behaves as 1. `max_batch_bytes` bounds
    the bodies of a batch of several requests.
    """

    def __init__(
        self,
        max_batch_size: int,
        preferred_batch_sizes: Sequence[int] = (),
        max_queue_delay_us: int = 0,
        max_queue_size: int = 10_000,
        max_batch_bytes: int = MAX_BATCH_BYTES,
    ) -> None:
        self._max_batch_size = max(1, max_batch_size)
        self._preferred = frozenset(preferred_batch_sizes or (self._max_batch_size,))
        self._max_preferred = max(self._preferred)
        self._delay_us = max_queue_delay_us
        self._max_queue_size = max_queue_size
        self._max_batch_bytes = max_batch_bytes
        self._queue: deque[QueuedRequest] = deque()
        # The prefix of the queue that the next batch is made of, grown as requests come, so that none is looked at twice.
        self._forming: list[QueuedRequest] = []
        self._forming_size = 0
        self._forming_bytes = 0
        self._preferred_length = 0  # requests of the longest prefix of `_forming` whose size is a preferred one
        self._closed = False  # the request after `_forming` can't join it

    def __len__(self) -> int:
        return len(self._queue) + len(self._forming)

    def enqueue(self, request: QueuedRequest) -> None:
        """See `Batcher`. Raises UNAVAILABLE when the queue is full."""
        if len(self._queue) + len(self._forming) >= self._max_queue_size:
            raise queue_full()
        self._queue.append(request)

    def put_back(self, requests: Iterable[QueuedRequest]) -> None:
        """See `Batcher`."""
        self._reopen()
        self._queue.extendleft(reversed(list(requests)))

    def next_batch(self, now_us: int, full_only: bool = False) -> list[QueuedRequest] | None:
        """See `Batcher`."""
        self._grow()
        if any(request.cancelled for request in self._forming):
            self._reopen()
            self._grow()
        if not self._forming:
            return None
        complete = self._closed or self._forming_size >= self._max_preferred
        if full_only and not complete:
            return None
        due = now_us - self._forming[0].enqueued_us >= self._delay_us
        if self._preferred_length and not (due and self._delay_us):
            return self._take(self._preferred_length)
        if complete or due:
            return self._take(len(self._forming))
        return None

    def wake_at_us(self) -> int | None:
        """See `Batcher`: when the oldest request will have waited for the configured delay."""
        if self._delay_us == 0:
            return None
        oldest = self._forming[0] if self._forming else self._queue[0] if self._queue else None
        return None if oldest is None else oldest.enqueued_us + self._delay_us

    def drain(self) -> list[QueuedRequest]:
        """See `Batcher`."""
        self._reopen()
        requests = [request for request in self._queue if not request.cancelled]
        self._queue.clear()
        return requests

    def _grow(self) -> None:
        queue, forming = self._queue, self._forming
        while queue and not self._closed:
            request = queue[0]
            if request.cancelled:
                queue.popleft()
                continue
            if forming and (
                self._forming_size + request.batch_size > self._max_batch_size
                or self._forming_bytes + len(request.part.body) > self._max_batch_bytes
                or request.shape_key != forming[0].shape_key
                or request.alone
                or forming[0].alone
            ):
                self._closed = True
                return
            forming.append(queue.popleft())
            self._forming_size += request.batch_size
            self._forming_bytes += len(request.part.body)
            if self._forming_size in self._preferred:
                self._preferred_length = len(forming)
            if self._forming_size >= self._max_batch_size:
                self._closed = True

    def _take(self, length: int) -> list[QueuedRequest]:
        batch = self._forming[:length]
        self._forming = self._forming[length:]
        self._reopen()
        return batch

    def _reopen(self) -> None:
        """Gives the forming batch back to the queue, to be formed anew."""
        self._queue.extendleft(reversed(self._forming))
        self._forming = []
        self._forming_size = 0
        self._forming_bytes = 0
        self._preferred_length = 0
        self._closed = False
