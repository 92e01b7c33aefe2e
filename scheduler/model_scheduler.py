"""`ModelScheduler`: the requests of one model, routed to its versions; the state machine that the owner of a queue runs.

Promises, for any order of events:
- an accepted request ends exactly once: in the first part of `Ended` (a worker responded, or its caller left) or in the
  second (with an error);
- a request that its gateway sends twice (after the broker came back) runs once if the first copy is still here;
- requests for a version without any instance wait for `unavailable_timeout_us` and then fail with UNAVAILABLE, or fail
  at once if the version was unloaded; those for the latest version run on the latest one that is not being unloaded.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import count, groupby
from operator import attrgetter

from weir.scheduler.batching.admission import OwnersInFlight
from weir.scheduler.batching.batch import Batch
from weir.scheduler.batching.custom_strategy import GuardedStrategy
from weir.scheduler.batching.dynamic_former import former_for
from weir.scheduler.batching.outcome import NOTHING_ENDED, TIMEOUT_EXPIRED, Ended, Failure, concatenate
from weir.scheduler.batching.request import DuplicateDelivery, QueuedRequest
from weir.scheduler.batching.retry import RetryPolicy, UnservedTimeout
from weir.scheduler.batching.version import UNAVAILABLE_TIMEOUT_US, Version
from weir.scheduler.batching.version_queue import VersionQueue
from weir.scheduler.sequences.scheduler import (
    NO_FORMER_SEQUENCES,
    FormerSequence,
    FormerSequences,
    FoundSequence,
    SequenceScheduler,
    SoughtSequence,
)
from weir.scheduler.sequences.sequence import CorrelationId
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.config.parameters import partitions_of
from weir.schemas.core.errors import Reason, WeirError, not_found, overloaded, unavailable
from weir.schemas.core.requests import SEQUENCE_START, Lane
from weir.schemas.wire.batches import BatchCompletion, BatchEnded, BatchReleased, StartedSequence
from weir.schemas.wire.calls import ANYBODY

LATEST = -1

MAX_SUMMARY_BYTES = 64 << 10
"""The text of a queue in the log of a policy that raised."""

MAX_LISTED = 100
"""Requests of one batch, or of the queue of one version, in that text; and workers of a version."""

_LANES = {lane.value: lane.name.lower() for lane in Lane}

InstanceNumbers = Mapping[int, Sequence[int]]


class ModelScheduler:
    """Schedules one model. Times are microseconds of one monotonic clock.

    `max_queue_wait_us` limits the wait of live requests to models without a limit of their own (0: none).
    """

    def __init__(
        self,
        name: str,
        next_batch_id: Callable[[], int] | None = None,
        unavailable_timeout_us: int = UNAVAILABLE_TIMEOUT_US,
        max_queue_wait_us: int = 0,
    ) -> None:
        self.name = name
        self._former = NO_FORMER_SEQUENCES
        self.may_seek = False  # a former owner may have had sequences: call `take_sought`
        self._max_queue_wait_us = max_queue_wait_us  # default for models without a limit; 0: none
        self._unavailable_timeout_us = unavailable_timeout_us
        self._next_batch_id = next_batch_id or count(1).__next__
        self.retry = RetryPolicy()
        self._configs: dict[int, tuple[ModelConfig, GuardedStrategy | None]] = {}
        self._versions: dict[int, Version] = {}
        # Schedulers replaced after a change between stateful and stateless: they finish the batches they have sent.
        self._replaced: list[Version] = []
        self._all: list[Version] = []  # current and replaced ones
        self._latest: Version | None = None  # the version for requests for the latest one
        self._unrouted: dict[QueuedRequest, None] = {}  # waiting requests without a version to run them
        self._unserved = UnservedTimeout(unavailable_timeout_us)  # of unrouted requests
        self._retiring: frozenset[int] = frozenset()
        self._is_given_up = False
        self.has_withdrawn = False  # a version or the model is withdrawn: call `expire`
        # Accepted requests that have not ended, by gateway and key.
        self._live: dict[str, dict[int, QueuedRequest]] = defaultdict(dict)
        self.owners = OwnersInFlight()  # of these

    def __len__(self) -> int:
        """Requests that were accepted and have not ended."""
        return sum(map(len, self._live.values()))

    @property
    def waiting(self) -> int:
        """Requests not yet sent to a worker."""
        return len(self._unrouted) + sum([version.waiting for version in self._all])

    def outside(self, batches: Container[object]) -> list[QueuedRequest]:
        """Returns the requests that are in none of `batches`. It is safe even after another method has raised."""
        return [request for of in self._live.values() for request in of.values() if request.place not in batches]

    def summary(self, sent: Container[object]) -> str:
        """Returns the queue as text, for the log: its versions, what waits for each, and the batches with their requests.

        `sent` are the ids of the batches that were sent and have not ended. It may be called after another method, an
        event, has raised: then the requests are those before the event, but for those that it brought or had ended already.
        A batch that is not in `sent` was formed by the event, or was to be ended by it. The numbers of a version, and the
        instances of batches, are as the event left them.
        """
        by_place: dict[object, list[QueuedRequest]] = defaultdict(list)
        for of in self._live.values():
            for request in of.values():
                by_place[request.place].append(request)
        batches = {place: by_place.pop(place) for place in list(by_place) if isinstance(place, int)}
        parts = [f"{len(self)} requests", *map(_described, self._all)]
        for place, requests in by_place.items():
            version = f"version {place.version}" if isinstance(place, Version) else "any version"
            parts.append(f"waiting for {version}: {_listed(requests)}")
        for batch_id, requests in batches.items():
            batch = next(filter(None, (version.batch(batch_id) for version in self._all)), None)
            where = f" on {batch.instance.worker}/{batch.instance.number}" if batch else ""
            doubt = "" if batch_id in sent else ", which the event formed or ended"
            parts.append(f"batch {batch_id}{where}{doubt}: {_listed(requests)}")
        return "; ".join(parts).encode()[:MAX_SUMMARY_BYTES].decode(errors="ignore")

    def versions(self) -> Mapping[int, Version]:
        """Returns the schedulers of all known versions, served or not."""
        return self._versions

    def waiting_in(self, lane: int) -> int:
        """Returns how many requests of a lane wait; promoted events count as live."""
        return sum(r.lane == lane for r in self._unrouted) + sum(version.waiting_in(lane) for version in self._all)

    def oldest_us(self, lane: int = 0) -> int | None:
        """Returns the arrival of the longest waiting request of a lane, or None."""
        # The requests of a gateway are in the order of arrival.
        live = self._live.values()
        first = (next((r for r in of.values() if r.lane == lane and not r.is_sent), None) for of in live)
        return min((request.enqueued_us for request in first if request is not None), default=None)

    def workers(self) -> set[str]:
        """Returns the workers that hold an instance of any version."""
        return {worker for version in self._versions.values() for worker in version.workers()}

    def configure(self, version: int, config: ModelConfig, strategy: GuardedStrategy | None = None) -> None:
        """Sets the configuration of a version, and its own `strategy`. Requests that wait for it stay."""
        current = self._versions.get(version)
        if current is not None and current.is_stateful != (config.sequence_batching is not None):
            self._replace(current)
            current = None
        if current is None:
            current = self._versions[version] = self._version_of(version, config, strategy)
            self._all = [*self._versions.values(), *self._replaced]
            self._latest = self._best_latest()
        elif (config, strategy) != self._configs[version]:
            current.use_config(config, strategy)
        self._configs[version] = config, strategy
        current.is_decoupled = config.is_decoupled
        self.owners.partitions = partitions_of(config)
        own_us = config.max_queue_wait_us
        current.limit_wait(self._max_queue_wait_us if own_us is None else own_us)

    def take_over(self, now_us: int, sequences: Iterable[StartedSequence], is_complete: bool) -> None:
        """Sets the sequences that the former owner of the queue had. Call before `configure`.

        `is_complete`: there were no others.
        """
        by_version: dict[int, dict[CorrelationId, FormerSequence]] = {}
        for started in sequences:
            former = FormerSequence(started.age_us, started.number, started.gateway, started.key)
            by_version.setdefault(started.version, {})[started.id] = former
        self._former = FormerSequences(by_version, now_us, is_complete)
        self.may_seek = True

    def take_sought(self) -> list[SoughtSequence]:
        """Returns sequences of the former owner to look up, for each of which `sequence_found` is to be called.

        There are some only if `may_seek`, after `enqueue` or `sequence_found`.
        """
        return [sought for version in self._stateful().values() for sought in version.take_sought()]

    def _stateful(self) -> dict[int, SequenceScheduler]:
        return {number: of for number, of in self._versions.items() if isinstance(of, SequenceScheduler)}

    def sequence_found(self, version: int, id: CorrelationId, found: FoundSequence | None) -> Ended:
        """Has a sequence continue from what is stored of it (None: nothing)."""
        current = self._stateful().get(version)
        return NOTHING_ENDED if current is None else self._forget(((), current.sequence_found(id, found)))

    def _replace(self, replaced: Version) -> None:
        """Retires a version's scheduler for one of the other kind; `_route` moves the waiting requests there."""
        replaced.is_withdrawn = True
        self._replaced.append(replaced)
        for request in replaced.drain():
            request.place = None
            self._unrouted[request] = None

    def _version_of(self, version: int, config: ModelConfig, strategy: GuardedStrategy | None) -> Version:
        common = self._next_batch_id, self._unavailable_timeout_us, self.retry
        if config.sequence_batching is not None:
            return SequenceScheduler(version, config, *common, self._former)
        return VersionQueue(version, former_for(config, strategy), *common)

    def set_lifecycle(self, retiring: frozenset[int], given_up: frozenset[int], is_withdrawn: bool) -> None:
        """Sets which versions are being unloaded, which are withdrawn, and whether the model is. Call before
        `set_instances`.
        """
        self._retiring = retiring
        self._is_given_up = is_withdrawn
        for number, version in self._versions.items():
            version.is_withdrawn = is_withdrawn or number in given_up
        self.has_withdrawn = is_withdrawn or bool(given_up)

    def needs(self, worker: str, version: int) -> bool:
        """Whether `worker` must keep the version for requests that run there or wait for it."""
        return any(current.version == version and current.needs(worker) for current in self._all)

    def set_instances(self, worker: str, instances: Mapping[int, int], numbers: InstanceNumbers | None = None) -> Ended:
        """Sets how many instances of each version `worker` holds, with these `numbers` (default: from 0 on).

        It holds none of other versions. Batches that it runs are finished.
        """
        failures: list[Failure] = []
        for number, current in self._versions.items():
            failures += current.set_instances(
                worker, instances.get(number, 0), numbers.get(number) if numbers else None
            )
        for replaced in self._replaced:
            failures += replaced.set_instances(worker, 0)
            failures += replaced.end_sequences()
        routed = self._route()
        return concatenate([self._forget(((), failures)), routed]) if failures else routed

    def worker_lost(self, now_us: int, worker: str) -> Ended:
        """Removes a lost worker: its batches are repeated elsewhere."""
        lost = [self._forget(version.worker_lost(now_us, worker)) for version in self._all]
        return concatenate([*lost, self._route()])

    def enqueue(self, requests: list[QueuedRequest]) -> list[Failure]:
        """Accepts requests of one gateway; returns those that are rejected, which the caller answers with an error."""
        if self._latest is not None and self._latest.is_stateful and len(self._versions) > 1:
            if len(requests) > 1:  # one by one, because an earlier one may start the sequence of a later one
                return [failure for request in requests for failure in self.enqueue([request])]
            self._choose_version(requests[0])
        new, beyond = self._accepted(requests)
        refused: list[Failure] = []
        for wanted, of_version in _by_version(new):
            try:
                home = self._latest if wanted == LATEST else self._version_for(wanted)
            except WeirError as error:
                refused += [Failure(request, error) for request in of_version]
                continue
            for request in of_version:
                request.place = home
            if home is None:
                self._unrouted.update(dict.fromkeys(of_version))
            else:
                refused += home.enqueue(of_version)
        if refused:
            self._forget(((), refused))
        return beyond + refused

    def _accepted(self, requests: list[QueuedRequest]) -> tuple[list[QueuedRequest], list[Failure]]:
        """Returns the requests that are not here yet, and those that exceed the limits of their owners."""
        live = self._live[requests[0].gateway]
        new: list[QueuedRequest] = []
        is_owned = False
        for request in requests:
            twin = live.get(request.key)
            if twin is not None:
                twin.frame = DuplicateDelivery(twin.frame, request.frame)
                continue
            live[request.key] = request
            new.append(request)
            if request.caller is not ANYBODY:
                is_owned = True
        if not is_owned:
            return new, []
        admitted: list[QueuedRequest] = []
        beyond: list[Failure] = []
        for request in new:
            error = self.owners.admit(request) if request.caller is not ANYBODY else None
            if error is None:
                admitted.append(request)
            else:
                del live[request.key]
                beyond.append(Failure(request, error))
        return admitted, beyond

    def _choose_version(self, request: QueuedRequest) -> None:
        """Has a request for the latest version go to the one that runs its sequence, else to the one that lost it."""
        id = request.correlation_id
        if not id or request.version != LATEST or request.sequence_flags & SEQUENCE_START:
            return
        stateful = self._stateful()
        running = [number for number, version in stateful.items() if version.has_sequence(id)]
        request.version = next(iter(running or [number for number, of in stateful.items() if of.has_lost(id)]), LATEST)

    def cancel(self, gateway: str, keys: Iterable[int]) -> Ended:
        """Cancels requests whose callers have left: waiting ones end, running ones are left to finish.

        `cancelled_in_flight` returns the running ones.
        """
        live = self._live.get(gateway, {})
        cancelled: list[QueuedRequest] = []
        for key in keys:
            request = live.get(key)
            if request is not None and not request.cancelled:
                request.cancelled = True
                cancelled.append(request)
        if not cancelled:
            return NOTHING_ENDED
        # Grouped by their place, because searching all queues would take longer the more requests wait.
        over, running = list[QueuedRequest](), list[QueuedRequest]()
        failures: list[Failure] = []
        waiting: dict[Version, list[QueuedRequest]] = defaultdict(list)
        for request in cancelled:
            place = request.place
            if isinstance(place, Version):
                waiting[place].append(request)
            elif place is None:
                del self._unrouted[request]
                over.append(request)
            else:
                running.append(request)
        for version, requests in waiting.items():
            failures += version.drop_cancelled(requests)
            over += requests
        for version in self._all if running else ():
            failures += version.cancel_running(running)
        return self._forget((over, failures))

    def cancelled_in_flight(self, gateway: str, keys: Iterable[int]) -> list[tuple[Batch, list[int]]]:
        """Returns the batches that run cancelled requests among these, with their keys, to notify the workers."""
        keys_by_batch: dict[int, list[int]] = defaultdict(list)
        live = self._live.get(gateway, {})
        for key in sorted(set(keys)):
            request = live.get(key)
            if request is not None and request.cancelled and isinstance(request.place, int):
                keys_by_batch[request.place].append(key)
        batches = ((version.batch(id), of) for version in self._all for id, of in keys_by_batch.items())
        return [(batch, of) for batch, of in batches if batch is not None]

    def direct_request_us(self, batch: Batch) -> int:
        """The expected time of a request, if the worker of `batch` may run more of its own for this version; else 0."""
        version = self._versions.get(batch.version)
        return 0 if version is None or batch.version in self._retiring else version.direct_request_us(batch)

    def record_direct_runs(self, now_us: int, version: int, requests: int, busy_us: int) -> None:
        """Counts requests for a version that a worker has run without this scheduler."""
        current = self._versions.get(version)
        if current is not None:
            current.record_direct_runs(now_us, requests, busy_us)

    def overdue(self, now_us: int) -> Ended:
        """Fails the requests whose timeout or deadline has passed. Call before each `dispatch`."""
        failures: list[Failure] = []
        for version in self._all:
            if version.is_timed:
                failures += version.overdue(now_us)
        return self._forget(((), failures)) if failures else NOTHING_ENDED

    def dispatch(self, now_us: int) -> tuple[list[Batch], int | None]:
        """Returns the batches to send now, and when to call again if nothing else happens (None: never)."""
        batches: list[Batch] = []
        wake_at_us: int | None = None
        for version in self._versions.values():
            of_version, version_us = version.dispatch(now_us)
            batches += of_version
            if version_us is not None and (wake_at_us is None or version_us < wake_at_us):
                wake_at_us = version_us
        return batches, wake_at_us

    def complete(self, now_us: int, completion: BatchCompletion) -> Ended:
        """Handles the end of a batch, or an instance that is free while its batch goes on."""
        for version in self._all:
            ended = version.complete(now_us, completion)
            if ended is not None:
                self._forget(ended)
                if type(completion) is BatchEnded and not completion.rescheduled:
                    return ended
                if isinstance(completion, BatchReleased):
                    return ended
                return concatenate([ended, self._route()]) if version.is_stranded else ended
        return NOTHING_ENDED

    def batches_missing(self, now_us: int, batch_ids: Iterable[int]) -> Ended:
        """Repeats the requests of batches that no worker knows of any more."""
        batch_ids = list(batch_ids)
        lost = [self._forget(version.batches_lost(now_us, batch_ids)) for version in self._all]
        return concatenate([*lost, self._route()] if any(version.is_stranded for version in self._all) else lost)

    def in_flight_on(self, worker: str) -> list[int]:
        """Returns the ids of the batches in flight on `worker`."""
        return [batch_id for version in self._all for batch_id in version.in_flight_on(worker)]

    def expire(self, now_us: int) -> Ended:
        """Fails requests for versions that were unserved for too long. Called about once a second."""
        failures: list[Failure] = []
        if not self._served():
            lost_us = now_us if self._is_given_up else self._unserved.lost_us(now_us)
            lost = [request for request in self._unrouted if request.enqueued_us <= lost_us]
            failures += [Failure(request, self._refusal(request, self._is_given_up)) for request in lost]
            self._unrouted = {request: None for request in self._unrouted if request.enqueued_us > lost_us}
        late = [request for request in self._unrouted if 0 < request.terms.deadline_us <= now_us]
        failures += [Failure(request, overloaded(TIMEOUT_EXPIRED, reason=Reason.TIMED_OUT)) for request in late]
        for request in late:
            del self._unrouted[request]
        for version in self._all:
            failures += version.overdue(now_us)
            expired = version.expire(now_us)
            failures += [Failure(request, self._refusal(request, version.is_withdrawn)) for request in expired]
        if self._replaced:
            self._replaced = [replaced for replaced in self._replaced if not replaced.is_idle]
            self._all = [*self._versions.values(), *self._replaced]
        for gateway in [gateway for gateway, live in self._live.items() if not live]:
            del self._live[gateway]
        return self._forget(((), failures))

    def _refusal(self, request: QueuedRequest, is_withdrawn: bool) -> WeirError:
        nothing = f"Request for unknown model: '{self.name}' has no available versions"
        if not is_withdrawn:
            return overloaded(nothing, reason=Reason.NOT_READY)
        if request.version == LATEST:
            return not_found(nothing, Reason.NOT_READY)
        return unavailable(
            f"Request for unknown model: '{self.name}' version {request.version} is not at ready state",
            Reason.NOT_READY,
        )

    def _served(self) -> list[Version]:
        return [version for version in self._versions.values() if version.instance_count]

    def _version_for(self, wanted: int) -> Version | None:
        """Returns the version's scheduler; None while no version is served.

        Raises NOT_FOUND for an unknown version while others are served.
        """
        version = self._latest if wanted == LATEST else self._versions.get(wanted)
        if version is None and self._served():
            raise not_found(
                f"Request for unknown model: '{self.name}' version {wanted} is not found", Reason.UNKNOWN_MODEL
            )
        return version

    def _best_latest(self) -> Version | None:
        """Returns the version for requests for the latest one: one that is served, else one that may be served again."""
        served = self._served()
        staying = [version for version in served if version.version not in self._retiring]
        hoped_for = [version for version in self._versions.values() if not version.is_withdrawn]
        return max(staying or served or hoped_for or self._versions.values(), key=_version, default=None)

    def _route(self) -> Ended:
        """Moves waiting requests to where they will run, after instances have joined or left."""
        self._latest = self._best_latest()
        is_served = bool(self._served())
        waiting: list[QueuedRequest] = []
        if is_served:
            self._unserved.renew()
            waiting, self._unrouted = list(self._unrouted), {}
        for version in self._all:
            # Requests for a version that may be served again wait on while no other version is served.
            if not version.instance_count and (is_served or version.is_withdrawn):
                waiting += version.drain()
        if not waiting:
            return NOTHING_ENDED
        failures: list[Failure] = []
        at: dict[Version, list[QueuedRequest]] = defaultdict(list)
        for request in waiting:
            try:
                home = self._version_for(request.version)
            except WeirError as error:
                failures.append(Failure(request, error))
            else:
                assert home is not None  # noqa: S101 - some version is known
                request.place = home
                at[home].append(request)
        for home, requests in at.items():
            failures += home.put_back(requests)
        return self._forget(((), failures))

    def _forget(self, ended: Ended) -> Ended:
        """Removes requests that have ended."""
        completed, failures = ended
        live = self._live
        for request in completed:
            del live[request.gateway][request.key]
        for request, _ in failures:
            del live[request.gateway][request.key]
        if self.owners:
            self.owners.ended(completed)
            self.owners.ended(request for request, _ in failures)
        return ended


