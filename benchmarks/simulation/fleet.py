"""`FleetRun`: many simulated workers and schedulers and a virtual clock around Weir's policies.

Each queue has a `ModelScheduler` on the scheduler that owns it, as decided by `benchmarks.simulation.owners`. A
scheduler that dies loses its state: running batches are answered by their workers, and waiting requests are delivered
to the next owner, which also runs batches again that have not completed by then. A worker that dies loses its batches;
its schedulers notice within a quarter of a second.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from benchmarks.simulation.owners import TICK_US, Move, Owners, owners_of
from benchmarks.simulation.traffic import Fleet, FleetScenario
from benchmarks.simulation.virtual_clock import NEVER, VirtualClock
from weir.scheduler.batching.batch import Batch
from weir.scheduler.batching.outcome import Ended
from weir.scheduler.batching.request import NO_FRAME, requests_of
from weir.scheduler.model_scheduler import ModelScheduler
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.wire.batches import BatchEnded
from weir.schemas.wire.calls import RequestEnvelope

_VERSION, _LATEST, _GATEWAY, _BODY = 1, -1, "gateway", b""
_PATIENCE_US = 600_000_000
_HANDOVER_US = 20_000
_EXPIRE_TICKS = 4
_DONE, _WAKE, _TICK, _EVENT, _NOTICED = range(5)


class Happening(NamedTuple):
    """A scale event, and what came of it."""

    kind: str
    at_us: int


class _Queue:
    """A model's queue: its policy, which is None while it has no owner, and what waits in the stream meanwhile."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.policy: ModelScheduler | None = None
        self.kept: list[int] = []
        self.open: dict[int, None] = {}  # requests without an answer
        self.batches: dict[int, Batch] = {}
        self.wake_at_us = NEVER
        self.without_since_us = 0


