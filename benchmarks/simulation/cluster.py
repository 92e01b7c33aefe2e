"""`simulate`: simulated workers and a virtual clock around the policies of `weir scheduler`.

It does what `weir.scheduler.service.served_queues` does: all arrivals at one time are enqueued before anything is
dispatched, a timer is set to the time at which the policy wants to run again, and `expire` is called once a second. There
is no asyncio and no real time: the next event is the earliest of a heap.
"""

from __future__ import annotations

from collections import Counter
from itertools import count

from benchmarks.simulation.outcome import Outcome
from benchmarks.simulation.scenario import Scenario
from benchmarks.simulation.virtual_clock import NEVER, Stuck, VirtualClock
from benchmarks.simulation.workload import Workload, service_factors, workload_of
from weir.scheduler.batching.batch import Batch
from weir.scheduler.batching.outcome import Ended
from weir.scheduler.batching.request import NO_FRAME, requests_of
from weir.scheduler.model_scheduler import ModelScheduler
from weir.scheduler.placement.instances import Instance
from weir.schemas.wire.batches import BatchEnded
from weir.schemas.wire.calls import RequestEnvelope

_GATEWAY, _BODY, _VERSION, _LATEST = "gateway", b"", 1, -1
_TICK_US = 1_000_000
_PATIENCE_US = 3_600_000_000
"""After the last arrival; what has not ended then never will."""

_DONE, _WAKE, _TICK, _LOSE, _BACK = range(5)


def simulate(scenario: Scenario) -> Outcome:
    """Plays the scenario to its end. Raises Stuck, and what `workload_of` raises."""
    return Cluster(scenario, workload_of(scenario)).run()


class _Model:
    """One model: its policy, and when its alarm goes off."""

    def __init__(self, number: int, scheduler: ModelScheduler) -> None:
        self.number = number
        self.scheduler = scheduler
        self.wake_at_us = NEVER


