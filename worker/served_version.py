"""`ServedVersion`: one loaded version of a model, with its instances, from load to unload."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from schemas.errors import WeirError
from schemas.registry import MAX_INSTANCES, MAX_PROBLEM_LENGTH, ModelState, VersionRecord
from worker.backend import LoadedModel, ModelVersion, VersionLoader
from worker.ensembles.backend import EnsembleModel
from worker.ensembles.instance import EnsembleInstance
from worker.instance_plan import PlannedInstance, planned_instances, used_gpus
from worker.latencies import observer_for
from worker.model_environment import ModelEnvironment
from worker.model_instance import ModelInstance
from worker.rate_limiter import needs_of
from worker.state_declarations import StateDeclarations
from worker.statistics import ModelStatistics
from worker.warmup import WarmUpSample, warm_up_samples

MAX_STARTING = max(4, os.cpu_count() or 1)
"""Instances of a version that are created at a time, where its backend lets them be."""

AnyInstance = ModelInstance | EnsembleInstance
"""What runs batches: a model's instance in a thread of its own, or the coordinator of an ensemble."""


class Load(NamedTuple):
    """One load of a version: `number` is another for each load in this worker, `mark` stands in the registry for what is
    loaded.
    """

    number: int
    mark: str = ""


class SharedModel:
    """A loaded model that instances of several `ServedVersion` may run: unloaded by the last that lets go. Thread-safe."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self._holders = 1
        self._lock = threading.Lock()

    def hold(self) -> SharedModel:
        """One more has it."""
        with self._lock:
            self._holders += 1
        return self

    def let_go(self) -> None:
        """One less has it."""
        with self._lock:
            self._holders -= 1
            is_last = self._holders == 0
        if is_last:
            self.loaded.unload()


class RunningInstance(NamedTuple):
    """An instance, what it was made for, and the number by which schedulers know it, where that stays its own."""

    instance: ModelInstance
    planned: PlannedInstance
    number: int


class ServedVersion:
    """Loads a version and creates its instances; blocking, so called off the event loop.

    `instances` are those that take batches; passive ones are only made. Those that keep the state of sequences are
    numbered by their load. Raises WeirError when the version or one of its instances can't be made; nothing is left over
    then.

    With a `predecessor`, which differs in its instance groups alone, nothing is loaded: instances of its that are still
    wanted are taken over, and others made. It goes on serving until `take_over`; without that, it keeps what it had.
    """

    def __init__(
        self,
        backend: VersionLoader,
        model: ModelVersion,
        environment: ModelEnvironment,
        load: Load,
        predecessor: ServedVersion | None = None,
    ) -> None:
        begun_s = time.monotonic()
        self.model = model
        self._load = load
        self._arena_name = f"{environment.arena_prefix}_{load.number}"
        self.instances: list[AnyInstance] = []
        self._running: list[RunningInstance] = []
        self._numbered: dict[int, ModelInstance] = {}
        self.is_succeeded = False  # another one serves in its place, with what it has loaded
        self._predecessor = predecessor
        states = StateDeclarations(model.config, model.model_directory)
        gpus = used_gpus(planned_instances(model.config, environment.devices))
        with environment.gpu_memory.loading(model.name, gpus) as taken:
            if predecessor is None:
                self.statistics = ModelStatistics(latencies=observer_for(model.config, environment.metrics))
                if states.checkpoint_every and environment.checkpoints is not None:
                    environment.checkpoints.prepare()
                self._shared = SharedModel(backend.load(model))
            else:
                self.statistics = predecessor.statistics
                self._shared = predecessor._shared.hold()
            loaded = self._shared.loaded
            if isinstance(loaded, EnsembleModel):
                self.instances.append(self._coordinator(loaded, environment))
            else:
                self._start_instances(loaded, environment, states)
        self.statistics.add_memory(taken)
        self._load_duration_s = time.monotonic() - begun_s

    def _coordinator(self, loaded: EnsembleModel, environment: ModelEnvironment) -> EnsembleInstance:
        name = f"{self._arena_name}_0"
        return EnsembleInstance(self.model, loaded.plan, name, self.statistics, loaded.calls, environment)

    def _start_instances(self, loaded: LoadedModel, environment: ModelEnvironment, states: StateDeclarations) -> None:
        left: dict[tuple[int, str], deque[RunningInstance]] = defaultdict(deque)
        for running in () if self._predecessor is None else self._predecessor._running:
            left[running.planned.signature].append(running)
        at_a_time = MAX_STARTING if getattr(loaded, "starts_in_parallel", False) else 1
        starting: deque[ModelInstance] = deque()
        try:
            warm_up = warm_up_samples(self.model)
            plan = planned_instances(self.model.config, environment.devices, environment.host_policies)
            for index, planned in enumerate(plan):
                if still_wanted := left and left[planned.signature]:
                    self._running.append(still_wanted.popleft())
                    continue
                instance = self._instance(loaded, planned, index, environment, states, warm_up)
                if len(starting) == at_a_time:
                    self._finish_start(starting)
                instance.begin_start()
                starting.append(instance)
                self._running.append(RunningInstance(instance, planned, self._load.number * MAX_INSTANCES + index))
            while starting:
                self._finish_start(starting)
        except BaseException:
            while starting:
                # What is being started is waited for before it is stopped; it has failed already.
                with contextlib.suppress(WeirError):
                    self._finish_start(starting)
            self.unload()
            raise
        active = [running for running in self._running if not running.planned.group.passive]
        self.instances += [running.instance for running in active]
        if self.model.config.sequence_batching is not None:
            self._numbered = {running.number: running.instance for running in active}

    def _finish_start(self, starting: deque[ModelInstance]) -> None:
        """Waits for the one that was begun first. Raises WeirError where it can't be started; then it is none of ours."""
        instance = starting.popleft()
        try:
            instance.finish_start()
        except BaseException:
            self._running = [running for running in self._running if running.instance is not instance]
            raise

    def _instance(
        self,
        loaded: LoadedModel,
        planned: PlannedInstance,
        index: int,
        environment: ModelEnvironment,
        states: StateDeclarations,
        warm_up: Sequence[WarmUpSample],
    ) -> ModelInstance:
        group = planned.group
        device = dataclasses.replace(planned.device, unique_name=f"{self._arena_name}_{index}")
        turn = None
        if environment.turns is not None and not group.passive:
            turn = environment.turns.join(needs_of(group.rate_limiter, device.device_id))
        if group.passive:
            self.model.health.passive(device.key)
        return ModelInstance(
            loaded,
            self.model,
            device,
            device.unique_name,
            self.statistics,
            environment,
            states,
            () if group.passive else warm_up,
            turn,
        )

    def take_over(self) -> None:
        """From now on this serves in the place of its predecessor, if it has one, which keeps what is no longer wanted.

        In the event loop, like all that has batches run.
        """
        predecessor, self._predecessor = self._predecessor, None
        if predecessor is None:
            return
        predecessor.is_succeeded = True
        taken = {running.instance for running in self._running}
        predecessor._running = [running for running in predecessor._running if running.instance not in taken]
        predecessor.instances = [instance for instance in predecessor.instances if instance not in taken]

    @property
    def record(self) -> VersionRecord:
        """What the registry is told of this version."""
        return VersionRecord(
            ModelState.READY,
            instances=0 if self.model.health.problem else len(self.instances),
            load_duration_s=self._load_duration_s,
            load=self._load.mark,
            numbers=tuple(self._numbered),
            problem=self.model.health.problem[:MAX_PROBLEM_LENGTH],
            asks=self.model.health.asks,
        )

    @property
    def runs_alone(self) -> bool:
        """Whether each request is to be an execution of its own, whatever its message holds besides."""
        config = self.model.config
        return config.dynamic_batching is None and config.sequence_batching is None and not config.is_ensemble

    def instance(self, number: int) -> AnyInstance | None:
        """The instance that a scheduler means by `number`; None where the state it counts on went with another one."""
        if self._numbered:
            return self._numbered.get(number)
        # After a reload there may be fewer than the scheduler knew of when it sent the batch.
        return self._willing(number % len(self.instances)) if self.instances else None

    def _willing(self, number: int) -> AnyInstance:
        """The instance of this number; while it can't run, or its process waits for other models, the next that can.

        What it waits for may be this very request: a model may ask itself, as long as it has an instance left. So one that
        is down, and will come back, is better than one that waits.
        """
        wanted = self.instances[number]
        if len(self.instances) == 1 or not (self._is_down(wanted) or self._is_asking(wanted)):
            return wanted
        others = [*self.instances[number:], *self.instances[:number]]
        return min(others, key=lambda other: (self._is_asking(other), self._is_down(other)))

    def _is_down(self, instance: AnyInstance) -> bool:
        return isinstance(instance, ModelInstance) and self.model.health.is_down(instance.key)

    def _is_asking(self, instance: AnyInstance) -> bool:
        calls = self.model.calls
        return calls is not None and isinstance(instance, ModelInstance) and calls.is_asking(instance.key)

    def unload(self, wait_for_readers: bool = False) -> None:
        """Finishes what was submitted and gives everything up; `wait_for_readers` as in `ModelInstance.stop`.

        What belongs to a predecessor that still serves is not touched.
        """
        not_ours = set() if self._predecessor is None else {running.instance for running in self._predecessor._running}
        own: list[AnyInstance] = [running.instance for running in self._running]
        leaving = [instance for instance in own or self.instances if instance not in not_ours]
        for instance in leaving:
            # All at once: a model may take its time to finalize, and an instance to finish what it has.
            if isinstance(instance, ModelInstance):
                instance.ask_to_stop(wait_for_readers)
        for instance in leaving:
            instance.stop(wait_for_readers)
        self.instances.clear()
        self._running.clear()
        self._shared.let_go()
