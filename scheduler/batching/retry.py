"""`RetryPolicy`: what happens to requests of a lost batch; `UnservedTimeout`: how long requests wait without a worker.

A lost batch is repeated. If one of its requests is what kills workers, the others must not suffer: from its second
loss on each request runs alone, and one that was lost too often fails.
"""

from __future__ import annotations

from collections.abc import Iterable

from weir.scheduler.batching.request import QueuedRequest

MAX_ATTEMPTS = 4
_ALONE_FROM_ATTEMPT = 2


class RetryPolicy:
    """Counts the losses of requests. A request that was lost `max_attempts` times fails."""

    def __init__(self, max_attempts: int = MAX_ATTEMPTS) -> None:
        self._max_attempts = max_attempts

    def is_exhausted(self, request: QueuedRequest) -> bool:
        """Whether the request was lost too often."""
        return request.attempts >= self._max_attempts

    def after_loss(self, batch: Iterable[QueuedRequest]) -> tuple[list[QueuedRequest], list[QueuedRequest]]:
        """Returns (requests to repeat, requests to fail), each in the order of the batch; cancelled ones are in neither."""
        again: list[QueuedRequest] = []
        exhausted: list[QueuedRequest] = []
        for request in batch:
            if request.cancelled:
                continue
            request.attempts += 1
            if request.attempts >= _ALONE_FROM_ATTEMPT:
                request.run_alone()
            (exhausted if self.is_exhausted(request) else again).append(request)
        return again, exhausted


class UnservedTimeout:
    """Expires when no worker has served a model version for `timeout_us`, counted from the first check without one."""

    def __init__(self, timeout_us: int) -> None:
        self._timeout_us = timeout_us
        self._unserved_since_us: int | None = None

    def renew(self) -> None:
        """Restarts the timeout: an instance serves the version."""
        self._unserved_since_us = None

    def lost_us(self, now_us: int) -> int:
        """Returns the arrival time up to which requests have waited too long, given that nothing serves now; -1 for
        none.

        Later requests wait for the full timeout themselves: a worker may be about to come.
        """
        return now_us - self._timeout_us if self.is_over(now_us) else -1

    def is_over(self, now_us: int) -> bool:
        """Whether the version was unserved for too long, given that nothing serves it now."""
        if self._unserved_since_us is None:
            self._unserved_since_us = now_us
        return now_us - self._unserved_since_us >= self._timeout_us
