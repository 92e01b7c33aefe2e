"""`DynamicBatcher`: combines requests into batches; `EnsembleBatcher`: sends waiting requests to an ensemble together.

Source: Triton's dynamic batcher (`dynamic_batching` in `config.pbtxt`). Requests are taken in queue order and never
split. A request whose shapes differ ends the batch before it, and so does one that the model's own `BatchStrategy`
excludes. With a free instance, this batch is sent:

1. the largest prefix of the queue whose size is preferred; without one, the prefix before the request that would
   exceed
   the largest preferred size; unless a request of the whole prefix has waited for the delay;
2. else the whole prefix if it can not grow: the next request differs or does not fit, or no preferred size is larger;
3. else the whole prefix if no delay is configured, or one of its requests has waited for it;
4. else none, until the delay is over.
"""

from __future__ import annotations

from collections.abc import Sequence

from weir.scheduler.batching.batcher import Batcher
from weir.scheduler.batching.custom_strategy import GuardedStrategy
from weir.scheduler.batching.request import QueuedRequest, total_rows
from weir.scheduler.batching.request_queue import DEFAULT_MAX_QUEUE_SIZE, LevelRules, QueueRules
from weir.schemas.wire.observation import BatchReason

MAX_BATCH_BYTES = 4 << 20
"""Bodies of one batch together: its message must stay well below the broker's limit."""


class DynamicBatcher(Batcher):
    """Forms batches by Triton's dynamic batching rules.

    An empty `preferred_batch_sizes` means [`max_batch_size`]; a `max_batch_size` of 0 counts as 1. `max_batch_bytes`
    limits the bodies of a batch of several requests.
    """

    def __init__(
        self,
        max_batch_size: int,
        preferred_batch_sizes: Sequence[int] = (),
        max_queue_delay_us: int = 0,
        rules: QueueRules | None = None,
        strategy: GuardedStrategy | None = None,
    ) -> None:
        super().__init__(rules or QueueRules())
        self._max_batch_size = max(1, max_batch_size)
        self._preferred = frozenset(preferred_batch_sizes or (self._max_batch_size,))
        # A completed configuration lists the largest size as the only preferred one.
        self._has_preferred = self._preferred != {self._max_batch_size}
        self._max_preferred = max(self._preferred)
        self._delay_us = max_queue_delay_us
        self.max_batch_bytes = MAX_BATCH_BYTES
        self._strategy = strategy
        # State of `_forming`, so that no request is examined twice: its batch size, its bytes, the length of the prefix
        # that may be sent before the delay is over (rule 1), and the next request if that can not join.
        self._size = self._bytes = self._preferred_length = 0
        self._closed_by: QueuedRequest | None = None

    def another(self) -> DynamicBatcher:
        """Returns an empty batcher with the same configuration."""
        batcher = DynamicBatcher(
            self._max_batch_size,
            sorted(self._preferred) if self._has_preferred else (),
            self._delay_us,
            self.rules,
            self._strategy and self._strategy.another(),
        )
        batcher.max_batch_bytes = self.max_batch_bytes
        return batcher

    @property
    def largest(self) -> int:
        """The largest number of requests in a batch."""
        return self._max_batch_size

    @property
    def starts_at_once(self) -> bool:
        """Whether requests wait for nothing but an instance: no delay, no preferred size and no custom strategy."""
        return super().starts_at_once and not (self._delay_us or self._has_preferred or self._strategy)

    def take_joinable(self, batch: list[QueuedRequest], most_rows: int) -> list[QueuedRequest]:
        """Takes out requests that can join `batch`, in queue order, up to the first that can not.

        With preferred sizes, requests join only up to a preferred size. With a custom strategy none join, because the
        strategy has not seen the batch being formed.
        """
        if self._strategy is not None or batch[0].runs_alone:
            return []
        size, size_bytes = total_rows(batch), sum(len(request.body) for request in batch)
        most = min(self._max_batch_size, size + most_rows)
        self._return_forming()
        queue, taken, wanted = self._queue, list[QueuedRequest](), 0
        while queue and size < most:
            request = queue.popleft()
            if request.cancelled:
                self._cancelled -= 1
                continue
            size += request.batch_size
            size_bytes += len(request.body)
            if size > most or size_bytes > self.max_batch_bytes or request.shape_key != batch[0].shape_key:
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
        """Returns the batch to run on a free instance now, or None."""
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
            self.reason = BatchReason.PREFERRED if self._has_preferred else BatchReason.FULL
        elif not (complete or due):
            return None
        else:
            self.reason = self._reason(due)
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

    def _reason(self, due: bool) -> BatchReason:
        """Returns why the whole prefix may be sent; `due`: its oldest request has waited for the delay, if there is one."""
        if self._size >= self._max_batch_size:
            return BatchReason.FULL
        if self._closed_by is not None:
            return BatchReason.CLOSED
        if due:
            return BatchReason.DELAY if self._delay_us else BatchReason.FREE
        return BatchReason.ALONE if self._forming[0].runs_alone else BatchReason.PREFERRED

    def ready_at_us(self) -> int:
        """Returns when the oldest request will have waited for the delay; its arrival if no delay applies."""
        self._grown()
        ready = self._preferred_length or self._is_complete()
        return self._oldest_us() + (0 if ready else self._delay_us)

    def _is_complete(self) -> bool:
        """Whether the prefix can not become a better batch: it is full, or the next request may not join it."""
        return self._closed_by is not None or self._size >= self._max_preferred or self._forming[0].runs_alone

    def _oldest_us(self) -> int:
        if self._queue is self._fifo:
            return self._forming[0].enqueued_us
        return min(request.enqueued_us for request in self._forming)

    def _return_forming(self) -> None:
        """Returns requests that were taken for the next batch to the queue."""
        super()._return_forming()
        self._size = self._bytes = self._preferred_length = 0
        self._closed_by = None

    def _is_outdated(self, first: QueuedRequest | None) -> bool:
        """Whether the prefix has changed, given that `first` is now the next request behind it."""
        if self._closed_by is not None:
            return first is not self._closed_by
        return first is not None and self._ordered.is_before(first, self._forming[-1])

    def _grown(self) -> list[QueuedRequest]:
        """Returns the prefix of the queue for the next batch, extended by what has arrived since the last call."""
        queue, forming = self._queue, self._forming
        if forming and queue is self._ordered and self._is_outdated(queue.first()):
            self._return_forming()
            forming = self._forming
        if self._closed_by is not None or not queue:
            return forming
        size, size_bytes, preferred_length = self._size, self._bytes, self._preferred_length
        max_size, max_bytes, preferred = self._max_batch_size, self.max_batch_bytes, self._preferred
        strategy, max_preferred = self._strategy, self._max_preferred
        shape_key = forming[0].shape_key if forming else None
        while queue:
            request = queue.popleft()
            if request.cancelled:
                self._cancelled -= 1
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


