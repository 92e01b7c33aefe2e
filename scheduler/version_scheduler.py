"""`VersionScheduler`: the batches of one model version, from queue to answer.

Joins lanes of batchers (which requests), a placement (on which instance), a dispatch (when) and a retry policy (what after
a loss). A plain state
machine: the caller feeds it events with the time, and carries out the actions it returns. Times are microseconds of
one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count
from typing import NamedTuple

from scheduler.admission import Admission, Pace
from scheduler.batch import Batch, BatchesInFlight
from scheduler.batcher import Batcher
from scheduler.dispatch import Dispatch
from scheduler.lanes import LIVE, LaneQueues
from scheduler.patience import Patience
from scheduler.placement import Instance, Placement
from scheduler.queued_request import QueuedRequest
from scheduler.retry import RetryPolicy
from scheduler.series import SeriesBatcher
from schemas.errors import Reason, WeirError, internal, overloaded, unavailable
from schemas.messages import BatchOutcome
from schemas.requests import SEQUENCE_START

UNAVAILABLE_TIMEOUT_US = 30_000_000

TIMEOUT_EXPIRED = "Request timeout expired"

GIVEN_UP = "the model's worker or process died {} times while running this request"
"""What a request ends with that may be what kills them; so does one that hangs them."""

LOST_STREAM = "the model's worker was lost while it was streaming the response; the request may be sent again"
"""What a request ends with whose responses may have been seen in part: it can't be done again."""

LOST_STEPS = "the ensemble's worker was lost while it ran a request of sequence {}: start the sequence again"
"""What a sequence's request to an ensemble ends with: models of its steps may have counted it already."""


class Failure(NamedTuple):
    """Answer this request with this error: it is over."""

    request: QueuedRequest
    error: WeirError


Ended = tuple[Sequence[QueuedRequest], Sequence[Failure]]
"""Requests that are over: answered (or abandoned by their callers), and to be answered with an error."""

NOTHING_ENDED: Ended = ((), ())


def joined(parts: Iterable[Ended]) -> Ended:
    """All that has ended in one of these."""
    parts = list(parts)
    return (
        [request for answered, _ in parts for request in answered],
        [failure for _, failures in parts for failure in failures],
    )