class FleetRun:
    """The simulated cluster of one run. `happenings` are the events, in order."""

    def __init__(self, scenario: FleetScenario, fleet: Fleet, happenings: Iterable[Happening]) -> None:
        self._scenario = scenario
        self._fleet = fleet
        self._clock = VirtualClock(fleet.times_us, _PATIENCE_US)
        self._batch_ids = count(1)
        self._dice = np.random.default_rng([scenario.seed, 2])
        self._factors: list[float] = []
        self._schedulers = [f"s{number:03}" for number in range(scenario.schedulers)]
        self._workers = {f"w{number:04}" for number in range(scenario.workers)}
        self._queues = [_Queue(number, f"m{number:04}") for number in range(scenario.models)]
        self._by_name = {queue.name: queue for queue in self._queues}
        self._workers_of = [[f"w{worker:04}" for worker in workers] for workers in fleet.workers_of]
        self._models_of: dict[str, list[int]] = defaultdict(list)
        for model, workers in enumerate(self._workers_of):
            for worker in workers:
                self._models_of[worker].append(model)
        self._owners: Owners = owners_of(scenario.owners, list(self._by_name), self._schedulers)
        self._device_free_at: Counter[str] = Counter()
        self._running: dict[int, tuple[_Queue, Batch, int, int]] = {}
        self._dirty: dict[_Queue, None] = {}
        self._config = [self._config_of(queue.name) for queue in self._queues]
        self._happenings = list(happenings)
        self.ended_us = np.full(len(fleet.times_us), -1, np.int64)
        self.begun_us = np.full(len(fleet.times_us), -1, np.int64)
        self.busy_us = np.zeros(int(scenario.seconds) + 3600)
        self.events = 0
        self.failed = 0
        self.batches = 0
        self.figures: list[Counter[str]] = [Counter() for _ in self._happenings]
        self._current: Counter[str] = Counter()
        self.end_us = 0

    def run(self) -> None:
        """Plays everything that comes, until all of it has ended."""
        for queue in self._queues:
            self._begin(queue, 0)
        for number, happening in enumerate(self._happenings):
            self._clock.set(happening.at_us, _EVENT, number)
        self._clock.set(TICK_US, _TICK, 1)
        self._left = len(self._fleet.models)
        for now_us in self._clock.moments(lambda: self._left, self._handle, self._arrive_first):
            for queue in self._dirty:
                self._dispatch(queue, now_us)
            self._dirty.clear()
        self.end_us = self._clock.now_us

    def _config_of(self, name: str) -> ModelConfig:
        described = {"name": name, "max_batch_size": self._scenario.max_batch, "dynamic_batching": {}}
        return ModelConfig.model_validate(described)

    def _handle(self, kind: int, what: Any, now_us: int) -> None:
        self.events += 1
        if kind == _DONE:
            self._done(what, now_us)
        elif kind == _WAKE:
            if what.wake_at_us == now_us:
                what.wake_at_us = NEVER
                self._dirty[what] = None
        elif kind == _TICK:
            self._tick(what, now_us)
        elif kind == _NOTICED:
            self._worker_noticed(what, now_us)
        else:
            self._happen(what, now_us)

    # Requests

    def _arrive_first(self, number: int, now_us: int) -> None:
        self.events += 1
        self._arrive(self._queues[self._fleet.models[number]], (number,), now_us)

    def _arrive(self, queue: _Queue, numbers: Iterable[int], now_us: int) -> None:
        numbers = list(numbers)
        queue.open.update(dict.fromkeys(numbers))
        if queue.policy is None:
            queue.kept += numbers
            return
        rows = [RequestEnvelope(number, _LATEST, 1, "", 0, 0, 0, 0, 0, "", _BODY) for number in numbers]
        refused = queue.policy.enqueue(requests_of(_GATEWAY, rows, now_us, NO_FRAME))
        self._ended(queue, ((), refused), now_us)
        self._dirty[queue] = None

    def _dispatch(self, queue: _Queue, now_us: int) -> None:
        if queue.policy is None:
            return
        batches, wake_at_us = queue.policy.dispatch(now_us)
        for batch in batches:
            self._send(queue, batch, now_us)
        wake_at_us = NEVER if wake_at_us is None else max(wake_at_us, now_us + 1)
        if wake_at_us != queue.wake_at_us:
            queue.wake_at_us = wake_at_us
            if wake_at_us != NEVER:
                self._clock.set(wake_at_us, _WAKE, queue)

    def _send(self, queue: _Queue, batch: Batch, now_us: int) -> None:
        scenario, worker = self._scenario, batch.instance.worker
        self.batches += 1
        queue.batches[batch.id] = batch
        if worker not in self._workers:
            return  # it is dead, which its scheduler has not noticed yet
        mean_us = self._fleet.service_us[queue.number] + scenario.row_ms * 1000 * len(batch.requests)
        begin_us = max(now_us + scenario.hop_us, self._device_free_at[worker])
        end_us = begin_us + max(1, round(mean_us * self._factor()))
        self._device_free_at[worker] = end_us
        self._running[batch.id] = queue, batch, begin_us, end_us
        self._clock.set(end_us + scenario.hop_us, _DONE, batch.id)

    def _factor(self) -> float:
        if not self._factors:
            sigma = self._scenario.sigma
            self._factors = self._dice.lognormal(-sigma * sigma / 2, sigma, 65_536).tolist()
        return self._factors.pop()

    def _done(self, batch_id: int, now_us: int) -> None:
        known = self._running.pop(batch_id, None)
        if known is None:
            return  # its worker died meanwhile
        queue, batch, begin_us, end_us = known
        self.busy_us[end_us // 1_000_000] += end_us - begin_us
        for request in batch.requests:
            if self.ended_us[request.key] < 0:
                self.begun_us[request.key] = begin_us
                self.ended_us[request.key] = now_us
                queue.open.pop(request.key, None)
                self._left -= 1
        # A scheduler that took over doesn't know of it.
        if queue.batches.pop(batch_id, None) is not None and queue.policy is not None:
            queue.policy.complete(now_us, BatchEnded(batch_id, end_us - begin_us))
            self._dirty[queue] = None

    def _ended(self, queue: _Queue, ended: Ended, now_us: int) -> None:
        for request, _ in ended[1]:
            if self.ended_us[request.key] < 0:
                self.ended_us[request.key] = now_us
                queue.open.pop(request.key, None)
                self._left -= 1
                self.failed += 1

    # Owners

    def _begin(self, queue: _Queue, now_us: int) -> None:
        """A new owner makes its policy, and is delivered all that has no answer."""
        queue.policy = ModelScheduler(queue.name, self._batch_ids.__next__)
        queue.policy.configure(_VERSION, self._config[queue.number])
        for worker in self._workers_of[queue.number]:
            if worker in self._workers:
                queue.policy.set_instances(worker, {_VERSION: 1})
        queue.batches.clear()
        queue.kept.clear()
        queue.wake_at_us = NEVER
        if queue.open:
            self._arrive(queue, sorted(queue.open), now_us)

    def _tick(self, number: int, now_us: int) -> None:
        for move in self._owners.tick(now_us):
            self._moved(move, now_us)
        if number % _EXPIRE_TICKS == 0:
            for queue in self._queues:
                if queue.policy is not None:
                    self._ended(queue, queue.policy.expire(now_us), now_us)
                    self._dirty[queue] = None
        self._clock.set(now_us + TICK_US, _TICK, number + 1)

    def _moved(self, move: Move, now_us: int) -> None:
        queue, figures = self._by_name[move.queue], self._current
        figures["moved"] += 1
        if move.is_orderly:
            ends = [self._running[batch_id][3] for batch_id in queue.batches if batch_id in self._running]
            begin_us = max([now_us, *ends]) + _HANDOVER_US
            queue.policy, queue.without_since_us = None, now_us
            self._clock.set(begin_us, _NOTICED, ("", queue))
            return
        figures["run again"] += sum(len(batch.requests) for batch in queue.batches.values())
        self._owned_again(queue, now_us)

    def _owned_again(self, queue: _Queue, now_us: int) -> None:
        stall_ms = (now_us - queue.without_since_us) // 1000
        self._current["longest stall ms"] = max(self._current["longest stall ms"], stall_ms)
        self._begin(queue, now_us)

    # Scale events

    def _happen(self, number: int, now_us: int) -> None:
        self._current = self.figures[number]
        kind = self._happenings[number].kind
        if kind == "scheduler lost":
            # The one that owns the most popular model.
            victim = self._owners.owner_of[self._queues[0].name]
            for queue in self._queues:
                if self._owners.owner_of[queue.name] == victim:
                    queue.policy, queue.without_since_us = None, now_us
            self._owners.lost(now_us, victim)
        elif kind == "scheduler added":
            self._owners.joined(now_us, f"t{number:03}")
        elif kind == "worker lost":
            victim = self._workers_of[0][0]
            self._workers.discard(victim)
            for batch_id in [id for id, known in self._running.items() if known[1].instance.worker == victim]:
                _, _, begin_us, _ = self._running.pop(batch_id)
                self.busy_us[now_us // 1_000_000] += max(0, now_us - begin_us)
            self._clock.set(now_us + TICK_US, _NOTICED, (victim, None))
        else:
            added = f"x{number:03}"
            self._workers.add(added)
            # It has what the worker with the most popular model has.
            for model in list(self._models_of[self._workers_of[0][-1]]):
                self._workers_of[model].append(added)
                self._models_of[added].append(model)
                policy = self._queues[model].policy
                if policy is not None:
                    policy.set_instances(added, {_VERSION: 1})
                    self._dirty[self._queues[model]] = None

    def _worker_noticed(self, what: tuple[str, _Queue | None], now_us: int) -> None:
        worker, queue = what
        if queue is not None:
            self._owned_again(queue, now_us)
            return
        for model in self._models_of.pop(worker):
            of = self._queues[model]
            if of.policy is not None:
                for batch_id in of.policy.in_flight_on(worker):
                    self._current["run again"] += len(of.batches.pop(batch_id).requests)
                self._ended(of, of.policy.worker_lost(now_us, worker), now_us)
                self._dirty[of] = None
            self._workers_of[model].remove(worker)


__all__ = ["FleetRun", "Happening"]
