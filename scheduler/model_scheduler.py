"""`ModelScheduler`: one model's requests, routed to its versions; the state machine that an owner of a model runs.

Promises, whatever order events come in:
- a request taken in ends exactly once: in `ended` (a worker answered, or its caller has gone) or in `failures`;
- a request sent twice by its gateway (after the broker came back) is run once if the first copy is still here;
- with no instance at all, requests wait for `unavailable_timeout_us`, then fail with UNAVAILABLE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import NamedTuple

from scheduler.queued_request import QueuedRequest
from scheduler.version_scheduler import Dispatch, Failure, VersionScheduler, batcher_for
from schemas.errors import WeirError, not_found, unavailable
from schemas.model_config import ModelConfig

UNAVAILABLE_TIMEOUT_US = 30_000_000
LATEST = -1


class Ended(NamedTuple):
    """Requests that are over: answered (or abandoned by their callers), and to be answered with an error."""

    answered: list[QueuedRequest]
    failures: list[Failure]


class ModelScheduler:
    """See the module. Times are microseconds of one monotonic clock."""

    def __init__(
        self,
        name: str,
        next_batch_id: Callable[[], int] | None = None,
        unavailable_timeout_us: int = UNAVAILABLE_TIMEOUT_US,
    ) -> None:
        self.name = name
        self._unavailable_timeout_us = unavailable_timeout_us
        self._versions: dict[int, VersionScheduler] = {}
        self._unrouted: list[QueuedRequest] = []  # came before any version that could run them
        self._live: dict[tuple[str, int], QueuedRequest] = {}
        self._batch_version: dict[int, int] = {}
        self._next_batch_id = next_batch_id or count(1).__next__
        self._unserved_since_us: int | None = 0

    def __len__(self) -> int:
        """Requests this scheduler is responsible for."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        """Requests not yet sent to a worker."""
        return len(self._unrouted) + sum(version.waiting for version in self._versions.values())

    def workers(self) -> set[str]:
        """Workers that hold an instance of any version."""
        return {worker for version in self._versions.values() for worker in version.workers()}

    def configure(self, version: int, config: ModelConfig) -> None:
        """A version exists, with this configuration. The queue of a version that exists already is kept."""
        if version not in self._versions:
            self._versions[version] = VersionScheduler(batcher_for(config), self._next_batch_id)

    def set_instances(self, now_us: int, worker: str, instances: dict[int, int]) -> Ended:
        """`worker` holds so many instances of each version; versions not named, none. What it runs, it finishes."""
        ended = Ended([], [])
        for number, version in self._versions.items():
            version.set_instances(worker, instances.get(number, 0))
        if any(version.instance_count for version in self._versions.values()):
            self._unserved_since_us = None
            self._route(ended)
        elif self._unserved_since_us is None:
            self._unserved_since_us = now_us
        return ended

    def worker_lost(self, now_us: int, worker: str) -> Ended:
        """`worker` is gone: what it had is done again elsewhere."""
        ended = Ended([], [])
        for version in self._versions.values():
            answered, failures = version.worker_lost(now_us, worker)
            self._end(ended, answered, failures)
        rerouted = self.set_instances(now_us, worker, {})
        return Ended(ended.answered + rerouted.answered, ended.failures + rerouted.failures)

    def enqueue(self, request: QueuedRequest) -> WeirError | None:
        """A request has come. An error when it is refused: it is over then, and the caller answers it."""
        identity = request.identity
        twin = self._live.get(identity)
        if twin is not None:
            twin.frames += request.frames
            return None
        try:
            version = self._version_for(request.part.version)
            if version is None:
                self._unrouted.append(request)
            else:
                version.enqueue(request)
        except WeirError as error:
            return error
        self._live[identity] = request
        return None

    def cancel(self, gateway: str, keys: Iterable[int]) -> Ended:
        """The callers of these requests have gone: those still waiting are over, those running are left to end."""
        ended = Ended([], [])
        in_flight = {id(request) for version in self._versions.values() for request in version.running()}
        for key in keys:
            request = self._live.get((gateway, key))
            if request is not None and not request.cancelled:
                request.cancelled = True
                if id(request) not in in_flight:
                    self._end(ended, [request], [])
        return ended

    def dispatch(self, now_us: int) -> list[tuple[int, Dispatch]]:
        """All (version, batch) that are to be sent now."""
        dispatches: list[tuple[int, Dispatch]] = []
        for number, version in self._versions.items():
            if version.waiting:
                for dispatch in version.dispatch(now_us):
                    self._batch_version[dispatch.batch_id] = number
                    dispatches.append((number, dispatch))
        return dispatches

    def wake_at_us(self, now_us: int) -> int | None:
        """When `dispatch` may have something to send without any new event; None for never."""
        times = [
            wake
            for version in self._versions.values()
            if version.waiting and (wake := version.wake_at_us(now_us)) is not None
        ]
        return min(times, default=None)

    def complete(self, now_us: int, batch_id: int, outcome: int, busy_us: int) -> Ended:
        """A worker has ended a batch."""
        ended = Ended([], [])
        number = self._batch_version.pop(batch_id, None)
        if number is not None:
            answered, failures = self._versions[number].complete(now_us, batch_id, outcome, busy_us)
            self._end(ended, answered, failures)
        return ended

    def batches_missing(self, now_us: int, batch_ids: Iterable[int]) -> Ended:
        """These batches are known to nobody any more: they are done again."""
        ended = Ended([], [])
        for batch_id in batch_ids:
            number = self._batch_version.pop(batch_id, None)
            if number is not None:
                answered, failures = self._versions[number].batches_lost(now_us, [batch_id])
                self._end(ended, answered, failures)
        return ended

    def in_flight_on(self, worker: str) -> list[int]:
        """Ids of the batches that `worker` has been sent and has not ended."""
        return [batch_id for version in self._versions.values() for batch_id in version.in_flight_on(worker)]

    def expire(self, now_us: int) -> Ended:
        """Fails what waits for a model that nobody has served for too long. Called about once a second."""
        ended = Ended([], [])
        if self._unserved_since_us is None or not self._live:
            return ended
        limit = now_us - self._unavailable_timeout_us
        if self._unserved_since_us > limit:
            return ended
        waiting = [*self._unrouted, *(r for version in self._versions.values() for r in version.drain())]
        self._unrouted = []
        error = unavailable(f"Request for unknown model: '{self.name}' has no available versions")
        self._end(ended, [], [Failure(request, error) for request in waiting if not request.cancelled])
        return ended

    def _version_for(self, wanted: int) -> VersionScheduler | None:
        """The version's scheduler; None while nobody serves it. Raises NOT_FOUND for one that others are served of."""
        if wanted == LATEST:
            served = [number for number, version in self._versions.items() if version.instance_count]
            # While every worker is gone, requests wait in the queue they would have joined.
            candidates = served or list(self._versions)
            return self._versions[max(candidates)] if candidates else None
        version = self._versions.get(wanted)
        if version is None and self._unserved_since_us is None:
            raise not_found(f"Request for unknown model: '{self.name}' version {wanted} is not found")
        return version

    def _route(self, ended: Ended) -> None:
        unrouted, self._unrouted = self._unrouted, []
        for request in unrouted:
            if request.cancelled:
                continue
            try:
                version = self._version_for(request.part.version)
                if version is None:
                    self._unrouted.append(request)
                else:
                    version.enqueue(request)
            except WeirError as error:
                self._end(ended, [], [Failure(request, error)])

    def _end(self, ended: Ended, answered: list[QueuedRequest], failures: list[Failure]) -> None:
        for request in answered:
            if self._live.pop(request.identity, None) is not None:
                ended.answered.append(request)
        for failure in failures:
            if self._live.pop(failure.request.identity, None) is not None:
                ended.failures.append(failure)
