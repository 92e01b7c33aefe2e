"""`VersionScheduler`: the batches of one model version, from the queue to the response.

It joins the lanes (which requests), a placement (on which instance), a dispatch (when), an admission limit and a
retry policy (what after a loss). A plain state machine: the caller feeds it events with the time and carries out the
actions that it returns. Times are microseconds of one monotonic clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count
from math import ceil
from typing import NamedTuple

from weir.scheduler.batching.admission import Admission, RequestCost
from weir.scheduler.batching.batch import Batch, BatchesInFlight
from weir.scheduler.batching.batcher import Batcher
from weir.scheduler.batching.dispatch import Dispatch
from weir.scheduler.batching.lanes import LIVE, LaneQueues
from weir.scheduler.batching.request import QueuedRequest
from weir.scheduler.batching.retry import RetryPolicy, UnservedTimeout
from weir.scheduler.placement.instances import Instance, Placement
from weir.schemas.core.errors import QUEUE_FULL, Reason, WeirError, internal, overloaded, unavailable
from weir.schemas.core.request_limits import cancelled_error
from weir.schemas.core.requests import SEQUENCE_START
from weir.schemas.wire.messages import BatchCompletion, BatchEnded, BatchNotRun, BatchRefused, BatchReleased

UNAVAILABLE_TIMEOUT_US = 30_000_000

MAX_DIRECT_US = 2_000
"""The longest batch of a model whose requests a worker may start without the scheduler: a batch may wait behind one."""

TIMEOUT_EXPIRED = "Request timeout expired"

TOO_MANY_LOSSES = "the model's worker or process died {} times while running this request"
"""The error of a request that was lost too often, which may be what kills or hangs workers."""

LOST_STREAM = "the model's worker was lost while it was streaming the response; the request may be sent again"
"""The error of a request whose worker was lost while some of its responses may have been delivered: no retry."""

LOST_STEPS = "the ensemble's worker was lost while it ran a request of sequence {}: start the sequence again"
"""The error of a sequence's request to an ensemble whose worker was lost: models of its steps may have counted it."""


class Failure(NamedTuple):
    """A request that has ended with an error, which the caller of the policy sends."""

    request: QueuedRequest
    error: WeirError


Ended = tuple[Sequence[QueuedRequest], Sequence[Failure]]
"""Requests that have ended: with a response or a caller that left, and with an error still to be sent."""

NOTHING_ENDED: Ended = ((), ())


def concatenate(parts: Iterable[Ended]) -> Ended:
    """Returns everything that has ended in `parts`."""
    parts = list(parts)
    return (
        [request for completed, _ in parts for request in completed],
        [failure for _, failures in parts for failure in failures],
    )


class VersionState(ABC):
    """What the scheduler of any version has: its batches in flight, its counters and its retry policy.

    `unavailable_timeout_us` is how long requests wait without any instance. While `is_decoupled`, a batch whose worker is
    lost is not repeated, because part of its responses may have been delivered. `is_withdrawn`: no worker has or will
    have the version, so nothing should wait for it.

    `failures` counts requests that failed here without a response of a worker, by Triton's reasons. Requests rejected
    on arrival are not in it, as in Triton, but in `refused`. `served` requests have run and kept instances busy for
    `busy_us`.
    """

    def __init__(self, version: int, unavailable_timeout_us: int, retry: RetryPolicy | None = None) -> None:
        self.version = version
        self.is_decoupled = False
        self.is_withdrawn = False
        self.failures = {"REJECTED": 0, "CANCELED": 0}
        self.refused = {"queue": 0, "wait": 0}
        self.served = 0
        self.busy_us = 0
        self._retry = retry or RetryPolicy()
        self._unserved = UnservedTimeout(unavailable_timeout_us)
        self._in_flight = BatchesInFlight()

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Requests in the queue."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not (self._in_flight or self.waiting)

    def end_sequences(self) -> list[Failure]:
        """Ends all started sequences, because no instance will continue them; returns their waiting requests."""
        return []

    def in_flight_on(self, worker: str) -> list[int]:
        """Returns the ids of the batches in flight on `worker`, oldest first."""
        return self._in_flight.on(worker)

    def batch(self, batch_id: int) -> Batch | None:
        """Returns the batch of this id if it is in flight here, or None."""
        return self._in_flight.get(batch_id)