_version = attrgetter("version")


def _by_version(requests: list[QueuedRequest]) -> list[tuple[int, list[QueuedRequest]]]:
    """Groups consecutive requests by the version they want."""
    wanted = {request.version for request in requests}
    if len(wanted) == 1:  # the common case
        return [(wanted.pop(), requests)]
    return [(version, list(together)) for version, together in groupby(requests, _version)]


def _described(version: Version) -> str:
    state = f"{version.open_sequences} open sequences"
    if isinstance(version, VersionQueue):
        state = f"{sum(len(lane.forming.requests) for lane in version.lanes)} requests in the forming batch"
    workers = " ".join(sorted(version.workers())[:MAX_LISTED]) or "no worker"
    instances = f"{version.instance_count} instances on {workers}, {version.busy_instances} busy"
    return f"version {version.version}: {instances}, {state}"


def _listed(requests: Sequence[QueuedRequest]) -> str:
    """Returns how many requests of each lane these are, and their keys by gateway."""
    lanes = Counter(request.lane for request in requests)
    keys: dict[str, list[str]] = defaultdict(list)
    for request in requests[:MAX_LISTED]:
        keys[request.gateway].append(f"{request.key} (cancelled)" if request.cancelled else str(request.key))
    counts = ", ".join(f"{number} {_LANES.get(lane, lane)}" for lane, number in lanes.items())
    more = f" and {len(requests) - MAX_LISTED} more" if len(requests) > MAX_LISTED else ""
    listed = ", ".join(" ".join((gateway, *of)) for gateway, of in keys.items())
    return f"{counts}: {listed}{more}"
