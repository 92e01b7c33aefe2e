"""`DynamicBatcher`: requests that may share a batch do.

Source: Triton's dynamic batcher (`dynamic_batching` in `config.pbtxt`). Requests are taken in the order of the queue and
are never split; a request whose shapes differ ends the batch before it, and so does one that a `BatchStrategy` doesn't
want in it. With a free instance, the batch that is sent is:

1. the largest prefix of the queue whose size is a preferred one; where there is none, the prefix before the request that
   would take it beyond the largest preferred size; unless a request of the whole prefix has waited too long;
2. else the whole prefix when it cannot grow: the next request differs or would not fit, or no preferred size is larger;
3. else the whole prefix when no delay is configured, or one of its requests has waited for it;
4. else none, until the delay is over.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.batch_strategy import GuardedStrategy
from scheduler.batcher import Batcher
from scheduler.queue_rules import QueueRules
from scheduler.queued_request import QueuedRequest, rows_of

MAX_BATCH_BYTES = 4 << 20
"""Bodies of one batch together: its message must stay well below the broker's largest."""


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
        rules: QueueRules | None = None,
        max_batch_bytes: int = MAX_BATCH_BYTES,
        strategy: GuardedStrategy | None = None,
    ) -> None:
        super().__init__(rules or QueueRules())
        self._max_batch_size = max(1, max_batch_size)
        self._preferred = frozenset(preferred_batch_sizes or (self._max_batch_size,))
        # A completed configuration names the largest size where none was named.
        self._has_preferred = self._preferred != {self._max_batch_size}
        self._max_preferred = max(self._preferred)
        self._delay_us = max_queue_delay_us
        self._max_batch_bytes = max_batch_bytes
        self._strategy = strategy
        # Of `_forming`: the sum of batch sizes, the bytes, the requests of the prefix that goes before its delay is over
        # (rule 1), and the next request, if that can't join it. So no request is looked at twice.
        self._size = self._bytes = self._preferred_length = 0
        self._closed_by: QueuedRequest | None = None

    def another(self) -> DynamicBatcher:
        """See `Batcher`."""
        return DynamicBatcher(
            self._max_batch_size,
            sorted(self._preferred) if self._has_preferred else (),
            self._delay_us,
            self.rules,
            self._max_batch_bytes,
            self._strategy and self._strategy.another(),
        )

    @property
    def largest(self) -> int:
        """See `Batcher`."""
        return self._max_batch_size

    def companions(self, batch: list[QueuedRequest], most_rows: int) -> list[QueuedRequest]:
        """See `Batcher`: in the order of the queue, up to one that can't join.

        Where sizes are preferred, a batch is not brought to another. A model's own strategy knows nothing of a batch that
        has been formed, so there none join.
        """
        if self._strategy is not None or batch[0].runs_alone:
            return []
        size, size_bytes = rows_of(batch), sum(len(request.body) for request in batch)
        most = min(self._max_batch_size, size + most_rows)
        self._unform()
        queue, taken, wanted = self._queue, list[QueuedRequest](), 0
        while queue and size < most:
            request = queue.popleft()
            if request.cancelled:
                self._gone -= 1
                continue
            size += request.batch_size
            size_bytes += len(request.body)
            if size > most or size_bytes > self._max_batch_bytes or request.shape_key != batch[0].shape_key:
                queue.extendleft((request,))
                break
            taken.append(request)
            if not self._has_preferred or size in self._preferred:
                wanted = len(taken)
        if wanted < len(taken):
            queue.extendleft(reversed(taken[wanted:]))
            del taken[wanted:]
        if queue is self._ordered:
            self._ordered.leave(taken)
        return taken

    def next_batch(self, now_us: int, full_only: bool = False) -> list[QueuedRequest] | None:
        """See `Batcher`."""
        forming = self._grown()
        if not forming:
            return None
        complete = self._is_complete()
        if full_only and not complete:
            return None
        due = not self._delay_us or now_us - self._oldest_us() >= self._delay_us
        length = len(forming)
        if self._preferred_length and not (due and self._delay_us):
            length = self._preferred_length
        elif not (complete or due):
            return None
        self._forming = []
        batch = forming
        if length < len(forming):
            batch = forming[:length]
            self._queue.extendleft(reversed(forming[length:]))
        self._size = self._bytes = self._preferred_length = 0
        self._closed_by = None
        if self._queue is self._ordered:
            self._ordered.leave(batch)
        return batch

    def ready_at_us(self) -> int:
        """See `Batcher`: when the oldest request will have waited for the delay, or since it came."""
        self._grown()
        ready = self._preferred_length or self._is_complete()
        return self._oldest_us() + (0 if ready else self._delay_us)

    def _is_complete(self) -> bool:
        """Whether the prefix can't become a better batch: it is full, the next request can't join it, or none may."""
        return self._closed_by is not None or self._size >= self._max_preferred or self._forming[0].runs_alone

    def _oldest_us(self) -> int:
        if self._queue is self._fifo:
            return self._forming[0].enqueued_us
        return min(request.enqueued_us for request in self._forming)

    def _unform(self) -> None:
        """See `Batcher`."""
        super()._unform()
        self._size = self._bytes = self._preferred_length = 0
        self._closed_by = None

    def _is_outdated(self, first: QueuedRequest | None) -> bool:
        """Whether the prefix would be another by now, when `first` comes after it."""
        if self._closed_by is not None:
            return first is not self._closed_by
        return first is not None and self._ordered.is_before(first, self._forming[-1])

    def _grown(self) -> list[QueuedRequest]:
        """The prefix of the queue that the next batch is made of, after it has grown by what has come since."""
        queue, forming = self._queue, self._forming
        if forming and queue is self._ordered and self._is_outdated(queue.first()):
            self._unform()
            forming = self._forming
        if self._closed_by is not None or not queue:
            return forming
        size, size_bytes, preferred_length = self._size, self._bytes, self._preferred_length
        max_size, max_bytes, preferred = self._max_batch_size, self._max_batch_bytes, self._preferred
        strategy, max_preferred = self._strategy, self._max_preferred
        shape_key = forming[0].shape_key if forming else None
        while queue:
            request = queue.popleft()
            if request.cancelled:
                self._gone -= 1
                continue
            grown = size + request.batch_size
            grown_bytes = size_bytes + len(request.body)
            if not forming:
                shape_key = request.shape_key
                if strategy is not None:
                    strategy.begin(request)
            elif (
                grown > max_size
                or grown_bytes > max_bytes
                or request.shape_key != shape_key
                or (strategy is not None and not strategy.includes(request))
            ):
                queue.extendleft((request,))
                self._closed_by = request
                break
            forming.append(request)
            size = grown
            size_bytes = grown_bytes
            if size in preferred:
                preferred_length = len(forming)
            elif size > max_preferred and not preferred_length:
                preferred_length = len(forming) - 1
        self._size, self._bytes, self._preferred_length = size, size_bytes, preferred_length
        return forming
