"""`ModelScheduler`: one model's requests, routed to its versions; the state machine that an owner of a model runs.

Promises, whatever order events come in:
- a request taken in ends exactly once: in `Ended.answered` (a worker answered, or its caller has gone) or in
  `Ended.failures`;
- a request sent twice by its gateway (after the broker came back) is run once if the first copy is still here;
- requests for a version without any instance wait for `unavailable_timeout_us`, then fail with UNAVAILABLE, or at once
  where it was unloaded; those for the latest version run on the latest one that is there to stay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import count
from operator import attrgetter

from scheduler.batch import Batch
from scheduler.batch_strategy import GuardedStrategy
from scheduler.batcher_choice import batcher_for
from scheduler.patience import Patience
from scheduler.queued_request import BothFrames, QueuedRequest
from scheduler.sequence_scheduler import SequenceScheduler
from scheduler.version_scheduler import (
    NOTHING_ENDED,
    TIMEOUT_EXPIRED,
    UNAVAILABLE_TIMEOUT_US,
    Ended,
    Failure,
    VersionScheduler,
    joined,
)
from schemas.errors import Reason, WeirError, not_found, overloaded, unavailable
from schemas.messages import BatchOutcome
from schemas.model_config import ModelConfig

LATEST = -1

Numbers = Mapping[int, Sequence[int]]  # of a worker's instances, by version
AnyVersion = VersionScheduler | SequenceScheduler  # as the configuration of the version says


class ModelScheduler:
    """See the module. Times are microseconds of one monotonic clock. `is_heir`: as of `SequenceScheduler`."""

    def __init__(
        self,
        name: str,
        next_batch_id: Callable[[], int] | None = None,
        unavailable_timeout_us: int = UNAVAILABLE_TIMEOUT_US,
        is_heir: int = 0,
        max_queue_wait_us: int = 0,
    ) -> None:
        self.name = name
        self._is_heir = bool(is_heir)
        self._max_queue_wait_us = max_queue_wait_us  # of live requests to models that don't say; 0: none
        self._unavailable_timeout_us = unavailable_timeout_us
        self._next_batch_id = next_batch_id or count(1).__next__
        self._configs: dict[int, ModelConfig] = {}
        self._strategies: dict[int, GuardedStrategy | None] = {}
        self._versions: dict[int, AnyVersion] = {}
        # Those whose versions got sequences, or have none any more, by another configuration: they end what they have sent.
        self._former: list[AnyVersion] = []
        self._all: list[AnyVersion] = []  # of both
        self._latest: AnyVersion | None = None  # where requests for the latest version wait
        self._unrouted: dict[QueuedRequest, None] = {}  # came before any version that could run them
        self._patience = Patience(unavailable_timeout_us)  # of those
        self._retiring: frozenset[int] = frozenset()
        self._is_given_up = False
        self.has_given_up = False  # a version, or the model: `expire` fails what waits for it at once
        # Requests this scheduler is responsible for, by gateway and key.
        self._live: dict[str, dict[int, QueuedRequest]] = defaultdict(dict)

    def __len__(self) -> int:
        """Requests this scheduler is responsible for."""
        return sum(map(len, self._live.values()))

    @property
    def waiting(self) -> int:
        """Requests not yet sent to a worker."""
        return len(self._unrouted) + sum([version.waiting for version in self._all])

    def not_in(self, batches: Container[object]) -> list[QueuedRequest]:
        """The requests that are in none of these batches. It reads what holds even after another method has raised."""
        return [request for of in self._live.values() for request in of.values() if request.place not in batches]

    def versions(self) -> Mapping[int, AnyVersion]:
        """The versions it knows of, served or not."""
        return self._versions

    def waiting_in(self, lane: int) -> int:
        """Those of one lane; events that count as live by now are among the live ones."""
        return sum(r.lane == lane for r in self._unrouted) + sum(version.waiting_in(lane) for version in self._all)

    def oldest_us(self, lane: int = 0) -> int | None:
        """When the request of a lane came that waits for longest, not yet sent to a worker; None if none waits."""
        # A gateway's requests are held in the order they came.
        live = self._live.values()
        first = (next((r for r in of.values() if r.lane == lane and not r.is_sent), None) for of in live)
        return min((request.enqueued_us for request in first if request is not None), default=None)

    def workers(self) -> set[str]:
        """Workers that hold an instance of any version."""
        return {worker for version in self._versions.values() for worker in version.workers()}

    def configure(self, version: int, config: ModelConfig, strategy: GuardedStrategy | None = None) -> None:
        """A version exists, with this configuration and its own `strategy`. What waits for it already is kept."""
        known = self._versions.get(version)
        if known is not None and isinstance(known, SequenceScheduler) != (config.sequence_batching is not None):
            self._replace(known)
            known = None
        if known is None:
            self._versions[version] = self._scheduler_for(version, config, strategy)
            self._all = [*self._versions.values(), *self._former]
            self._latest = self._best_latest()
        elif isinstance(known, VersionScheduler):
            if config != self._configs[version] or strategy is not self._strategies[version]:
                known.use(batcher_for(config, strategy))
        elif config != self._configs[version]:
            known.use_config(config)
        self._configs[version] = config
        self._strategies[version] = strategy
        configured = self._versions[version]
        configured.is_decoupled = config.is_decoupled
        if isinstance(configured, VersionScheduler):
            configured.limit_wait(config.max_queue_wait_us, self._max_queue_wait_us)

    def _replace(self, former: AnyVersion) -> None:
        """The version gets a scheduler of the other kind, to which `_route` takes what waits."""
        former.is_given_up = True
        self._former.append(former)
        for request in former.drain():
            request.place = None
            self._unrouted[request] = None

    def _scheduler_for(self, version: int, config: ModelConfig, strategy: GuardedStrategy | None) -> AnyVersion:
        draw, patience_us = self._next_batch_id, self._unavailable_timeout_us
        if config.sequence_batching is not None:
            return SequenceScheduler(version, config, draw, patience_us, self._is_heir)
        return VersionScheduler(version, batcher_for(config, strategy), draw, unavailable_timeout_us=patience_us)

    def look_ahead(self, retiring: frozenset[int], given_up: frozenset[int], is_given_up: bool) -> None:
        """Which versions are being unloaded, which are gone for good, and whether the model is; before `set_instances`."""
        self._retiring = retiring
        self._is_given_up = is_given_up
        for number, version in self._versions.items():
            version.is_given_up = is_given_up or number in given_up
        self.has_given_up = is_given_up or bool(given_up)

    def needs(self, worker: str, version: int) -> bool:
        """Whether `worker` must keep the version for what runs there or waits for it."""
        return any(known.version == version and known.needs(worker) for known in self._all)

    def set_instances(self, worker: str, instances: Mapping[int, int], numbers: Numbers | None = None) -> Ended:
        """`worker` holds so many instances of each version, of these `numbers` (else from 0 on), and none of others.

        What it runs, it finishes.
        """
        failures: list[Failure] = []
        for number, known in self._versions.items():
            failures += known.set_instances(worker, instances.get(number, 0), numbers.get(number) if numbers else None)
        for former in self._former:
            failures += former.set_instances(worker, 0)
        routed = self._route()
        return joined([self._forget(((), failures)), routed]) if failures else routed

    def worker_lost(self, now_us: int, worker: str) -> Ended:
        """`worker` is gone: what it had is done again elsewhere."""
        lost = [self._forget(version.worker_lost(now_us, worker)) for version in self._all]
        return joined([*lost, self._route()])

    def enqueue(self, requests: list[QueuedRequest]) -> list[Failure]:
        """Requests have come from one gateway; returns those that are refused: they are over, the caller answers them."""
        live = self._live[requests[0].gateway]
        refused: list[Failure] = []
        new: list[QueuedRequest] = []
        wanted = requests[0].version
        home = self._home(wanted)
        place = None if isinstance(home, WeirError) else home
        for request in requests:
            twin = live.get(request.key)
            if twin is not None:
                twin.frame = BothFrames(twin.frame, request.frame)
                continue
            if request.version != wanted:
                refused += self._enqueue_at(home, new)
                wanted, new = request.version, []
                home = self._home(wanted)
                place = None if isinstance(home, WeirError) else home
            live[request.key] = request
            request.place = place
            new.append(request)
        refused += self._enqueue_at(home, new)
        for failure in refused:
            del live[failure.request.key]
        return refused

    def _home(self, wanted: int) -> AnyVersion | WeirError | None:
        """Where requests for this version wait, or why they are refused; None while nobody serves any version."""
        if wanted == LATEST:
            return self._latest
        try:
            return self._version_for(wanted)
        except WeirError as error:
            return error

    def _enqueue_at(self, home: AnyVersion | WeirError | None, requests: list[QueuedRequest]) -> list[Failure]:
        if isinstance(home, WeirError):
            return [Failure(request, home) for request in requests]
        if home is None:
            self._unrouted.update(dict.fromkeys(requests))
            return []
        return home.enqueue(requests) if requests else []

    def cancel(self, gateway: str, keys: Iterable[int]) -> Ended:
        """The callers of these requests have gone: those still waiting are over, those running are left to end.

        `cancelled_in_flight` tells which those are.
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
        # By where each of them is, for looking for them would take the longer the more there are.
        over, running = list[QueuedRequest](), list[QueuedRequest]()
        failures: list[Failure] = []
        waiting: dict[AnyVersion, list[QueuedRequest]] = defaultdict(list)
        for request in cancelled:
            place = request.place
            if isinstance(place, VersionScheduler | SequenceScheduler):
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
            if isinstance(version, SequenceScheduler):
                failures += version.drop_cancelled(running)  # with a request that runs its sequence ends, too
        return self._forget((over, failures))

    def cancelled_in_flight(self, gateway: str, keys: Iterable[int]) -> list[tuple[Batch, list[int]]]:
        """The batches that run requests of these which were cancelled, with their keys: their workers want to know."""
        of_batch: dict[int, list[int]] = defaultdict(list)
        live = self._live.get(gateway, {})
        for key in sorted(set(keys)):
            request = live.get(key)
            if request is not None and request.cancelled and isinstance(request.place, int):
                of_batch[request.place].append(key)
        found: list[tuple[Batch, list[int]]] = []
        for version in self._all:
            batches = ((version.batch(batch_id), of) for batch_id, of in of_batch.items())
            found += [(batch, of) for batch, of in batches if batch is not None]
        return found

    def failures(self) -> dict[int, dict[str, int]]:
        """By version, the requests that failed without an answer of a worker, by Triton's reasons."""
        return {number: dict(version.failures) for number, version in self._versions.items()}

    def overdue(self, now_us: int) -> Ended:
        """Fails what has waited for longer than it may, or than its caller waits. Comes before each `dispatch`."""
        failures: list[Failure] = []
        for version in self._all:
            if version.is_timed:
                failures += version.overdue(now_us)
        return self._forget(((), failures)) if failures else NOTHING_ENDED

    def dispatch(self, now_us: int) -> tuple[list[Batch], int | None]:
        """All batches that are to be sent now, and when to come back if nothing else happens (None: never)."""
        batches: list[Batch] = []
        wake_at_us: int | None = None
        for version in self._versions.values():
            of_version, version_us = version.dispatch(now_us)
            batches += of_version
            if version_us is not None and (wake_at_us is None or version_us < wake_at_us):
                wake_at_us = version_us
        return batches, wake_at_us

    def complete(
        self, now_us: int, batch_id: int, outcome: int, busy_us: int, rescheduled: Sequence[int] = ()
    ) -> Ended:
        """A worker has ended a batch, or its instance is free while the batch goes on."""
        for version in self._all:
            ended = version.complete(now_us, batch_id, outcome, busy_us, rescheduled)
            if ended is not None:
                self._forget(ended)
                if outcome == BatchOutcome.ANSWERED and not rescheduled:  # as nearly all do
                    return ended
                is_stranded = (outcome != BatchOutcome.RELEASED or bool(rescheduled)) and _is_stranded(version)
                return joined([ended, self._route()]) if is_stranded else ended
        return NOTHING_ENDED

    def batches_missing(self, now_us: int, batch_ids: Iterable[int]) -> Ended:
        """These batches are known to nobody any more: they are done again."""
        batch_ids = list(batch_ids)
        lost = [self._forget(version.batches_lost(now_us, batch_ids)) for version in self._all]
        return joined([*lost, self._route()] if any(map(_is_stranded, self._all)) else lost)

    def in_flight_on(self, worker: str) -> list[int]:
        """Ids of the batches that `worker` has been sent and has not ended."""
        return [batch_id for version in self._all for batch_id in version.in_flight_on(worker)]

    def expire(self, now_us: int) -> Ended:
        """Fails what waits for a version that nobody has served for too long. Called about once a second."""
        failures: list[Failure] = []
        if not self._served():
            lost_us = now_us if self._is_given_up else self._patience.lost_us(now_us)
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
            failures += [Failure(request, self._refusal(request, version.is_given_up)) for request in expired]
        if self._former:
            self._former = [former for former in self._former if not former.is_idle]
            self._all = [*self._versions.values(), *self._former]
        for gateway in [gateway for gateway, live in self._live.items() if not live]:
            del self._live[gateway]
        return self._forget(((), failures))

    def _refusal(self, request: QueuedRequest, is_given_up: bool) -> WeirError:
        nothing = f"Request for unknown model: '{self.name}' has no available versions"
        if not is_given_up:
            return overloaded(nothing, reason=Reason.NOT_READY)
        if request.version == LATEST:
            return not_found(nothing, Reason.NOT_READY)
        return unavailable(
            f"Request for unknown model: '{self.name}' version {request.version} is not at ready state",
            Reason.NOT_READY,
        )

    def _served(self) -> list[AnyVersion]:
        return [version for version in self._versions.values() if version.instance_count]

    def _version_for(self, wanted: int) -> AnyVersion | None:
        """The version's scheduler; None while nobody serves any. Raises NOT_FOUND for one that others are served of."""
        version = self._latest if wanted == LATEST else self._versions.get(wanted)
        if version is None and self._served():
            raise not_found(
                f"Request for unknown model: '{self.name}' version {wanted} is not found", Reason.UNKNOWN_MODEL
            )
        return version

    def _best_latest(self) -> AnyVersion | None:
        """The version that runs requests for the latest one, or will: of those that serve, or else may serve again."""
        served = self._served()
        staying = [version for version in served if version.version not in self._retiring]
        hoped_for = [version for version in self._versions.values() if not version.is_given_up]
        return max(staying or served or hoped_for or self._versions.values(), key=_version, default=None)

    def _route(self) -> Ended:
        """Instances have come or gone: requests for the latest version wait where they will run."""
        self._latest = self._best_latest()
        is_served = bool(self._served())
        waiting: list[QueuedRequest] = []
        if is_served:
            self._patience.renew()
            waiting, self._unrouted = list(self._unrouted), {}
        for version in self._all:
            # What waits for a version that may be served again waits on, as long as no other is.
            if not version.instance_count and (is_served or version.is_given_up):
                waiting += version.drain()
        if not waiting:
            return NOTHING_ENDED
        failures: list[Failure] = []
        at: dict[AnyVersion, list[QueuedRequest]] = defaultdict(list)
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
        """These are no longer this scheduler's responsibility."""
        answered, failures = ended
        live = self._live
        for request in answered:
            del live[request.gateway][request.key]
        for request, _ in failures:
            del live[request.gateway][request.key]
        return ended


_version = attrgetter("version")


def _is_stranded(version: AnyVersion) -> bool:  # as when a batch is lost after its last instance has gone
    return version.waiting > 0 and not version.instance_count
