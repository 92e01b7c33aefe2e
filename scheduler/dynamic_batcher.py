"""`DynamicBatcher`: requests that may share a batch do.

Source: Triton's dynamic batcher (`dynamic_batching` in `config.pbtxt`). Requests are taken in the order they came and are
never split; a request whose shapes differ ends the batch before it. With a free instance, the batch that is sent is:

1. the largest prefix of the queue whose size is a preferred one, unless the oldest request has waited too long;
2. else the whole prefix when it cannot grow: the next request differs or would not fit, or no preferred size is larger;
3. else the whole prefix when no delay is configured, or the oldest request has waited for it;
4. else none, until the delay is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from scheduler.batcher import Batcher
from scheduler.queued_request import QueuedRequest

MAX_BATCH_BYTES = 4 << 20
"""Bodies of one batch together: its message must stay well below the broker's largest."""

_Prefix = tuple[int, int, int, int, bool]
"""What is known of the prefix of the queue that the next batch will be made of.

Its requests, the sum of their batch sizes, their bytes, the requests of its longest prefix whose size is a preferred one,
and whether the request after it can't join it.
"""

_EMPTY: _Prefix = (0, 0, 0, 0, False)


class DynamicBatcher(Batcher):
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
        super().__init__(max_queue_size)
        self._max_batch_size = max(1, max_batch_size)
        self._preferred = frozenset(preferred_batch_sizes or (self._max_batch_size,))
        self._max_preferred = max(self._preferred)
        self._delay_us = max_queue_delay_us
        self._max_batch_bytes = max_batch_bytes
        self._prefix = _EMPTY

    def next_batch(self, now_us: int, full_only: bool = False) -> list[QueuedRequest] | None:
        """See `Batcher`."""
        queue = self._queue
        if not queue:
            return None
        length, size, _, preferred_length, closed = self._grown_prefix()
        complete = closed or size >= self._max_preferred
        if full_only and not complete:
            return None
        due = now_us - queue[0].enqueued_us >= self._delay_us
        if preferred_length and not (due and self._delay_us):
            length = preferred_length
        elif not (complete or due):
            return None
        self._prefix = _EMPTY
        return [queue.popleft() for _ in range(length)]

    def ready_at_us(self) -> int:
        """See `Batcher`: when the oldest request will have waited for the delay, or since it came."""
        _, size, _, preferred_length, closed = self._grown_prefix()
        ready = preferred_length or closed or size >= self._max_preferred
        return self._queue[0].enqueued_us + (0 if ready else self._delay_us)

    def put_back(self, requests: Iterable[QueuedRequest]) -> None:
        """See `Batcher`."""
        self._prefix = _EMPTY
        super().put_back(requests)

    def drain(self) -> list[QueuedRequest]:
        """See `Batcher`."""
        self._prefix = _EMPTY
        return super().drain()

    def _grown_prefix(self) -> _Prefix:
        """The prefix, after it has grown by what has come since: no request is looked at twice."""
        length, size, size_bytes, preferred_length, closed = self._prefix
        if closed or length == len(self._queue):
            return self._prefix
        max_size, max_bytes, preferred = self._max_batch_size, self._max_batch_bytes, self._preferred
        shape_key = self._queue[0].shape_key
        for request in islice(self._queue, length, None):
            grown = size + request.batch_size
            grown_bytes = size_bytes + len(request.body)
            if (grown > max_size or grown_bytes > max_bytes or request.shape_key != shape_key) and length:
                closed = True
                break
            length += 1
            size = grown
            size_bytes = grown_bytes
            if size in preferred:
                preferred_length = length
        self._prefix = length, size, size_bytes, preferred_length, closed
        return self._prefix
