"""`DynamicFormer`: combines requests into batches; `former_for`: the rule of a configuration.

Source: Triton's dynamic batcher (`dynamic_batching` in `config.pbtxt`). Requests are taken in queue order and never
split. A request whose shapes differ ends the batch before it, and so does one that the model's own `BatchStrategy`
excludes. With a free instance, this batch is sent:

1. the largest prefix of the queue whose size is preferred; without one, the prefix before the request that would
   exceed the largest preferred size; unless a request of the whole prefix has waited for the delay;
2. else the whole prefix if it can not grow: the next request differs or does not fit, or no preferred size is larger;
3. else the whole prefix if no delay is configured, or one of its requests has waited for it;
4. else none, until the delay is over.
"""

from __future__ import annotations

from collections.abc import Sequence

from weir.scheduler.batching.custom_strategy import GuardedStrategy
from weir.scheduler.batching.former import MAX_BATCH_BYTES, EnsembleFormer, Former, SingleFormer
from weir.scheduler.batching.queue_rules import QueueRules
from weir.scheduler.batching.request import QueuedRequest, total_rows
from weir.scheduler.batching.request_queue import Forming, Queue
from weir.scheduler.placement.window import runs_singly
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.wire.observation import BatchReason


class DynamicFormer(Former):
    """Forms batches by Triton's dynamic batching rules.

    Empty `preferred_batch_sizes` mean [`max_batch_size`]; a `max_batch_size` of 0 counts as 1. `max_batch_bytes` limits
    the bodies of a batch of several requests. `strategy` is the model's own rule.
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
        self.largest = max(1, max_batch_size)
        self._preferred = frozenset(preferred_batch_sizes or (self.largest,))
        # A completed configuration lists the largest size as the only preferred one.
        self._has_preferred = self._preferred != {self.largest}
        self._max_preferred = max(self._preferred)
        self._delay_us = max_queue_delay_us
        self.max_batch_bytes = MAX_BATCH_BYTES
        self._strategy = strategy

    @property
    def starts_at_once(self) -> bool:
        """Whether requests wait for nothing but an instance: no delay, no preferred size and no custom strategy."""
        return super().starts_at_once and not (self._delay_us or self._has_preferred or self._strategy)

    def take_joinable(self, queue: Queue, batch: list[QueuedRequest], most_rows: int) -> list[QueuedRequest]:
        """Removes and returns requests that can join `batch`, in queue order, up to the first that can not.

        With preferred sizes, requests join only up to a preferred size. With a custom strategy none join, because the
        strategy has not seen the batch being formed.
        """
        if self._strategy is not None or batch[0].runs_alone:
            return []
        size, size_bytes = total_rows(batch), sum(len(request.body) for request in batch)
        most = min(self.largest, size + most_rows)
        queue.return_forming()
        waiting, taken, wanted = queue.front(self.largest + 1), list[QueuedRequest](), 0
        while waiting and size < most:
            request = waiting.popleft()
            size += request.batch_size
            size_bytes += len(request.body)
            if size > most or size_bytes > self.max_batch_bytes or request.shape_key != batch[0].shape_key:
                waiting.extendleft((request,))
                break
            taken.append(request)
            if not self._has_preferred or size in self._preferred:
                wanted = len(taken)
        waiting.extendleft(reversed(taken[wanted:]))
        del taken[wanted:]
        queue.leave(taken)
        return taken

    def next(self, queue: Queue, now_us: int, full_only: bool = False) -> list[QueuedRequest] | None:
        """Returns the batch to run on a free instance now, or None."""
        forming = self._grown(queue)
        if not forming.requests or (full_only and not forming.is_complete):
            return None
        length, delay_us = len(forming.requests), self._delay_us
        is_due = not delay_us or now_us - _oldest_us(queue) >= delay_us
        if forming.preferred_length and not (is_due and delay_us):
            length = forming.preferred_length
            self.reason = BatchReason.PREFERRED if self._has_preferred else BatchReason.FULL
        elif not (forming.is_complete or is_due):
            return None
        elif forming.size >= self.largest:
            self.reason = BatchReason.FULL
        elif forming.closed_by is not None:
            self.reason = BatchReason.CLOSED
        elif is_due:
            self.reason = BatchReason.DELAY if delay_us else BatchReason.FREE
        else:
            self.reason = BatchReason.ALONE if forming.requests[0].runs_alone else BatchReason.PREFERRED
        return queue.take_formed(length)

    def ready_at_us(self, queue: Queue) -> int:
        """Returns when the oldest request will have waited for the delay; its arrival if no delay applies."""
        forming = self._grown(queue)
        return _oldest_us(queue) + (0 if forming.preferred_length or forming.is_complete else self._delay_us)

    def _grown(self, queue: Queue) -> Forming:
        """Returns the prefix of the queue for the next batch, extended by what has arrived since the last call."""
        forming = queue.forming
        if queue.is_timed and forming.requests and queue.is_overtaken():
            queue.return_forming()
            forming = queue.forming
        waiting = queue.front(self.largest + 1)
        if forming.closed_by is not None or not waiting:
            return forming
        requests = forming.requests
        size, size_bytes, preferred_length = forming.size, forming.size_bytes, forming.preferred_length
        max_size, max_bytes, preferred = self.largest, self.max_batch_bytes, self._preferred
        strategy, max_preferred = self._strategy, self._max_preferred
        shape_key = requests[0].shape_key if requests else None
        while waiting:
            request = waiting.popleft()
            grown = size + request.batch_size
            grown_bytes = size_bytes + len(request.body)
            if not requests:
                shape_key = request.shape_key
                if strategy is not None:
                    forming.noted = strategy.begin(request)
            elif (
                grown > max_size
                or grown_bytes > max_bytes
                or request.shape_key != shape_key
                or (strategy is not None and not strategy.includes(request, forming.noted))
            ):
                waiting.extendleft((request,))
                forming.closed_by = request
                break
            requests.append(request)
            size = grown
            size_bytes = grown_bytes
            if size in preferred:
                preferred_length = len(requests)
            elif size > max_preferred and not preferred_length:
                preferred_length = len(requests) - 1
        forming.size, forming.size_bytes, forming.preferred_length = size, size_bytes, preferred_length
        forming.is_complete = forming.closed_by is not None or size >= max_preferred or requests[0].runs_alone
        return forming


def _oldest_us(queue: Queue) -> int:
    """Returns the arrival of the oldest request of the forming batch."""
    requests = queue.forming.requests
    return min(request.enqueued_us for request in requests) if queue.is_timed else requests[0].enqueued_us


def former_for(config: ModelConfig, strategy: GuardedStrategy | None = None) -> Former:
    """Returns the rule for `config`; `strategy` is the model's own batching rule, if any."""
    if config.ensemble_scheduling is not None and not config.is_decoupled:
        # A decoupled request can not be repeated together with others, so those run alone.
        return EnsembleFormer()
    dynamic = config.dynamic_batching
    if dynamic is None:
        return SingleFormer(runs_singly=runs_singly(config))
    return DynamicFormer(
        max_batch_size=config.max_batch_size,
        preferred_batch_sizes=dynamic.preferred_batch_size,
        max_queue_delay_us=dynamic.max_queue_delay_microseconds,
        rules=QueueRules.of(dynamic),
        strategy=strategy,
    )
