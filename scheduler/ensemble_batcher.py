"""`EnsembleBatcher`: requests to an ensemble go to its coordinator together, however many wait.

They are no batch to a model: each runs on its own, and a coordinator takes any number. Together they only save messages.
Only those that have been lost with coordinators before are sent alone (`scheduler.retry`).
"""

from __future__ import annotations

from scheduler.batcher import Batcher
from scheduler.dynamic_batcher import MAX_BATCH_BYTES
from scheduler.queue_rules import DEFAULT_MAX_QUEUE_SIZE, LevelRules, QueueRules
from scheduler.queued_request import QueuedRequest

MAX_REQUESTS = 256
"""Requests that go together: what is lost with a coordinator is done again together, too."""


class EnsembleBatcher(Batcher):
    """See `scheduler.batcher.Batcher`: everything that waits, within bounds, at once."""

    has_steps = True

    def __init__(self, max_queue_size: int = DEFAULT_MAX_QUEUE_SIZE) -> None:
        super().__init__(QueueRules(LevelRules(max_queue_size), is_deadline_first=False))

    def another(self) -> EnsembleBatcher:
        """See `Batcher`."""
        return EnsembleBatcher(self._max_size)

    @property
    def largest(self) -> int:
        """See `Batcher`."""
        return MAX_REQUESTS

    def next_batch(self, now_us: int, full_only: bool = False) -> list[QueuedRequest] | None:
        """See `Batcher`: nothing is gained by waiting until the coordinator has ended what it has."""
        queue, size_bytes = self._queue, 0
        batch: list[QueuedRequest] = []
        while queue and len(batch) < MAX_REQUESTS:
            request = queue.popleft()
            if request.cancelled:
                self._gone -= 1
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
        """See `Batcher`: there is nothing to wait for."""
        return 0
