"""`Simulation`: the life of a model as a list of events that can be replayed and shrunk.

    Simulation().replay([("arrive", …), ("lose", "a"), …])

It simulates gateways, workers and the clock around one `ModelScheduler`, carries out its decisions, and checks the
invariants after every event. Events select by number among what exists at that time, so every list of them is a
possible history. `LaneLife` and `WindowLife` hold the invariants of lanes and of windows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from tests.support.scheduling.completions import (
    Outcome,
    completion,
)
from tests.support.scheduling.queue_oracle import QueueOracle
from tests.support.scheduling.requests import CONFIGS, LATEST, MAX_BATCH_SIZE, CountingFrame, part
from weir.scheduler.batching.batch import Batch
from weir.scheduler.batching.dispatch import BATCH, LIVE
from weir.scheduler.batching.lane_budget import LONGEST_QUIET_US, RECENT_US
from weir.scheduler.batching.outcome import TIMEOUT_EXPIRED, Ended, Failure
from weir.scheduler.batching.queue_rules import DEFAULT_MAX_QUEUE_SIZE
from weir.scheduler.batching.request import QueuedRequest, requests_of
from weir.scheduler.batching.retry import LOST_STREAM, MAX_ATTEMPTS
from weir.scheduler.batching.version_queue import VersionQueue
from weir.scheduler.model_scheduler import ModelScheduler
from weir.scheduler.placement.instances import MAX_BACKOFF_US
from weir.scheduler.placement.window import MAX_WINDOW, SLOTS, runs_singly
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode
from weir.schemas.wire.batches import BatchEnded, BatchNotRun, BatchReleased, NotRunReason
from weir.schemas.wire.calls import Caller, RequestEnvelope


class LaneLife:
    """The invariants of lanes. `riders_sent` counts requests sent in batches of earlier lanes."""

    now_us: int
    wake_at_us: int | None
    rules: QueueOracle
    configs: dict[int, ModelConfig]

    def __init__(self) -> None:
        super().__init__()
        self.riders_sent = 0
        self.live_us: dict[int, int] = {}  # when a live request came last, by the version that took it in

    def _came(self, requests: list[QueuedRequest]) -> None:
        for request in requests:
            version = _version_of(request)
            if version is not None and request.lane == LIVE:
                self.live_us[version] = self.now_us

    def _check_lanes(self, batch: Batch, waiting: list[QueuedRequest]) -> None:
        """The batch is of one lane, with backfill of later ones; `waiting` are the requests that it leaves."""
        lanes = [request.lane for request in batch.requests]
        assert lanes == sorted(lanes)
        assert not [r for r in waiting if r.lane < lanes[0]], "runs while one of an earlier lane waits"
        assert batch.is_batch_lane == (lanes[0] == BATCH)
        self.riders_sent += sum(lane != lanes[0] for lane in lanes)
        if lanes[0] != lanes[-1]:
            assert self.configs[batch.version].dynamic_batching is not None
        for lane in {*lanes}:
            sent = [request for request in batch.requests if request.lane == lane]
            left = [request for request in waiting if request.lane == lane]
            for owner in {request.caller.owner for request in sent}:
                turns = [self._turn(r, batch.version) for r in sent if r.caller.owner == owner]
                assert turns == sorted(turns)
                assert not [r for r in left if r.caller.owner == owner and self._turn(r, batch.version) < turns[-1]], (
                    "one that should have run before waits"
                )
            # Owners take turns among requests of one level that are all delayed or all not.
            last = max(self._turn(r, batch.version)[:2] for r in sent)
            assert not [r for r in left if self._turn(r, batch.version)[:2] < last], "one of a higher level waits"

    def _check_idle(self, version: int, waiting: list[QueuedRequest]) -> None:
        """An instance is idle: the first lane with waiting requests waits no longer than its delay, or for silence."""
        lane = min(request.lane for request in waiting)
        if any(request.lane < lane and _version_of(request) == version for request in self._waiting()):
            return  # those for the latest version and those for this one by its number wait together
        first_us = min(request.enqueued_us for request in waiting if request.lane == lane)
        assert self.wake_at_us is not None, "an instance is idle and a request waits"
        live_us = self.live_us.get(version, 0)
        dynamic = self.configs[version].dynamic_batching
        delay_us = dynamic.max_queue_delay_microseconds if dynamic is not None else 0
        if lane == BATCH and live_us and self.now_us - live_us < RECENT_US:
            due_us = max(live_us + LONGEST_QUIET_US, first_us + delay_us)
        else:
            assert delay_us, "an instance is idle and a request waits"
            due_us = first_us + delay_us
        assert self.now_us < due_us
        assert self.wake_at_us <= due_us

    def _turn(self, request: QueuedRequest, version: int) -> tuple[int, ...]:
        return self.rules.turn(request, version, self.now_us)


def _version_of(request: QueuedRequest) -> int | None:
    """The version at which it waits; None for those that wait for a version."""
    version: int | None = getattr(request.place, "version", None)
    return version


class WindowLife:
    """The invariants of windows, and of instances that return batches. `deepest` is the most that an instance held."""

    model: ModelScheduler
    now_us: int
    wake_at_us: int | None
    batches: dict[int, Batch]
    configs: dict[int, ModelConfig]
    instances: dict[str, dict[int, int]]

    def __init__(self) -> None:
        self.deepest = 0
        # Instances (worker, version, number) that returned a batch, and until when they may be left alone for it.
        self.closed: dict[tuple[str, int, int], int] = {}

    def not_run(self, number: int, reason: int) -> None:
        """A worker returns a batch that has not started: no loss is counted, and whoever still waits for it runs later."""
        if not self.batches:
            return
        batch = self.batches.pop(list(self.batches)[number % len(self.batches)])
        attempts = {request: request.attempts for request in batch.requests}
        instance = batch.instance
        if reason != NotRunReason.SLOW:
            self.closed[instance.worker, batch.version, instance.number] = self.now_us + MAX_BACKOFF_US
        ended = self.model.complete(self.now_us, BatchNotRun(batch.id, NotRunReason(reason)))
        assert all(request.attempts == attempts[request] for request in batch.requests), "a loss is counted"
        assert {request for request in batch.requests if request.cancelled} <= set(ended[0])
        self._ended(ended, batch.id)

    def _check_window(self, batch: Batch) -> None:
        """The instance has a place in its window, no other open one holds fewer, and no request waits behind one that
        may kill workers.
        """
        holding = [b for b in self._holding() if b.version == batch.version]
        at = [b for b in holding if b.instance is batch.instance]
        self.deepest = max(self.deepest, len(at) + 1)
        config = self.configs[batch.version]
        assert len(at) < (MAX_WINDOW if runs_singly(config) else SLOTS)
        assert not any(b.requests[0].runs_alone for b in at)
        assert not (at and batch.requests[0].runs_alone)
        held = Counter((b.instance.worker, b.instance.number) for b in holding)
        fewest = [
            held[worker, number]
            for worker, counts in self.instances.items()
            for number in range(counts.get(batch.version, 0))
            if self.closed.get((worker, batch.version, number), 0) <= self.now_us
            and not any(
                b.requests[0].runs_alone for b in holding if (b.instance.worker, b.instance.number) == (worker, number)
            )
        ]
        assert not fewest or len(at) <= min(fewest), "another instance holds fewer"

    def _ended(self, ended: Ended, batch_id: int = 0) -> None:
        raise NotImplementedError

    def _holding(self) -> list[Batch]:
        raise NotImplementedError


Event = tuple[Any, ...]

UNAVAILABLE_TIMEOUT_US = 1_000


class Simulation(LaneLife, WindowLife):
    """Gateways and workers around one model; `events_played` counts the events."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ModelScheduler("model", unavailable_timeout_us=UNAVAILABLE_TIMEOUT_US)
        self.now_us = 1_000_000
        self.events_played = 0
        self.frames: list[CountingFrame] = []
        self.live: dict[tuple[str, int], QueuedRequest] = {}
        self.batches: dict[int, Batch] = {}
        self.released: set[int] = set()  # of those batches, the ones that hold no slot any more
        self.lost_streams: set[QueuedRequest] = set()  # answers of which may have been seen
        self.abandoned: list[int] = []  # ids of lost batches, whose completion may still arrive
        self.configs: dict[int, ModelConfig] = {}
        self.rules = QueueOracle(self.configs)
        self.instances: dict[str, dict[int, int]] = defaultdict(dict)
        self.given_up: frozenset[int] = frozenset()
        self.is_withdrawn = False
        self.timed_out = 0
        self.refused_beyond = 0  # the limits of owners
        self.wake_at_us: int | None = None
        self._next_key = 1

    def replay(self, events: list[Event]) -> None:
        """Plays the events, then lets workers serve until nothing is left, and checks that every request has ended."""
        for name, *arguments in events:
            getattr(self, name)(*arguments)
            self._pump()
            self._check()
            self.events_played += 1
        self._run_out()

    # Events

    def configure(self, version: int, number: int | ModelConfig) -> None:
        chosen = number if isinstance(number, ModelConfig) else CONFIGS[number]
        self.configs[version] = chosen
        self.model.configure(version, chosen)
        # As each change of a record does: nothing is asked in between.
        self._look_ahead((), ())
        self._ended(self.model.set_instances("a", dict(self.instances["a"])))

    def serve(self, worker: str, version: int, count: int) -> None:
        if version in self.configs:
            self.instances[worker][version] = count
            self._look_ahead((), ())
            self._ended(self.model.set_instances(worker, dict(self.instances[worker])))

    def unload(self, retiring: list[int], gone: list[int]) -> None:
        """Some versions are being unloaded; others, which no worker has, are withdrawn."""
        self._look_ahead(
            [version for version in retiring if self._served(version)],
            [version for version in gone if version in self.configs and not self._served(version)],
        )
        self._ended(self.model.set_instances("a", dict(self.instances["a"])))
        self.expire()

    def _look_ahead(self, retiring: Iterable[int], gone: Iterable[int]) -> None:
        self.given_up = frozenset(gone)
        self.is_withdrawn = bool(self.given_up) and self.given_up >= self.configs.keys()
        self.model.set_lifecycle(frozenset(retiring), self.given_up, self.is_withdrawn)

    def arrive(self, gateway: str, requests: list[tuple[Any, ...]]) -> None:
        """Each is (version, batch size, shape key[, priority, timeout in us, ms until its deadline[, lane]])."""
        self._enqueue(gateway, self._rows(requests))

    def _rows(self, requests: list[tuple[Any, ...]]) -> list[RequestEnvelope]:
        rows = []
        for version, batch_size, shape_key, *terms in requests:
            priority, timeout_us, left_ms, *lane = terms or (0, 0, 0)
            deadline_ms = self.now_us // 1000 + left_ms if left_ms else 0
            facts = version, batch_size, shape_key, b"body", priority, timeout_us, deadline_ms, *lane
            rows.append(part(self._next_key, *facts))
            self._next_key += 1
        return rows

    def arrive_for(self, gateway: str, caller: Caller, requests: list[tuple[Any, ...]]) -> None:
        """As `arrive`, of one caller."""
        rows = self._rows(requests)
        self._enqueue(gateway, [row._replace(**caller._asdict()) for row in rows])

    def send_again(self, number: int) -> None:
        """A gateway sends a request it still waits for once more, as after the broker came back."""
        if self.live:
            (gateway, key), known = list(self.live.items())[number % len(self.live)]
            self._enqueue(gateway, [part(key, known.version, known.batch_size, "", lane=known.lane)])

    def advance(self, time_us: int) -> None:
        self.now_us += time_us

    def wake(self) -> None:
        """The timer that was asked for goes off."""
        if self.wake_at_us is not None:
            self.now_us = max(self.now_us, self.wake_at_us)

    def complete(self, number: int, outcome: int, busy_us: int) -> None:
        if self.batches:
            batch_id = list(self.batches)[number % len(self.batches)]
            batch = self.batches.pop(batch_id)
            answered, failures = self.model.complete(self.now_us, completion(batch_id, outcome, busy_us))
            if outcome == Outcome.ANSWERED:
                assert list(answered) == batch.requests
                assert not failures
            self._ended((answered, failures), batch_id)

    def release(self, number: int) -> None:
        """An instance is free while its batch continues; a repeated message has no effect."""
        if self.batches:
            batch_id = list(self.batches)[number % len(self.batches)]
            self.released.add(batch_id)
            assert self.model.complete(self.now_us, BatchReleased(batch_id, 5)) == ((), ())

    def complete_abandoned(self, number: int) -> None:
        """The end of a batch arrives late: it was taken for lost, and its requests went elsewhere."""
        if self.abandoned:
            batch_id = self.abandoned[number % len(self.abandoned)]
            assert self.model.complete(self.now_us, BatchEnded(batch_id, 5)) == ((), ())

    def miss(self, numbers: list[int]) -> None:
        ids = {list(self.batches)[number % len(self.batches)] for number in numbers if self.batches}
        self._abandon(ids)
        self._ended(self.model.batches_missing(self.now_us, sorted(ids)))

    def lose(self, worker: str) -> None:
        ids = self.model.in_flight_on(worker)
        assert sorted(ids) == [batch.id for batch in self.batches.values() if batch.instance.worker == worker]
        self._abandon(ids)
        self.instances[worker].clear()
        self._ended(self.model.worker_lost(self.now_us, worker))
        assert worker not in self.model.workers()

    def cancel(self, numbers: list[int]) -> None:
        chosen = [list(self.live)[number % len(self.live)] for number in numbers if self.live]
        by_gateway: dict[str, list[int]] = defaultdict(list)
        for gateway, key in chosen:
            by_gateway[gateway].append(key)
        running = self._running()
        for gateway, keys in by_gateway.items():
            waiting = {self.live[gateway, key] for key in keys} - running
            answered, failures = self.model.cancel(gateway, [*keys, 999_999_999])
            assert set(answered) == waiting
            self._ended((answered, failures))
            told = self.model.cancelled_in_flight(gateway, keys)
            assert {(batch.id, key) for batch, of_batch in told for key in of_batch} == {
                (batch.id, request.key)
                for batch in self.batches.values()
                for request in batch.requests
                if request.gateway == gateway and request.key in keys
            }

    def expire(self) -> None:
        self._ended(self.model.expire(self.now_us))

    # Consequences

    def _enqueue(self, gateway: str, rows: list[Any]) -> None:
        frame = CountingFrame(len(rows))
        self.frames.append(frame)
        requests = requests_of(gateway, rows, self.now_us, frame)
        new = [request for request in requests if (gateway, request.key) not in self.live]
        sizes = self._sizes()
        in_flight = self._in_flight()
        for request in new:
            self.live[gateway, request.key] = request
        failures = self.model.enqueue(requests)
        self._check_limits(in_flight, new, failures)
        beyond = {failure.request for failure in failures if failure.error.code is ErrorCode.RESOURCE_EXHAUSTED}
        new = [request for request in new if request not in beyond]
        self._came(new)
        self._check_sizes(sizes, new, {failure.request for failure in failures} - beyond)
        self._ended(((), failures))

    def _sizes(self) -> Counter[tuple[int, int, int]]:
        """How many wait at each version, lane and level."""
        return Counter(map(self._queue_of, (r for r in self._waiting() if r.place is not None)))

    def _queue_of(self, request: QueuedRequest) -> tuple[int, int, int]:
        version = request.place.version
        return version, request.lane, self.rules.level(request, version)

    def _abandon(self, ids: Any) -> None:
        for batch_id in ids:
            batch = self.batches.pop(batch_id)
            self.abandoned.append(batch_id)
            if self.configs[batch.version].is_decoupled:
                self.lost_streams.update(batch.requests)

    def _ended(self, ended: Ended, batch_id: int = 0) -> None:
        answered, failures = ended
        for request in answered:
            assert batch_id or request.cancelled
            self._end(request)
        for failure in failures:
            self._check_failure(failure)
            self._end(failure.request)

    def _end(self, request: QueuedRequest) -> None:
        assert self.live.pop((request.gateway, request.key)) is request, "ended twice, or never taken in"
        request.frame.requests_ended(1)

    def _pump(self) -> None:
        self._ended(self.model.overdue(self.now_us))
        batches, self.wake_at_us = self.model.dispatch(self.now_us)
        for batch in batches:
            self._check_batch(batch)
            self.batches[batch.id] = batch

    def _running(self) -> set[QueuedRequest]:
        return {request for batch in self.batches.values() for request in batch.requests}

    def _holding(self) -> list[Batch]:
        """Batches that hold a slot of their instance."""
        return [batch for batch in self.batches.values() if batch.id not in self.released]

    def _waiting(self) -> list[QueuedRequest]:
        running = self._running()
        return [request for request in self.live.values() if request not in running]

    # Invariants

    def _check_batch(self, batch: Batch) -> None:
        requests, instance = batch.requests, batch.instance
        assert batch.id not in self.batches
        assert requests
        assert not self._running() & set(requests), "sent twice"
        assert all(self.live[r.gateway, r.key] is r and not r.cancelled for r in requests)
        assert all(request.version in (LATEST, batch.version) for request in requests)
        if self.configs[batch.version].dynamic_batching is not None:
            assert len({request.shape_key for request in requests}) == 1
            assert len(requests) == 1 or sum(request.batch_size for request in requests) <= MAX_BATCH_SIZE
        assert all(request.attempts < 2 for request in requests) or len(requests) == 1
        assert instance.number < self.instances[instance.worker].get(batch.version, 0)
        if not self.rules.may_stage(batch.version):
            assert not any(b.instance is instance for b in self._holding())
        self._check_window(batch)
        assert not self.lost_streams & set(requests), "done again, though responses may have been seen"
        sent = set(requests)
        self._check_lanes(batch, [r for r in self._waiting() if r not in sent and _home(r) == batch.version])

    def _check_sizes(
        self, sizes: Counter[tuple[int, int, int]], new: list[QueuedRequest], refused: set[QueuedRequest]
    ) -> None:
        """Each that came was refused exactly if its level of its lane was full, those of its own frame included.

        Where there are owners, as many were refused as had no room, which need not be those that came.
        """
        if any(request.caller.owner for request in (*new, *refused)):
            homed = [request for request in new if isinstance(request.place, VersionQueue)]
            came = Counter(map(self._queue_of, homed))
            gone = Counter(self._queue_of(r) for r in refused if isinstance(r.place, VersionQueue))
            for (version, lane, level), number in came.items():
                one = next(r for r in homed if self._queue_of(r) == (version, lane, level))
                most = self.rules.policy(one, version).max_queue_size or DEFAULT_MAX_QUEUE_SIZE
                room = max(0, most - sizes[version, lane, level])
                assert gone[version, lane, level] == max(0, number - room)
            assert gone.keys() <= came.keys()
            return
        for request in new:
            if not isinstance(request.place, VersionQueue):
                continue
            version = request.place.version
            at = self._queue_of(request)
            most = self.rules.policy(request, version).max_queue_size or DEFAULT_MAX_QUEUE_SIZE
            assert (request in refused) == (sizes[at] >= most)
            sizes[at] += request not in refused

    def _in_flight(self) -> Counter[str]:
        return Counter(request.caller.owner for request in self.live.values() if request.caller.owner)

    def _check_limits(self, in_flight: Counter[str], new: list[QueuedRequest], failures: list[Failure]) -> None:
        """Each that came was refused exactly if as many of its owner were in flight as it may have."""
        beyond = {failure.request for failure in failures if failure.error.code is ErrorCode.RESOURCE_EXHAUSTED}
        for request in new:
            owner, limit, _ = request.caller
            assert (request in beyond) == (0 < limit <= in_flight[owner])
            in_flight[owner] += request not in beyond
        self.refused_beyond += len(beyond)

    def _check_timeouts(self) -> None:
        """No overdue request waits, and the next timeout is in the wake time."""
        for request in self._waiting():
            if _home(request) is not None:
                ends_us = self.rules.ends_us(request, request.place.version)
                assert ends_us is None or self.now_us < ends_us
                assert ends_us is None or (self.wake_at_us is not None and self.wake_at_us <= ends_us)

    def _check_failure(self, failure: Failure) -> None:
        request, error = failure
        if error.code is ErrorCode.INTERNAL:
            assert request.attempts == MAX_ATTEMPTS
        elif error.code is ErrorCode.NOT_FOUND and request.version == LATEST:
            assert self.is_withdrawn
            assert not self._served()
        elif error.code is ErrorCode.NOT_FOUND:
            assert request.version not in (LATEST, *self.configs)
            assert self._served()
        elif error.code is ErrorCode.RESOURCE_EXHAUSTED:
            assert (error.retry_after_s, error.backoff_us) == (1, 0)
            assert f"'{request.caller.owner}' {request.caller.in_flight_limit} " in error.message
        elif error.message == LOST_STREAM:
            assert error.code is ErrorCode.UNAVAILABLE
            assert request in self.lost_streams, "a repeatable request must be repeated"
        elif error.code is ErrorCode.CANCELLED:
            assert request.cancelled
            assert request in self.lost_streams, "only a stream tells its caller that it was cancelled"
        elif error.message == "Exceeds maximum queue size":
            assert self._sizes()[self._queue_of(request)] > 0
        elif error.message == TIMEOUT_EXPIRED:
            self.timed_out += 1
            assert error.code is ErrorCode.UNAVAILABLE
            deadline_us = request.terms.deadline_us
            ends_us = deadline_us if request.place is None else self.rules.ends_us(request, request.place.version)
            assert ends_us, "it had neither a timeout nor a deadline"
            assert self.now_us >= ends_us
        else:
            assert error.code is ErrorCode.UNAVAILABLE
            assert not self._served(None if request.version == LATEST else request.version)

    def _served(self, version: int | None = None) -> bool:
        return any(
            count
            for counts in self.instances.values()
            for number, count in counts.items()
            if version is None or number == version
        )

    def _check(self) -> None:
        assert len(self.model) == len(self.live)
        counted = {row.owner: row.in_flight for row in self.model.owners.largest() if row.in_flight}
        assert counted == self._in_flight()
        waiting = self._waiting()
        assert self.model.waiting == len(waiting)
        assert self.wake_at_us is None or self.wake_at_us > self.now_us, "asks to be woken for ever"
        self._check_timeouts()
        self._check_homes(waiting)
        for version in self.configs:
            self._check_delay(version, [request for request in waiting if request.version == version])
        if len(self.configs) == 1:
            self._check_delay(next(iter(self.configs)), [r for r in waiting if r.version == LATEST])

    def _check_homes(self, waiting: list[QueuedRequest]) -> None:
        """Requests for the latest version wait for one that serves, or else for one that may serve again."""
        hoped_for = self.configs.keys() - self.given_up
        for request in waiting:
            home = _home(request)
            if request.version == LATEST and home is not None:
                assert self._served(home) or not self._served(), "waits for a version while another serves"
                assert self._served(home) or home in hoped_for or not hoped_for, "waits for nothing"

    def _check_delay(self, version: int, waiting: list[QueuedRequest]) -> None:
        """While an instance is idle, no request waits longer than the delay, whose end is in the wake time."""
        held = {(b.instance.worker, b.instance.number) for b in self._holding() if b.version == version}
        idle = [
            (worker, number)
            for worker, counts in self.instances.items()
            for number in range(counts.get(version, 0))
            if (worker, number) not in held and self.closed.get((worker, version, number), 0) <= self.now_us
        ]
        if idle and waiting:
            self._check_idle(version, waiting)
        elif waiting and any(
            number < self.instances[worker].get(version, 0) and (worker, number) not in held
            for worker, at, number in self.closed
            if at == version
        ):
            assert self.wake_at_us is not None, "an instance stays closed"

    def _run_out(self) -> None:
        """One version gets a worker that stays; whatever it can run it runs, and everything ends."""
        if self.configs:
            self.serve("last", min(self.configs), 1)
        limit = 10 * (len(self.live) + len(self.batches) + 2)
        for _ in range(limit):
            self._pump()
            self._check()
            if not self.live:
                break
            if self.batches:
                self.complete(0, Outcome.ANSWERED, 5)
            elif self.wake_at_us is not None:
                self.wake()
            else:
                # Only requests that no worker can run are left: their timeout expires.
                self.expire()
                self.advance(UNAVAILABLE_TIMEOUT_US)
        assert not self.live, "requests that never end"
        assert not self.batches
        assert len(self.model) == self.model.waiting == 0
        assert not self.model.owners
        assert [frame.ended for frame in self.frames] == [frame.size for frame in self.frames]


def _home(request: QueuedRequest) -> int | None:
    """The version in whose queue it waits; None where it runs, or is about to."""
    return request.place.version if isinstance(request.place, VersionQueue) else None
