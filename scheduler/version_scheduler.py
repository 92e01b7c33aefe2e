"""`VersionScheduler`: the batches of one model version, from queue to answer.

Joins a batcher (which requests), a placement (on which instance) and a retry policy (what after a loss). A plain state
machine: the caller feeds it events with the time, and carries out the actions it returns. Times are microseconds of
one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import NamedTuple

from scheduler.batcher import Batcher, DefaultBatcher
from scheduler.dynamic_batcher import DynamicBatcher
from scheduler.placement import Instance, Placement
from scheduler.queued_request import QueuedRequest
from scheduler.retry import RetryPolicy
from schemas.errors import WeirError, internal
from schemas.messages import BatchOutcome
from schemas.model_config import ModelConfig

DEFAULT_MAX_QUEUE_SIZE = 10_000
"""Requests that may wait for one model version when its configuration sets no `max_queue_size`."""


class Dispatch(NamedTuple):
    """Send this batch to this instance."""

    instance: Instance
    batch_id: int
    requests: list[QueuedRequest]


class Failure(NamedTuple):
    """Answer this request with this error: it is over."""

    request: QueuedRequest
    error: WeirError


class _InFlight(NamedTuple):
    instance: Instance
    requests: list[QueuedRequest]


class VersionScheduler:
    """See the module. `next_batch_id` numbers batches; ids are unique over all versions that share it."""

    def __init__(
        self, batcher: Batcher, next_batch_id: Callable[[], int] | None = None, retry: RetryPolicy | None = None
    ) -> None:
        self._batcher = batcher
        self._placement = Placement()
        self._retry = retry or RetryPolicy()
        self._next_batch_id = next_batch_id or count(1).__next__
        self._in_flight: dict[int, _InFlight] = {}

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._batcher)

    @property
    def instance_count(self) -> int:
        """Instances of all live workers."""
        return len(self._placement)

    def workers(self) -> set[str]:
        """Workers that hold an instance."""
        return self._placement.workers()

    def in_flight_on(self, worker: str) -> list[int]:
        """Ids of the batches that `worker` has been sent and has not ended."""
        return [batch_id for batch_id, batch in self._in_flight.items() if batch.instance.worker == worker]

    def running(self) -> Iterator[QueuedRequest]:
        """Requests that have been sent to workers and have no answer yet."""
        for batch in self._in_flight.values():
            yield from batch.requests

    def enqueue(self, request: QueuedRequest) -> None:
        """A request has come. Raises WeirError when it is refused."""
        self._batcher.enqueue(request)

    def dispatch(self, now_us: int) -> list[Dispatch]:
        """All batches that are to be sent now."""
        dispatches: list[Dispatch] = []
        placement, batcher = self._placement, self._batcher
        while len(batcher):
            instance = placement.idle()
            full_only = False
            if instance is None:
                instance = placement.stageable()
                if instance is None:
                    break
                full_only = not placement.may_stage_partial(instance, now_us)
            requests = batcher.next_batch(now_us, full_only)
            if not requests:
                break
            batch_id = self._next_batch_id()
            placement.occupy(instance, batch_id, now_us)
            self._in_flight[batch_id] = _InFlight(instance, requests)
            dispatches.append(Dispatch(instance, batch_id, requests))
        return dispatches

    def wake_at_us(self, now_us: int) -> int | None:
        """When `dispatch` may have something to send without any new event; None for never."""
        if not len(self._batcher):
            return None
        if self._placement.idle() is not None:
            return self._batcher.wake_at_us()
        staging = self._placement.wake_at_us()
        if staging is None:
            return None
        delay = self._batcher.wake_at_us()
        # A partial batch is staged when both hold: the instance is nearly free, and the batch has waited enough.
        return staging if delay is None else max(staging, delay)

    def complete(
        self, now_us: int, batch_id: int, outcome: int, busy_us: int
    ) -> tuple[list[QueuedRequest], list[Failure]]:
        """A batch has ended: (requests that have had their answer, requests given up)."""
        batch = self._in_flight.pop(batch_id, None)
        if batch is None:
            return [], []
        self._placement.free(batch.instance, batch_id, now_us, busy_us)
        if outcome == BatchOutcome.ANSWERED:
            return batch.requests, []
        return self._lost([batch])

    def batches_lost(self, now_us: int, batch_ids: Iterable[int]) -> tuple[list[QueuedRequest], list[Failure]]:
        """These batches will never end (their messages were lost): they are done again."""
        lost: list[_InFlight] = []
        for batch_id in batch_ids:
            batch = self._in_flight.pop(batch_id, None)
            if batch is not None:
                self._placement.free(batch.instance, batch_id, now_us, 0)
                lost.append(batch)
        return self._lost(lost)

    def set_instances(self, worker: str, instances: int) -> None:
        """`worker` holds so many instances now."""
        self._placement.set_instances(worker, instances)

    def worker_lost(self, now_us: int, worker: str) -> tuple[list[QueuedRequest], list[Failure]]:
        """`worker` is gone: its batches are done again elsewhere. As `complete`."""
        ended = self.batches_lost(now_us, self.in_flight_on(worker))
        self._placement.set_instances(worker, 0)
        return ended

    def drain(self) -> list[QueuedRequest]:
        """Takes all waiting requests out of the queue."""
        return self._batcher.drain()

    def _lost(self, batches: list[_InFlight]) -> tuple[list[QueuedRequest], list[Failure]]:
        failures: list[Failure] = []
        ended: list[QueuedRequest] = []
        # The batch put back last stands first in the queue: so the oldest is put back last.
        for batch in reversed(batches):
            again, given_up = self._retry.after_loss(batch.requests)
            self._batcher.put_back(again)
            ended += [request for request in batch.requests if request.cancelled]
            failures += [
                Failure(
                    request, internal(f"the model's worker died {request.attempts} times while running this request")
                )
                for request in given_up
            ]
        return ended, failures


def batcher_for(config: ModelConfig) -> Batcher:
    """The batcher that the configuration asks for."""
    dynamic = config.dynamic_batching
    if dynamic is None:
        return DefaultBatcher(DEFAULT_MAX_QUEUE_SIZE)
    policy = dynamic.default_queue_policy
    return DynamicBatcher(
        max_batch_size=config.max_batch_size,
        preferred_batch_sizes=dynamic.preferred_batch_size,
        max_queue_delay_us=dynamic.max_queue_delay_microseconds,
        max_queue_size=(policy.max_queue_size if policy is not None else 0) or DEFAULT_MAX_QUEUE_SIZE,
    )