class VersionScheduler(VersionState):
    """Schedules one version of a model without state between requests.

    `next_batch_id` numbers batches, with ids unique over all versions that share it.
    """

    def __init__(
        self,
        version: int,
        batcher: Batcher,
        next_batch_id: Callable[[], int] | None = None,
        retry: RetryPolicy | None = None,
        unavailable_timeout_us: int = UNAVAILABLE_TIMEOUT_US,
    ) -> None:
        super().__init__(version, unavailable_timeout_us, retry)
        self._lanes = LaneQueues(batcher)
        self._placement = Placement()
        next_batch_id = next_batch_id or count(1).__next__
        self._dispatch = Dispatch(version, self._lanes, self._placement, self._in_flight, next_batch_id)
        self._cost = RequestCost()
        self._admission: Admission | None = None

    @property
    def is_timed(self) -> bool:
        """Whether any waiting request may become overdue."""
        return self._lanes.is_timed

    @property
    def waiting(self) -> int:
        """Requests in the queues of all lanes."""
        return len(self._lanes)

    def waiting_in(self, lane: int) -> int:
        """Returns the number of requests in the queue of one lane."""
        return self._lanes.waiting_in(lane)

    @property
    def forming(self) -> int:
        """Waiting requests that were taken off the queues for the next batches."""
        return self._lanes.forming

    @property
    def staged(self) -> int:
        """Requests in batches that wait at their instance behind the one it executes."""
        executing: set[Instance] = set()
        staged = 0
        for batch in self._in_flight:
            if batch.released:
                continue
            if batch.instance in executing:
                staged += len(batch.requests)
            executing.add(batch.instance)
        return staged

    @property
    def instance_count(self) -> int:
        """Instances of all live workers."""
        return len(self._placement)

    def workers(self) -> set[str]:
        """Returns the workers that hold an instance."""
        return self._placement.workers()

    def needs(self, worker: str) -> bool:
        """Whether something runs on `worker`, or waits and no other worker could run it."""
        return bool(self._in_flight.on(worker)) or (bool(self._lanes) and self._placement.workers() <= {worker})

    def use(self, batcher: Batcher) -> None:
        """Forms batches by the rules of `batcher` from now on, which takes over the queue."""
        self._lanes.use(batcher)
        self._dispatch.forget_cost()

    @property
    def busy_instances(self) -> int:
        """Instances that hold a batch."""
        return len(self._placement) - self._placement.idle

    def direct_request_us(self, batch: Batch) -> int:
        """The expected time of a request, if the worker of `batch` may run more of its own on its idle instances; else 0.

        They are then ahead of requests that wait here, so they must be fast, and no other lane may have requests.
        """
        us_each = self._dispatch.run_time.us_each
        may_run = (
            not self.is_decoupled
            and self._lanes.live.starts_at_once
            and us_each * len(batch.requests) <= MAX_DIRECT_US
            and self._dispatch.is_live_only
        )
        return ceil(us_each) if may_run else 0

    def record_direct_runs(self, now_us: int, requests: int, busy_us: int) -> None:
        """Counts requests that a worker has run without this scheduler."""
        self.served += requests
        self.busy_us += busy_us
        self._dispatch.run_time.record(requests, busy_us)
        self._lanes.live_us = now_us

    def limit_wait(self, own_us: int | None, default_us: int) -> None:
        """Rejects live requests on arrival that would wait longer (0: none). `own_us` is the model's own limit, if set."""
        max_wait_us = default_us if own_us is None else own_us
        if max_wait_us != (0 if self._admission is None else self._admission.max_wait_us):
            self._admission = Admission(max_wait_us) if max_wait_us else None

    def enqueue(self, requests: list[QueuedRequest]) -> list[Failure]:
        """Adds requests to the queue; returns those that are rejected."""
        failures: list[Failure] = []
        if self._admission is not None and (refused := self._not_admitted(requests, self._admission)):
            requests = [request for request in requests if request not in refused]
            failures = self._rejections(list(refused), "wait", self._backoff_us(self._admission))
            if not requests:
                return failures
        self._dispatch.record_arrivals(requests)
        full = self._lanes.enqueue(requests)
        return failures + self._rejections(full, "queue") if full else failures

    def _rejections(self, requests: list[QueuedRequest], reason: str, backoff_us: int = 0) -> list[Failure]:
        self.refused[reason] += len(requests)
        error = overloaded(QUEUE_FULL, self._expected_wait_us(), backoff_us)
        return [Failure(request, error) for request in requests]

    def _expected_wait_us(self) -> float:
        us_each = self._cost.update(self.served, self.busy_us) / (self.instance_count or 1)
        return self._lanes.waiting_in(LIVE) * us_each

    def _backoff_us(self, admission: Admission) -> int:
        return admission.backoff_us(self._lanes.waiting_in(LIVE), self._cost.us_per_request, self.instance_count)

    def _not_admitted(self, requests: list[QueuedRequest], admission: Admission) -> dict[QueuedRequest, None]:
        """Returns the live requests, the last ones, whose expected wait exceeds the limit."""
        live = [request for request in requests if request.lane == LIVE]
        if self._lanes.live.has_steps:
            live = [request for request in live if not _continues_sequence(request)]
        waiting, us_each = self._lanes.waiting_in(LIVE), self._cost.update(self.served, self.busy_us)
        admitted = admission.admitted(len(live), waiting, us_each, self.instance_count)
        return dict.fromkeys(live[admitted:])

    def put_back(self, requests: Iterable[QueuedRequest]) -> list[Failure]:
        """Adds requests that waited elsewhere, at the positions they would have if they had waited here."""
        self._lanes.put_back(requests)
        return []

    def drop_cancelled(self, requests: Collection[QueuedRequest]) -> list[Failure]:
        """Removes these waiting requests, which were cancelled; returns other requests that end with them."""
        self._lanes.drop_cancelled(requests)
        self.failures["CANCELED"] += len(requests)
        return []

    def drain(self) -> list[QueuedRequest]:
        """Takes all waiting requests out of the queue."""
        return self._lanes.drain()

    def dispatch(self, now_us: int) -> tuple[list[Batch], int | None]:
        """Returns the batches to send now, and when to call again if nothing else happens (None: never).

        Call `overdue` first each time.
        """
        return self._dispatch.batches(now_us)

    def complete(self, now_us: int, completion: BatchCompletion) -> Ended | None:
        """Handles the end of a batch, or an instance that is free again; returns None if the batch is not of this
        version.
        """
        if type(completion) is BatchEnded:  # the common case
            batch = self._in_flight.pop(completion.batch_id)
            if batch is None:
                return None
            if not batch.released:
                self._release(batch, now_us, completion.busy_us)
            return batch.requests, ()
        if isinstance(completion, BatchReleased):
            batch = self._in_flight.get(completion.batch_id)
            if batch is None:
                return None
            if not batch.released:
                self._release(batch, now_us, completion.busy_us)
            return NOTHING_ENDED
        batch = self._in_flight.pop(completion.batch_id)
        if batch is None:
            return None
        if isinstance(completion, BatchNotRun):
            self._dispatch.batch_returned(batch, now_us, completion.reason)
            return self._repeat(batch.requests, was_begun=False)
        if not batch.released:
            self._release(batch, now_us, 0 if isinstance(completion, BatchRefused) else completion.busy_us)
        return self._repeat(batch.requests)

    def batches_lost(self, now_us: int, batch_ids: Iterable[int]) -> Ended:
        """Ends these batches, whose messages were lost: their requests are repeated, unless the model is decoupled."""
        lost: list[Batch] = []
        for batch_id in batch_ids:
            batch = self._in_flight.pop(batch_id)
            if batch is not None:
                if not batch.released:
                    self._release(batch, now_us, 0)
                lost.append(batch)
        requests = [request for batch in lost for request in batch.requests]
        return self._end_streams(requests) if self.is_decoupled else self._repeat(requests)

    def set_instances(self, worker: str, instances: int, numbers: Sequence[int] | None = None) -> list[Failure]:
        """Sets how many instances `worker` holds, with these `numbers` (default: from 0 on); returns requests that fail."""
        self._placement.set_instances(worker, instances, numbers)
        if self.instance_count:
            self._unserved.renew()
        return []

    def worker_lost(self, now_us: int, worker: str) -> Ended:
        """Removes a lost worker: its batches are repeated elsewhere, unless the model is decoupled."""
        ended = self.batches_lost(now_us, self.in_flight_on(worker))
        self._in_flight.forget(worker)
        self._placement.set_instances(worker, 0)
        return ended

    def overdue(self, now_us: int) -> list[Failure]:
        """Fails the waiting requests whose timeout or deadline has passed."""
        expired = self._lanes.overdue(now_us)
        if not expired:
            return []
        self.failures["REJECTED"] += len(expired)
        error = overloaded(TIMEOUT_EXPIRED, self._expected_wait_us(), reason=Reason.TIMED_OUT)
        return [Failure(request, error) for request in expired]

    def expire(self, now_us: int) -> list[QueuedRequest]:
        """Takes out the requests that have waited too long without any instance; all of them if the version is
        withdrawn.
        """
        if self.instance_count:
            return []
        return self.drain() if self.is_withdrawn else self._lanes.take_arrived_by(self._unserved.lost_us(now_us))

    def _release(self, batch: Batch, now_us: int, busy_us: int) -> None:
        """Frees the place of a batch at its instance."""
        batch.released = True
        if busy_us > 0:
            self.served += len(batch.requests)
            self.busy_us += busy_us
        self._dispatch.batch_ended(batch, now_us, busy_us)

    def _end_streams(self, requests: list[QueuedRequest]) -> Ended:
        self._cancelled(requests)
        # Cancelled ones get an error too: a caller may still listen to how its stream ends.
        return (), [
            Failure(request, cancelled_error() if request.cancelled else unavailable(LOST_STREAM))
            for request in requests
        ]

    def _repeat(self, requests: list[QueuedRequest], was_begun: bool = True) -> Ended:
        uncertain: list[QueuedRequest] = []
        if self._lanes.live.has_steps and was_begun:
            # A step's model may have applied the request to its sequence's state, and must not see it twice.
            uncertain = [request for request in requests if request.correlation_id and not request.cancelled]
        if was_begun:
            self._dispatch.batch_lost()
            repeated, exhausted = self._retry.after_loss(request for request in requests if request not in uncertain)
        else:
            repeated, exhausted = [request for request in requests if not request.cancelled], []
        for request in repeated:
            request.place = self
        self._lanes.put_back(repeated)
        failures = [
            Failure(request, internal(TOO_MANY_LOSSES.format(request.attempts), Reason.KILLED_WORKERS))
            for request in exhausted
        ]
        failures += [
            Failure(request, unavailable(LOST_STEPS.format(request.correlation_id), Reason.SEQUENCE_LOST))
            for request in uncertain
        ]
        return self._cancelled(requests), failures

    def _cancelled(self, lost: list[QueuedRequest]) -> list[QueuedRequest]:
        """Returns and counts the cancelled requests among `lost`, which no worker has counted."""
        cancelled = [request for request in lost if request.cancelled]
        self.failures["CANCELED"] += len(cancelled)
        return cancelled


def _continues_sequence(request: QueuedRequest) -> bool:
    """Whether the request continues a sequence, whose earlier requests an ensemble's steps may have seen."""
    return bool(request.correlation_id) and not request.sequence_flags & SEQUENCE_START
