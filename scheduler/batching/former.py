"""`Former`: the rule by which batches are taken from a queue. It has no requests of its own and serves all lanes.

`SingleFormer` is the simplest rule: each request runs alone, in the order of arrival. Source: Triton's default
scheduler (a client's own batch runs as it is, requests are not combined, no queue policy applies). `EnsembleFormer`
sends waiting requests to an ensemble together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from weir.scheduler.batching.queue_rules import DEFAULT_MAX_QUEUE_SIZE, LevelRules, QueueRules
from weir.scheduler.batching.request import QueuedRequest
from weir.scheduler.batching.request_queue import Queue
from weir.schemas.wire.observation import BatchReason

MAX_BATCH_BYTES = 4 << 20
"""Bodies of one batch together: its message must stay well below the broker's limit."""

MAX_REQUESTS = 256
"""Requests sent to a coordinator together, which are also repeated together if the coordinator is lost."""


class Former(ABC):
    """The rule of one model version; its queues have these `rules`. A subclass defines what a batch is.

    Times are microseconds of the policy clock. `reason` is why the last batch that `next` returned was complete.
    """

    has_steps = False
    """Whether requests run steps on other models, which may keep states of sequences."""

    runs_singly = False
    """Whether each request is a batch, of which an instance may hold many (`Window`)."""

    largest = 1
    """The largest number of requests in a batch."""

    reason = BatchReason.SINGLE

    def __init__(self, rules: QueueRules) -> None:
        self.rules = rules

    @abstractmethod
    def next(self, queue: Queue, now_us: int, full_only: bool = False) -> list[QueuedRequest] | None:
        """Returns the batch to run on a free instance now, or None; with `full_only`, only a batch that can not grow.

        Call the queue's `overdue` first: a batch may contain overdue requests.
        """

    def ready_at_us(self, queue: Queue) -> int:
        """Returns when `next` will have a batch for a free instance if nothing else happens. The queue is not empty."""
        return 0

    @property
    def starts_at_once(self) -> bool:
        """Whether the first requests of the queue start as soon as an instance is free, in the order of arrival."""
        return self.rules.is_plain and self.rules.may_stage and not self.has_steps

    def take_joinable(self, queue: Queue, batch: list[QueuedRequest], most_rows: int) -> list[QueuedRequest]:
        """Removes and returns requests that can join `batch`, of another queue, up to `most_rows` rows."""
        return []


class SingleFormer(Former):
    """Each request is a batch of its own; `runs_singly` as in `Former`."""

    def __init__(self, max_queue_size: int = DEFAULT_MAX_QUEUE_SIZE, runs_singly: bool = False) -> None:
        super().__init__(QueueRules(LevelRules(max_queue_size), is_deadline_first=False))
        self.runs_singly = runs_singly

    def next(self, queue: Queue, now_us: int, full_only: bool = False) -> list[QueuedRequest] | None:
        """Returns the next request as a batch, or None; such a batch can never grow."""
        waiting = queue.front(1)
        if not waiting:
            return None
        batch = [waiting.popleft()]
        if queue.is_timed:
            queue.leave(batch)
        return batch


class EnsembleFormer(Former):
    """Sends all waiting requests to an ensemble's coordinator at once, within bounds.

    They do not form a batch for a model: each request runs independently, and sending them together only saves
    messages. A request that was lost with a coordinator before is sent alone (see `RetryPolicy`).
    """

    has_steps = True
    largest = MAX_REQUESTS
    reason = BatchReason.TOGETHER

    def __init__(self, max_queue_size: int = DEFAULT_MAX_QUEUE_SIZE) -> None:
        super().__init__(QueueRules(LevelRules(max_queue_size), is_deadline_first=False, is_batched_by_shape=False))

    def next(self, queue: Queue, now_us: int, full_only: bool = False) -> list[QueuedRequest] | None:
        """Returns all waiting requests within bounds, or None; waiting for the coordinator would gain nothing."""
        batch: list[QueuedRequest] = []
        size_bytes = 0
        waiting = queue.front(MAX_REQUESTS)
        while waiting and len(batch) < MAX_REQUESTS:
            request = waiting.popleft()
            size_bytes += len(request.body)
            if batch and (size_bytes > MAX_BATCH_BYTES or request.runs_alone):
                waiting.extendleft((request,))
                break
            batch.append(request)
            if request.runs_alone:
                break
        queue.leave(batch)
        return batch or None
