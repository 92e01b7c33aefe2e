"""`Version`: what a model's queue asks of each of its versions, and what all of them share.

There are two kinds: `VersionQueue`, and `SequenceScheduler` for models that keep state between requests. A version is a
plain state machine: the caller feeds it events with the time and carries out the actions that it returns. Times are
microseconds of one monotonic clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from weir.scheduler.batching.batch import Batch, BatchesInFlight
from weir.scheduler.batching.cost import Cost
from weir.scheduler.batching.custom_strategy import GuardedStrategy
from weir.scheduler.batching.outcome import Ended, Failure
from weir.scheduler.batching.request import QueuedRequest
from weir.scheduler.batching.retry import RetryPolicy, UnservedTimeout
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.requests import Lane
from weir.schemas.wire.batches import BatchCompletion

UNAVAILABLE_TIMEOUT_US = 30_000_000


class Version(ABC):
    """The requests of one model version: its batches in flight, its counters and its retry policy.

    `next_batch_id` numbers batches, with ids unique over all versions that share it. `unavailable_timeout_us` is how long
    requests wait without any instance. While `is_decoupled`, a batch whose worker is lost is not repeated, because part of
    its responses may have been delivered. `is_withdrawn`: no worker has or will have the version, so nothing should wait
    for it.

    `failures` counts requests that failed here without a response of a worker, by Triton's reasons. Requests rejected
    on arrival are not in it, as in Triton, but in `refused`.
    """

    is_stateful = False
    """Whether the model keeps state between the requests of a sequence."""

    open_sequences = 0
    """Sequences that have started and not ended."""

    def __init__(
        self,
        version: int,
        next_batch_id: Callable[[], int] | None = None,
        unavailable_timeout_us: int = UNAVAILABLE_TIMEOUT_US,
        retry: RetryPolicy | None = None,
    ) -> None:
        self.version = version
        self.is_decoupled = False
        self.is_withdrawn = False
        self.failures = {"REJECTED": 0, "CANCELED": 0}
        self.refused = {"queue": 0, "wait": 0}
        self.cost = Cost()
        self._next_batch_id = next_batch_id or count(1).__next__
        self._retry = retry or RetryPolicy()
        self._unserved = UnservedTimeout(unavailable_timeout_us)
        self._in_flight = BatchesInFlight()

    @abstractmethod
    def use_config(self, config: ModelConfig, strategy: GuardedStrategy | None = None) -> None:
        """Applies a changed configuration, and the model's own batching rule, to what waits and what comes."""

    def limit_wait(self, max_wait_us: int) -> None:  # noqa: B027 - sequences have no such limit
        """Rejects live requests on arrival that would wait longer (0: none)."""

    # What waits and runs

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Requests in the queue."""

    @abstractmethod
    def waiting_in(self, lane: int) -> int:
        """Returns the number of requests of one lane in the queue."""

    @property
    @abstractmethod
    def is_timed(self) -> bool:
        """Whether anything that waits may become overdue."""

    @property
    @abstractmethod
    def instance_count(self) -> int:
        """Instances of all live workers."""

    @property
    @abstractmethod
    def busy_instances(self) -> int:
        """Instances that hold a batch."""

    @abstractmethod
    def workers(self) -> set[str]:
        """Returns the workers that hold an instance."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not (self._in_flight or self.waiting)

    @property
    def is_stranded(self) -> bool:
        """Whether requests wait and there is no instance, e.g. if a batch was lost after the last one had left."""
        return self.waiting > 0 and not self.instance_count

    @property
    def staged(self) -> int:
        """Requests in batches that wait at their instance behind the one it executes."""
        return self._in_flight.staged

    def expected_wait_us(self) -> float:
        """Returns how long a live request that arrives now is expected to wait; 0.0 while it is unknown."""
        return self.waiting_in(Lane.LIVE.value) * self.cost.update() / (self.instance_count or 1)

    def needs(self, worker: str) -> bool:
        """Whether something runs on `worker`, or waits and no other worker could run it."""
        return bool(self._in_flight.on(worker)) or (self.waiting > 0 and self.workers() <= {worker})

    def in_flight_on(self, worker: str) -> list[int]:
        """Returns the ids of the batches in flight on `worker`, oldest first."""
        return self._in_flight.on(worker)

    def batch(self, batch_id: int) -> Batch | None:
        """Returns the batch of this id if it is in flight here, or None."""
        return self._in_flight.get(batch_id)

    # Requests come and leave

    @abstractmethod
    def enqueue(self, requests: list[QueuedRequest]) -> list[Failure]:
        """Adds requests to the queue; returns those that are rejected."""

    @abstractmethod
    def put_back(self, requests: list[QueuedRequest]) -> list[Failure]:
        """Adds requests that waited elsewhere; returns those that are rejected."""

    @abstractmethod
    def drain(self) -> list[QueuedRequest]:
        """Takes all waiting requests out that may run elsewhere."""

    @abstractmethod
    def drop_cancelled(self, requests: list[QueuedRequest]) -> list[Failure]:
        """Removes these waiting requests, which were cancelled; returns other requests that end with them."""

    def cancel_running(self, requests: list[QueuedRequest]) -> list[Failure]:
        """Notes that these running requests were cancelled; returns waiting ones that end with them."""
        return []

    @abstractmethod
    def overdue(self, now_us: int) -> list[Failure]:
        """Fails the waiting requests whose timeout or deadline has passed."""

    def expire(self, now_us: int) -> list[QueuedRequest]:
        """Takes out the requests that waited too long without any instance; all of them if the version is withdrawn."""
        if self.instance_count:
            return []
        if self.is_withdrawn:
            return self.drain()
        lost_us = self._unserved.lost_us(now_us)
        return [] if lost_us < 0 else self._take_arrived_by(lost_us)

    @abstractmethod
    def _take_arrived_by(self, arrived_by_us: int) -> list[QueuedRequest]:
        """Takes out the waiting requests that arrived by `arrived_by_us` and may run elsewhere."""

    # Batches and instances

    @abstractmethod
    def dispatch(self, now_us: int) -> tuple[list[Batch], int | None]:
        """Returns the batches to send now, and when to call again if nothing else happens (None: never).

        Call `overdue` first each time.
        """

    @abstractmethod
    def complete(self, now_us: int, completion: BatchCompletion) -> Ended | None:
        """Handles the end of a batch, or an instance that is free again; returns None if the batch is not of this
        version.
        """

    @abstractmethod
    def batches_lost(self, now_us: int, batch_ids: Iterable[int]) -> Ended:
        """Ends these batches, whose messages were lost."""

    @abstractmethod
    def set_instances(self, worker: str, instances: int, numbers: Sequence[int] | None = None) -> list[Failure]:
        """Sets how many instances `worker` holds, with these `numbers` (default: from 0 on); returns requests that fail."""

    def worker_lost(self, now_us: int, worker: str) -> Ended:
        """Removes a lost worker with its batches and instances."""
        completed, failures = self.batches_lost(now_us, self.in_flight_on(worker))
        self._in_flight.forget(worker)
        return completed, [*failures, *self.set_instances(worker, 0)]

    def end_sequences(self) -> list[Failure]:
        """Ends all started sequences, because no instance will continue them; returns their waiting requests."""
        return []

    # Requests that a worker starts itself

    def direct_request_us(self, batch: Batch) -> int:
        """The expected time of a request, if the worker of `batch` may run more of its own on idle instances; else 0."""
        return 0

    def record_direct_runs(self, now_us: int, requests: int, busy_us: int) -> None:  # noqa: B027 - not of sequences
        """Counts requests that a worker has run without this scheduler."""