MAX_REQUESTS = 256
"""Requests sent to a coordinator together, which are also repeated together if the coordinator is lost."""


class EnsembleBatcher(Batcher):
    """Sends all waiting requests to an ensemble's coordinator at once, within bounds.

    They do not form a batch for a model: each request runs independently, and sending them together only saves
    messages. A request that was lost with a coordinator before is sent alone (see `RetryPolicy`).
    """

    has_steps = True

    def __init__(self, max_queue_size: int = DEFAULT_MAX_QUEUE_SIZE) -> None:
        super().__init__(QueueRules(LevelRules(max_queue_size), is_deadline_first=False))
        self.reason = BatchReason.TOGETHER

    def another(self) -> EnsembleBatcher:
        """Returns an empty batcher with the same queue size."""
        return EnsembleBatcher(self._max_size)

    @property
    def largest(self) -> int:
        """The largest number of requests that are sent together."""
        return MAX_REQUESTS

    def next_batch(self, now_us: int, full_only: bool = False) -> list[QueuedRequest] | None:
        """Returns all waiting requests within bounds, or None; waiting for the coordinator would gain nothing."""
        queue, size_bytes = self._queue, 0
        batch: list[QueuedRequest] = []
        while queue and len(batch) < MAX_REQUESTS:
            request = queue.popleft()
            if request.cancelled:
                self._cancelled -= 1
                continue
            size_bytes += len(request.body)
            if batch and (size_bytes > MAX_BATCH_BYTES or request.runs_alone):
                queue.extendleft((request,))
                break
            batch.append(request)
            if request.runs_alone:
                break
        if self._queue is self._ordered:
            self._ordered.leave(batch)
        return batch or None

    def ready_at_us(self) -> int:
        """Returns 0: requests are ready at once."""
        return 0