class Cluster:
    """The simulated cluster of one run. All times are microseconds since the start."""

    def __init__(self, scenario: Scenario, workload: Workload) -> None:
        self._scenario = scenario
        self._workload = workload
        self._clock = VirtualClock(workload.times_us, _PATIENCE_US)
        self._batch_ids = count(1)
        self._factors = service_factors(scenario)
        self._running: dict[int, tuple[_Model, Batch, int, int]] = {}  # with begin and end
        self._free_at: dict[Instance, int] = {}
        self._device_free_at: Counter[tuple[str, int]] = Counter()
        self._workers = [f"worker-{number}" for number in range(scenario.workers)]
        self._models = [self._model(number) for number in range(scenario.models)]
        self._dirty: dict[_Model, None] = {}
        self._in_system = 0
        self._job_keys = count(len(workload))  # of requests of the job, which are in no workload
        self.outcome = Outcome(scenario, workload)

    def run(self) -> Outcome:
        """Plays everything that comes, until all of it has ended."""
        outcome, then_us = self.outcome, 0
        self._begin()
        for model in self._models if self._scenario.job_window else ():
            self._feed_job(model, self._scenario.job_window, 0)
        there = self._in_system
        for now_us in self._clock.moments(lambda: self._in_system, self._handle, self._arrive):
            outcome.in_system_us += there * (now_us - then_us)
            for model in self._dirty:
                self._dispatch(model, now_us)
            self._dirty.clear()
            there, then_us = self._in_system, now_us
        outcome.end_us = then_us
        return outcome

    def _begin(self) -> None:
        scenario = self._scenario
        for model in self._models:
            for worker in self._workers:
                model.scheduler.set_instances(worker, {_VERSION: scenario.instances})
        self._clock.set(_TICK_US, _TICK, None)
        if scenario.lose_worker_every_s:
            self._clock.set(int(scenario.lose_worker_every_s * 1e6), _LOSE, 0)

    def _model(self, number: int) -> _Model:
        name = f"model-{number}"
        scheduler = ModelScheduler(name, self._batch_ids.__next__)
        scheduler.configure(_VERSION, self._scenario.config(name))
        return _Model(number, scheduler)

    def _handle(self, kind: int, what: object, now_us: int) -> None:
        if kind == _DONE:
            self._done(what, now_us)
        elif kind == _WAKE:
            if what.wake_at_us == now_us:
                what.wake_at_us = NEVER
                self._dirty[what] = None
        elif kind == _TICK:
            for model in self._models:
                self._ended(model.scheduler.expire(now_us), now_us)
                self._dirty[model] = None
            self._clock.set(now_us + _TICK_US, _TICK, None)
        elif kind == _LOSE:
            self._lose(what, now_us)
        else:
            for model in self._models:
                self._ended(model.scheduler.set_instances(what, {_VERSION: self._scenario.instances}), now_us)
                self._dirty[model] = None

    def _arrive(self, number: int, now_us: int) -> None:
        work = self._workload
        model = self._models[work.models[number] % len(self._models)]
        deadline_us = work.deadlines_us[number]
        row = RequestEnvelope(
            number,
            _LATEST,
            work.rows[number],
            "",
            work.priorities[number],
            work.timeouts_us[number],
            -(-(now_us + deadline_us) // 1000) if deadline_us else 0,
            work.correlation_ids[number],
            work.flags[number],
            "",
            _BODY,
            0,
        )
        self._in_system += 1
        refused = model.scheduler.enqueue(requests_of(_GATEWAY, (row,), now_us, NO_FRAME))
        if refused:
            self._ended(((), refused), now_us)
        self._dirty[model] = None

    def _feed_job(self, model: _Model, requests: int, now_us: int) -> None:
        lane = self._scenario.job_lane
        rows = [
            RequestEnvelope(next(self._job_keys), _LATEST, 1, "", 0, 0, 0, 0, 0, "", _BODY, lane)
            for _ in range(requests)
        ]
        if model.scheduler.enqueue(requests_of(_GATEWAY, rows, now_us, NO_FRAME)):
            raise Stuck("the job was refused")
        self._dirty[model] = None

    def _dispatch(self, model: _Model, now_us: int) -> None:
        self._ended(model.scheduler.overdue(now_us), now_us)
        batches, wake_at_us = model.scheduler.dispatch(now_us)
        for batch in batches:
            self._send(model, batch, now_us)
        wake_at_us = NEVER if wake_at_us is None else max(wake_at_us, now_us + 1)
        if wake_at_us != model.wake_at_us:
            model.wake_at_us = wake_at_us
            if wake_at_us != NEVER:
                self._clock.set(wake_at_us, _WAKE, model)

    def _send(self, model: _Model, batch: Batch, now_us: int) -> None:
        scenario, instance = self._scenario, batch.instance
        rows = len(batch.padding_rows)
        for request in batch.requests:
            rows += request.batch_size
        mean_us = scenario.service_us + scenario.service_row_us * rows
        begin_us = max(now_us + scenario.hop_us, self._free_at.get(instance, 0))
        if scenario.shared_devices:
            device = instance.worker, instance.number % scenario.shared_devices
            begin_us = max(begin_us, self._device_free_at[device])
        end_us = begin_us + max(1, round(mean_us * next(self._factors)))
        self._free_at[instance] = end_us
        if scenario.shared_devices:
            self._device_free_at[device] = end_us
        self._running[batch.id] = model, batch, begin_us, end_us
        self._clock.set(end_us + scenario.hop_us, _DONE, batch.id)
        self.outcome.sent(batch.requests, rows)

    def _done(self, batch_id: object, now_us: int) -> None:
        known = self._running.pop(batch_id, None)
        if known is None:
            return  # its worker died meanwhile
        model, batch, begin_us, end_us = known
        ended = model.scheduler.complete(now_us, BatchEnded(batch.id, end_us - begin_us))
        self.outcome.busy_us += end_us - begin_us
        self.outcome.ran(batch.requests, begin_us)
        self._ended(ended, now_us)
        self._dirty[model] = None
        if self._scenario.job_window:
            job = sum(request.key >= len(self._workload) for request in batch.requests)
            self.outcome.job_ran(job, rides=job < len(batch.requests), busy_us=end_us - begin_us)
            if job:
                self._feed_job(model, job, now_us)

    def _lose(self, number: int, now_us: int) -> None:
        worker = self._workers[number % len(self._workers)]
        self.outcome.lost_workers += 1
        for model in self._models:
            for batch_id in model.scheduler.in_flight_on(worker):
                _, batch, begin_us, _ = self._running.pop(batch_id)
                self._free_at.pop(batch.instance, None)
                self.outcome.busy_us += max(0, now_us - begin_us)
                self.outcome.lost_batches += 1
            self._ended(model.scheduler.worker_lost(now_us, worker), now_us)
            self._dirty[model] = None
        for device in range(self._scenario.shared_devices):
            self._device_free_at[worker, device] = 0
        self._clock.set(now_us + int(self._scenario.worker_back_after_s * 1e6), _BACK, worker)
        self._clock.set(now_us + int(self._scenario.lose_worker_every_s * 1e6), _LOSE, number + 1)

    def _ended(self, ended: Ended, now_us: int) -> None:
        answered, failures = ended
        if self._scenario.job_window:
            answered = [request for request in answered if request.key < len(self._workload)]
        self._in_system -= len(answered) + len(failures)
        self.outcome.answered(answered, now_us)
        if failures:
            self.outcome.failed(failures, now_us)