class VersionScheduler:
    """See the module.

    `next_batch_id` numbers batches; ids are unique over all versions that share it. `unavailable_timeout_us` is how long
    requests wait while no instance is there. While `is_decoupled`, a batch whose worker is lost is not done again, for
    somebody may have seen part of the responses. `failures` counts requests by Triton's reasons that failed here, without
    having been answered by a worker; those refused as they came are not counted, as in Triton, but are in `refused`.
    `served` requests have run, for `busy_us` microseconds of instances.
    """

    def __init__(
        self,
        version: int,
        batcher: Batcher,
        next_batch_id: Callable[[], int] | None = None,
        retry: RetryPolicy | None = None,
        unavailable_timeout_us: int = UNAVAILABLE_TIMEOUT_US,
    ) -> None:
        self.version = version
        self._lanes = LaneQueues(batcher)
        self._placement = Placement()
        self._retry = retry or RetryPolicy()
        self._patience = Patience(unavailable_timeout_us)
        self._in_flight = BatchesInFlight()
        next_batch_id = next_batch_id or count(1).__next__
        self._dispatch = Dispatch(version, self._lanes, self._placement, self._in_flight, next_batch_id)
        self.is_decoupled = False
        self.failures = {"REJECTED": 0, "CANCELED": 0}
        self.refused = {"queue": 0, "wait": 0}
        self.served = 0
        self.busy_us = 0
        self._pace = Pace()
        self._admission: Admission | None = None
        self.is_given_up = False  # nobody has the version, or will have it: nothing need wait for it

    @property
    def is_timed(self) -> bool:
        """Whether something may ever be `overdue`, as things are."""
        return self._lanes.is_timed

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._lanes)

    def waiting_in(self, lane: int) -> int:
        """Requests in the queue of one lane."""
        return self._lanes.waiting_in(lane)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not (self._in_flight or self.waiting)

    @property
    def staged(self) -> int:
        """Requests in batches that wait at their instance, behind the one it executes."""
        executing: set[Instance] = set()
        staged = 0
        for batch in self._in_flight:
            if batch.released:
                continue
            if batch.instance in executing:
                staged += len(batch.requests)
            elif batch.is_series:
                staged += len(batch.requests) - 1
            executing.add(batch.instance)
        return staged

    @property
    def instance_count(self) -> int:
        """Instances of all live workers."""
        return len(self._placement)

    def workers(self) -> set[str]:
        """Workers that hold an instance."""
        return self._placement.workers()

    def in_flight_on(self, worker: str) -> list[int]:
        """Ids of the batches that `worker` has been sent and has not ended, oldest first."""
        return self._in_flight.on(worker)

    def batch(self, batch_id: int) -> Batch | None:
        """The batch of this id, if it is one of this version's and has not ended."""
        return self._in_flight.get(batch_id)

    def needs(self, worker: str) -> bool:
        """Whether something runs on `worker`, or waits and no other worker could run it."""
        return bool(self._in_flight.on(worker)) or (bool(self._lanes) and self._placement.workers() <= {worker})

    def use(self, batcher: Batcher) -> None:
        """From now on batches are formed by `batcher`, which takes over the queue."""
        self._lanes.use(batcher)
        self._dispatch.forget_cost()

    @property
    def busy_instances(self) -> int:
        """Those that hold a batch."""
        return len(self._placement) - self._placement.idle

    def limit_wait(self, own_us: int | None, default_us: int) -> None:
        """Live requests that would wait for longer are refused as they come; 0: none is. `own_us` is the model's own."""
        max_wait_us = default_us if own_us is None else own_us
        if max_wait_us != (0 if self._admission is None else self._admission.max_wait_us):
            self._admission = Admission(max_wait_us) if max_wait_us else None

    def enqueue(self, requests: list[QueuedRequest]) -> list[Failure]:
        """Requests have come; returns those that are refused."""
        if self._admission is not None:
            refused = self._not_admitted(requests, self._admission)
            if refused:
                taken = [request for request in requests if request not in refused]
                failures = self._take_in(taken) if taken else []
                return [*self._refusals(list(refused), "wait", self._shut_us(self._admission)), *failures]
        return self._take_in(requests)

    def _take_in(self, requests: list[QueuedRequest]) -> list[Failure]:
        self._dispatch.come(requests)
        refused = self._lanes.enqueue(requests)
        return self._refusals(refused, "queue") if refused else []

    def _refusals(self, requests: list[QueuedRequest], reason: str, shut_us: int = 0) -> list[Failure]:
        self.refused[reason] += len(requests)
        error = overloaded(wait_us=self._expected_wait_us(), shut_us=shut_us)
        return [Failure(request, error) for request in requests]

    def _expected_wait_us(self) -> float:
        us_each = self._pace.look(self.served, self.busy_us) / (self.instance_count or 1)
        return self._lanes.waiting_in(LIVE) * us_each

    def _shut_us(self, admission: Admission) -> int:
        return admission.shut_us(self._lanes.waiting_in(LIVE), self._pace.us_per_request, self.instance_count)

    def _not_admitted(self, requests: list[QueuedRequest], admission: Admission) -> dict[QueuedRequest, None]:
        """The last ones of the live requests, as many as would have to wait for too long."""
        live = [request for request in requests if request.lane == LIVE]
        if self._lanes.live.has_steps:
            live = [request for request in live if not _goes_on(request)]
        waiting, us_each = self._lanes.waiting_in(LIVE), self._pace.look(self.served, self.busy_us)
        room = admission.room(len(live), waiting, us_each, self.instance_count)
        return dict.fromkeys(live[room:])

    def put_back(self, requests: Iterable[QueuedRequest]) -> list[Failure]:
        """Requests have come that waited elsewhere: they are taken in where they would stand had they waited here."""
        self._lanes.put_back(requests)
        return []

    def drop_cancelled(self, requests: Collection[QueuedRequest]) -> list[Failure]:
        """Takes these requests, which wait here and were cancelled, out of the queue; returns others that end with them."""
        self._lanes.drop_cancelled(requests)
        self.failures["CANCELED"] += len(requests)
        return []

    def drain(self) -> list[QueuedRequest]:
        """Takes all waiting requests out of the queue."""
        return self._lanes.drain()

    def dispatch(self, now_us: int) -> tuple[list[Batch], int | None]:
        """All batches that are to be sent now, and when to come back if nothing else happens (None: never).

        Then there will be more, or something will be `overdue`, which must be asked before this.
        """
        return self._dispatch.batches(now_us)

    def complete(
        self, now_us: int, batch_id: int, outcome: int, busy_us: int, rescheduled: Sequence[int] = ()
    ) -> Ended | None:
        """A batch has ended, or its instance is free; None if it is none of this version's.

        Where not all requests of a series were answered, `rescheduled` are the positions of the others.
        """
        if outcome == BatchOutcome.ANSWERED and not rescheduled:  # as nearly all do
            batch = self._in_flight.pop(batch_id)
            if batch is None:
                return None
            self._release(batch, now_us, busy_us)
            return (batch.still_in if batch.is_series else batch.requests), ()
        is_released = outcome == BatchOutcome.RELEASED
        goes_on = is_released or outcome == BatchOutcome.HANDED_BACK
        batch = self._in_flight.get(batch_id) if goes_on else self._in_flight.pop(batch_id)
        if batch is None:
            return None
        if outcome == BatchOutcome.HANDED_BACK:
            return self._take_back(batch, rescheduled)
        self._release(batch, now_us, busy_us)
        if is_released:
            return NOTHING_ENDED
        if batch.is_series and rescheduled:
            return self._end_in_part(batch, outcome, rescheduled)
        if outcome == BatchOutcome.ANSWERED:
            return batch.still_in, ()
        return self._do_again(batch.still_in, was_begun=outcome != BatchOutcome.NOT_RUN)

    def batches_lost(self, now_us: int, batch_ids: Iterable[int]) -> Ended:
        """These batches will never end (their messages were lost): they are done again, unless decoupled."""
        lost: list[Batch] = []
        for batch_id in batch_ids:
            batch = self._in_flight.pop(batch_id)
            if batch is not None:
                self._release(batch, now_us, 0)
                lost.append(batch)
        requests = [request for batch in lost for request in batch.still_in]
        return self._end_streams(requests) if self.is_decoupled else self._do_again(requests)

    def set_instances(self, worker: str, instances: int, numbers: Sequence[int] | None = None) -> list[Failure]:
        """`worker` holds so many instances now, of these `numbers` (else from 0 on); returns requests that can't be run
        any more.
        """
        self._placement.set_instances(worker, instances, numbers)
        if self.instance_count:
            self._patience.renew()
        return []

    def worker_lost(self, now_us: int, worker: str) -> Ended:
        """`worker` is gone: its batches are done again elsewhere, unless decoupled."""
        ended = self.batches_lost(now_us, self.in_flight_on(worker))
        self._in_flight.forget(worker)
        self._placement.set_instances(worker, 0)
        return ended

    def overdue(self, now_us: int) -> list[Failure]:
        """Takes requests that have waited for longer than they may, or than their callers wait, out of the queue."""
        expired = self._lanes.overdue(now_us)
        if not expired:
            return []
        self.failures["REJECTED"] += len(expired)
        error = overloaded(TIMEOUT_EXPIRED, self._expected_wait_us(), reason=Reason.TIMED_OUT)
        return [Failure(request, error) for request in expired]

    def expire(self, now_us: int) -> list[QueuedRequest]:
        """Takes the requests out of the queue for which there has been no instance for too long; all, if none will be."""
        if self.instance_count:
            return []
        return self.drain() if self.is_given_up else self._lanes.came_by(self._patience.lost_us(now_us))

    def _release(self, batch: Batch, now_us: int, busy_us: int) -> None:
        if not batch.released:
            batch.released = True
            if busy_us > 0:
                self.served += len(batch.requests)
                self.busy_us += busy_us
            self._dispatch.released(batch, now_us, busy_us)

    def _end_in_part(self, batch: Batch, outcome: int, unanswered: Sequence[int]) -> Ended:
        again = frozenset(unanswered)
        still_in = batch.still_in
        lost = [request for at, request in enumerate(batch.requests) if at in again and request.place == batch.id]
        answered = [request for request in still_in if request not in lost]
        was_begun = outcome not in (BatchOutcome.ANSWERED, BatchOutcome.NOT_RUN)
        if lost and isinstance(self._lanes.live, SeriesBatcher):
            self._lanes.doubt()
        cancelled, failures = self._do_again(lost, was_begun)
        return [*answered, *cancelled], failures

    def _take_back(self, batch: Batch, positions: Sequence[int]) -> Ended:
        """These of a series have not begun: another instance may be free for them."""
        if not batch.is_series:
            return NOTHING_ENDED
        back = [batch.requests[at] for at in sorted({*positions}) if 0 <= at < len(batch.requests)]
        back = [request for request in back if request.place == batch.id]
        for request in back:
            request.place = self
        if isinstance(self._lanes.live, SeriesBatcher):
            self._lanes.doubt()
        return self._do_again(back, was_begun=False)

    def _end_streams(self, requests: list[QueuedRequest]) -> Ended:
        cancelled = self._cancelled(requests)
        return cancelled, [Failure(request, unavailable(LOST_STREAM)) for request in requests if not request.cancelled]

    def _do_again(self, requests: list[QueuedRequest], was_begun: bool = True) -> Ended:
        uncertain: list[QueuedRequest] = []
        if self._lanes.live.has_steps and was_begun:
            # A step's model may have taken it into its sequence's state: what it has seen it must not see twice.
            uncertain = [request for request in requests if request.correlation_id and not request.cancelled]
        if was_begun:
            again, given_up = self._retry.after_loss(request for request in requests if request not in uncertain)
        else:
            again, given_up = [request for request in requests if not request.cancelled], []
        for request in again:
            request.place = self
        self._lanes.put_back(again)
        failures = [
            Failure(request, internal(GIVEN_UP.format(request.attempts), Reason.KILLED_WORKERS)) for request in given_up
        ]
        failures += [
            Failure(request, unavailable(LOST_STEPS.format(request.correlation_id), Reason.SEQUENCE_LOST))
            for request in uncertain
        ]
        return self._cancelled(requests), failures

    def _cancelled(self, lost: list[QueuedRequest]) -> list[QueuedRequest]:
        """Those that nobody waits for: no worker has counted them."""
        cancelled = [request for request in lost if request.cancelled]
        self.failures["CANCELED"] += len(cancelled)
        return cancelled


def _goes_on(request: QueuedRequest) -> bool:
    """Whether it is of a sequence that has begun: an ensemble's steps may have seen what was before it."""
    return bool(request.correlation_id) and not request.sequence_flags & SEQUENCE_START
