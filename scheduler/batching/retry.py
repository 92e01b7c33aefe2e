"""`RetryPolicy`: what happens to requests of a lost batch; `UnservedTimeout`: how long requests wait without a worker.

A lost batch is repeated. If one of its requests is what kills workers, the others must not suffer: from its second
loss on each request runs alone, and one that was lost too often fails.
"""

from __future__ import annotations

from collections.abc import Iterable

from weir.scheduler.batching.outcome import Failure
from weir.scheduler.batching.request import QueuedRequest
from weir.schemas.core.errors import Reason, WeirError, internal, unavailable
from weir.schemas.core.request_limits import cancelled_error
from weir.schemas.core.requests import shown_id

MAX_ATTEMPTS = 4
_ALONE_FROM_ATTEMPT = 2

TOO_MANY_LOSSES = "the model's worker or process died {} times while running this request"
"""The error of a request that was lost too often, which may be what kills or hangs workers."""

LOST_STREAM = "the model's worker was lost while it was streaming the response; the request may be sent again"
"""The error of a request whose worker was lost while some of its responses may have been delivered: no retry."""

LOST_STEPS = "the ensemble's worker was lost while it ran a request of sequence {}: start the sequence again"
"""The error of a sequence's request to an ensemble whose worker was lost: models of its steps may have counted it."""


class RetryPolicy:
    """Counts the losses of requests. One that was lost `max_attempts` times fails."""

    def __init__(self, max_attempts: int = MAX_ATTEMPTS) -> None:
        self._max_attempts = max_attempts
        self._repeated: list[QueuedRequest] = []

    def is_exhausted(self, request: QueuedRequest) -> bool:
        """Whether the request was lost too often."""
        return request.attempts >= self._max_attempts

    def after_loss(
        self, batch: Iterable[QueuedRequest], has_steps: bool = False
    ) -> tuple[list[QueuedRequest], list[Failure]]:
        """Returns the requests to repeat and those that fail, in the order of the batch; cancelled ones are in neither.

        With `has_steps`, a request ran on other models, which may have applied it to the state of its sequence and must
        not see it twice.
        """
        again: list[QueuedRequest] = []
        failures: list[Failure] = []
        for request in batch:
            if request.cancelled:
                continue
            if has_steps and request.correlation_id:
                error = unavailable(LOST_STEPS.format(shown_id(request.correlation_id)), Reason.SEQUENCE_LOST)
                failures.append(Failure(request, error))
                continue
            request.attempts += 1
            if request.attempts >= _ALONE_FROM_ATTEMPT:
                request.run_alone()
            if self.is_exhausted(request):
                failures.append(Failure(request, too_many_losses(request)))
            else:
                again.append(request)
        self._repeated += again
        return again, failures

    def take_repeated(self) -> list[QueuedRequest]:
        """Returns the requests that are repeated since the last call."""
        repeated, self._repeated = self._repeated, []
        return repeated


def stream_lost(request: QueuedRequest) -> Failure:
    """Returns the end of a request whose responses can not be repeated.

    A cancelled one gets an error too: a caller may still listen to how its stream ends.
    """
    return Failure(request, cancelled_error() if request.cancelled else unavailable(LOST_STREAM))


def too_many_losses(request: QueuedRequest) -> WeirError:
    """Returns the error of a request that was lost too often."""
    return internal(TOO_MANY_LOSSES.format(request.attempts), Reason.KILLED_WORKERS)


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
