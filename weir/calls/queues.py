"""The queues of models as a caller sees them: which one takes a request, and which ones reject requests for now.

A request of a sequence goes to the partition that its correlation id selects (`weir.schemas.config.parameters`).
`PartitionSelector` selects one for any other request. `BackpressureCache` holds the queues whose scheduler rejected a
request recently.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from weir.bus.naming.live_queues import LiveQueue
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.config.parameters import partition_of, partitions_of
from weir.schemas.core.errors import WeirError
from weir.schemas.core.requests import SEQUENCE_START, InferRequest, Lane

MAX_BACKOFFS = 1_000
"""Kinds of requests that a caller rejects itself; requests of further kinds are sent, and rejected by their scheduler."""

_LIVE = Lane.LIVE.value


class PartitionedQueue(NamedTuple):
    """The queues of a model with several. A full batch has `batch` requests; with `waits`, the model waits for one."""

    model: str
    partitions: int
    batch: int
    waits: bool

    def __str__(self) -> str:
        return self.model


Destination = str | LiveQueue | PartitionedQueue
"""Where a request is sent. A model with one queue is its name alone, which costs nothing."""


def destination_of(model: str, config: ModelConfig) -> str | PartitionedQueue:
    """Where requests that belong to no sequence are sent. `model` is the model's identity."""
    partitions = partitions_of(config)
    if partitions == 1:
        return model
    batching = config.dynamic_batching
    waits = batching is not None and batching.max_queue_delay_microseconds > 0
    return PartitionedQueue(model, partitions, max(1, config.max_batch_size), waits)


def queue_of_sequence(queues: PartitionedQueue, correlation_id: int | str) -> LiveQueue:
    """Where the requests of a sequence are sent."""
    return LiveQueue(queues.model, partition_of(correlation_id, queues.partitions))


class PartitionSelector:
    """Counts one caller's requests in flight for one model, by partition, and selects the partition of the next ones.

    It selects the partition with the fewest. For a model that waits for full batches it fills a batch in one partition
    before the next. With little load all requests go to one partition, a different one for each caller. No clock, no
    IO.
    """

    __slots__ = ("_in_flight", "_order", "queues")

    def __init__(self, queues: PartitionedQueue, caller: str = "") -> None:
        self.queues = queues
        home = int.from_bytes(hashlib.blake2s(caller.encode(), digest_size=8).digest(), "big")
        self._order = [(home + step) % queues.partitions for step in range(queues.partitions)]
        self._in_flight = [0] * queues.partitions

    def group_size(self, requests: int) -> int:
        """How many of `requests` that are sent at once go to one partition: all, unless they exceed a batch."""
        return max(self.queues.batch, -(-requests // self.queues.partitions))

    def acquire(self, requests: int) -> int:
        """Selects the partition for `requests`, and counts them as in flight there."""
        in_flight, batch = self._in_flight, self.queues.batch if self.queues.waits else 1
        selected = min(self._order, key=lambda partition: in_flight[partition] // batch)
        in_flight[selected] += requests
        return selected

    def release(self, partition: int) -> None:
        """Counts the end of one request of that partition."""
        self._in_flight[partition] -= 1

    def in_flight(self) -> list[int]:
        """The number of requests in flight, by partition."""
        return list(self._in_flight)


class PartitionReservation:
    """One request's count in a `PartitionSelector`, freed when the request ends (`weir.calls.payload_store.Freeable`)."""

    __slots__ = ("_partition", "_selector")

    def __init__(self, selector: PartitionSelector, partition: int) -> None:
        self._selector = selector
        self._partition = partition

    def free(self) -> None:
        """Ends the reservation."""
        self._selector.release(self._partition)


class RequestKind(NamedTuple):
    """Requests that a scheduler accepts or rejects alike: `version` is -1 for the latest, `owner` "" for nobody."""

    queue: str | LiveQueue
    version: int
    priority: int
    owner: str = ""


class _Backoff(NamedTuple):
    until_s: float
    error: WeirError


class BackpressureCache:
    """Queues whose scheduler rejected a request recently. The caller rejects further requests itself until the back-off
    ends.

    A scheduler that rejects a request for its expected wait reports for how long it will reject others of the same
    queue, version, priority and owner (`WeirError.backoff_us`, at most `MAX_BACKOFF_US`). The back-off ends by time alone,
    also when another scheduler takes over the queue meanwhile. Requests of other lanes than the live one, and requests
    that continue a sequence, are never rejected for their wait, so they always pass.

    Callers report their rejections to the scheduler now and then, so that it knows the demand.

    `active` is empty without back-offs, so that a caller need not call `check`. `rejected` counts requests. Times are
    seconds of one monotonic clock, which the caller passes.
    """

    __slots__ = ("_unreported", "active", "rejected")

    def __init__(self) -> None:
        self.active: dict[RequestKind, _Backoff] = {}
        self.rejected = 0
        self._unreported: dict[str | LiveQueue, int] = {}

    def note(self, now_s: float, queue: Destination, request: InferRequest, error: WeirError, owner: str = "") -> None:
        """Starts a back-off if the scheduler of `queue` reported one, and removes it from the error."""
        backoff_us, error.backoff_us = error.backoff_us, 0
        if isinstance(queue, PartitionedQueue) or not backoff_us:
            return
        kind = RequestKind(queue, _version(request.model_version), request.priority, owner)
        until_s = now_s + backoff_us / 1e6
        if kind not in self.active and len(self.active) >= MAX_BACKOFFS:
            self.active = {kind: backoff for kind, backoff in self.active.items() if backoff.until_s > now_s}
            if len(self.active) >= MAX_BACKOFFS:
                return
        self.active[kind] = _Backoff(until_s, error)

    def check(self, now_s: float, queue: Destination, request: InferRequest, owner: str = "") -> None:
        """Raises the WeirError with which the scheduler rejected a request of this kind, during its back-off."""
        if request.lane != _LIVE:
            return
        if (request.correlation_id or request.sequence_flags) and not request.sequence_flags & SEQUENCE_START:
            return
        self.check_live(now_s, queue, request.model_version, request.priority, owner)

    def check_live(self, now_s: float, queue: Destination, version: str, priority: int = 0, owner: str = "") -> None:
        """As `check`, for a live request that continues no sequence and is not parsed yet."""
        queues: list[str | LiveQueue]
        if isinstance(queue, PartitionedQueue):
            queues = [LiveQueue(queue.model, partition) for partition in range(queue.partitions)]
        else:
            queues = [queue]
        backoff = None
        for each in queues:
            backoff = self._find(now_s, RequestKind(each, _version(version), priority, owner))
            if backoff is None:
                return  # the scheduler of this partition may accept it
        if backoff is None:
            return
        self.rejected += 1
        self._unreported[queues[0]] = self._unreported.get(queues[0], 0) + 1
        # A new exception each time: one that is raised again would keep the frames of all of its callers alive.
        raise WeirError(backoff.error.code, backoff.error.message, backoff.error.retry_after_s)

    def take_rejections(self) -> dict[str | LiveQueue, int]:
        """How many requests were rejected since the last call, by queue."""
        unreported, self._unreported = self._unreported, {}
        return unreported

    def _find(self, now_s: float, kind: RequestKind) -> _Backoff | None:
        backoff = self.active.get(kind)
        if backoff is not None and backoff.until_s <= now_s:
            del self.active[kind]
            return None
        return backoff


def _version(text: str) -> int:
    return int(text) if text else -1
