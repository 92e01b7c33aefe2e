"""`RetryPolicy`: what becomes of the requests of a batch that was lost with its worker.

A lost batch is done again. If one of its requests is what kills workers, its batch mates must not be dragged along:
from the second loss on each runs alone, and one that has been lost too often is answered with an error.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.queued_request import QueuedRequest

MAX_ATTEMPTS = 4
_ALONE_FROM_ATTEMPT = 2


class RetryPolicy:
    """Counts losses; `max_attempts` is how often a request may be lost before it is given up."""

    def __init__(self, max_attempts: int = MAX_ATTEMPTS) -> None:
        self._max_attempts = max_attempts

    def is_given_up(self, request: QueuedRequest) -> bool:
        """Whether the request was lost too often."""
        return request.attempts >= self._max_attempts

    def after_loss(self, batch: Iterable[QueuedRequest]) -> tuple[list[QueuedRequest], list[QueuedRequest]]:
        """(requests to do again, requests to give up), each in the order of the batch; cancelled ones are in neither."""
        again: list[QueuedRequest] = []
        given_up: list[QueuedRequest] = []
        for request in batch:
            if request.cancelled:
                continue
            request.attempts += 1
            if request.attempts >= _ALONE_FROM_ATTEMPT:
                request.run_alone()
            (given_up if self.is_given_up(request) else again).append(request)
        return again, given_up
