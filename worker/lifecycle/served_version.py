"""`ServedVersion`: one loaded version of a model, with its instances, from load to unload."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from weir.runtime.containment import contained
from weir.runtime.limits.process_limits import computing_threads
from weir.schemas.core.errors import WeirError
from weir.schemas.wire.batches import NotRunReason
from weir.schemas.wire.registry import MAX_INSTANCES, MAX_PROBLEM_LENGTH, ModelState, VersionRecord
from weir.worker.backend_api.interface import LoadedModel, ModelVersion, VersionLoader
from weir.worker.ensembles.backend import EnsembleModel
from weir.worker.ensembles.instance import EnsembleInstance
from weir.worker.execution.instance import InstanceSpec, ModelEnvironment, ModelInstance
from weir.worker.execution.rate_limiter import needs_of
from weir.worker.execution.sequences import StateDeclarations
from weir.worker.execution.statistics import ModelStatistics, observer_for
from weir.worker.execution.warmup import WarmUpSample, warm_up_samples
from weir.worker.lifecycle.instance_plan import PlannedInstance, planned_instances, used_gpus

MAX_STARTING = max(4, computing_threads())
"""Instances of a version that are created at a time, if its backend supports that."""

AnyInstance = ModelInstance | EnsembleInstance
"""What runs batches: an instance with a thread, or the coordinator of an ensemble."""


class SharedModel:
    """A loaded model that several `ServedVersion` share, unloaded with the last of them. Thread-safe."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self._holders = 1
        self._lock = threading.Lock()

    def hold(self) -> SharedModel:
        """Adds a holder."""
        with self._lock:
            self._holders += 1
        return self

    def release(self) -> None:
        """Removes a holder; unloads the model with the last one."""
        with self._lock:
            self._holders -= 1
            is_last = self._holders == 0
        if is_last:
            self.loaded.unload()


class RunningInstance(NamedTuple):
    """An instance, its plan, and the number by which schedulers address it if it keeps states of sequences."""

    instance: ModelInstance
    planned: PlannedInstance
    number: int


class ServedVersion:
    """Loads a version and creates its instances. Blocking: created outside of the event loop.

    `instances` are those that get batches; passive ones are only created. Instances of sequence models have numbers that
    are unique to the load, whose number is `load`. `digest` is set afterwards: it identifies what was loaded. Raises
    WeirError if the version or one of its instances can't be created; nothing is left loaded then.

    A `predecessor` differs in its instance groups only. Its loaded model and its instances that are still wanted are
    reused; missing instances are created. It serves until `take_over` is called, and keeps everything if it never is.
    """

    def __init__(
        self,
        backend: VersionLoader,
        model: ModelVersion,
        environment: ModelEnvironment,
        load: int,
        predecessor: ServedVersion | None = None,
    ) -> None:
        start_s = time.monotonic()
        self.model = model
        self.digest = ""
        self._load = load
        self._arena_name = f"{environment.arena_prefix}_{load}"
        self.instances: list[AnyInstance] = []
        self._running: list[RunningInstance] = []
        self._numbered: dict[int, ModelInstance] = {}
        self.is_succeeded = False  # another version object has taken over what it has loaded
        self._predecessor = predecessor
        states = StateDeclarations(model.config, model.model_directory)
        gpus = used_gpus(planned_instances(model.config, environment.devices))
        with contextlib.ExitStack() as on_failure:
            with environment.gpu_memory.loading(model.name, gpus) as allocated:
                if predecessor is None:
                    self.statistics = ModelStatistics(latencies=observer_for(model.config, environment.metrics))
                    if states.checkpoint_every and environment.checkpoints is not None:
                        environment.checkpoints.prepare()
                    self._shared = SharedModel(backend.load(model))
                else:
                    self.statistics = predecessor.statistics
                    self._shared = predecessor._shared.hold()
                on_failure.callback(self.unload)
                loaded = self._shared.loaded
                if isinstance(loaded, EnsembleModel):
                    self.instances.append(self._coordinator(loaded, environment))
                else:
                    self._start_instances(loaded, environment, states)
            on_failure.pop_all()
        self.statistics.add_memory(allocated)
        self._load_duration_s = time.monotonic() - start_s

    def _coordinator(self, loaded: EnsembleModel, environment: ModelEnvironment) -> EnsembleInstance:
        name = f"{self._arena_name}_0"
        return EnsembleInstance(self.model, loaded, name, self.statistics, environment)

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
                spec = self._spec(planned, index, environment, states, warm_up)
                instance = ModelInstance(loaded, self.model, spec, self.statistics, environment)
                if len(starting) == at_a_time:
                    self._finish_start(starting)
                instance.begin_start()
                starting.append(instance)
                self._running.append(RunningInstance(instance, planned, self._load * MAX_INSTANCES + index))
            while starting:
                self._finish_start(starting)
        except BaseException:
            while starting:
                # Instances that are starting can't be stopped before they have started; errors no longer matter.
                with contextlib.suppress(WeirError):
                    self._finish_start(starting)
            raise
        active = [running for running in self._running if not running.planned.group.passive]
        self.instances += [running.instance for running in active]
        if self.model.config.sequence_batching is not None:
            self._numbered = {running.number: running.instance for running in active}

    def _finish_start(self, starting: deque[ModelInstance]) -> None:
        """Waits for the instance that was started first. Raises WeirError if it fails; it is removed then."""
        instance = starting.popleft()
        try:
            instance.finish_start()
        except BaseException:
            self._running = [running for running in self._running if running.instance is not instance]
            raise

    def _spec(
        self,
        planned: PlannedInstance,
        index: int,
        environment: ModelEnvironment,
        states: StateDeclarations,
        warm_up: Sequence[WarmUpSample],
    ) -> InstanceSpec:
        group = planned.group
        device = dataclasses.replace(planned.device, unique_name=f"{self._arena_name}_{index}")
        permit = None
        if environment.permits is not None and not group.passive:
            permit = environment.permits.join(needs_of(group.rate_limiter, device.device_id))
        if group.passive:
            self.model.health.passive(device.key)
        return InstanceSpec(device, device.unique_name, states, () if group.passive else warm_up, permit)

    def take_over(self) -> None:
        """Takes over the instances of the predecessor, if there is one; it keeps those that are no longer wanted.

        Called in the event loop, like everything that affects where batches run.
        """
        predecessor, self._predecessor = self._predecessor, None
        if predecessor is None:
            return
        predecessor.is_succeeded = True
        own = {running.instance for running in self._running}
        predecessor._running = [running for running in predecessor._running if running.instance not in own]
        predecessor.instances = [instance for instance in predecessor.instances if instance not in own]

    @property
    def record(self) -> VersionRecord:
        """The version's record in the registry."""
        return VersionRecord(
            ModelState.READY,
            instances=0 if self.model.health.problem else len(self.instances),
            load_duration_s=self._load_duration_s,
            load=self.digest,
            numbers=tuple(self._numbered),
            problem=self.model.health.problem[:MAX_PROBLEM_LENGTH],
            checks_readiness=self.model.health.has_readiness_checks,
        )

    @property
    def runs_alone(self) -> bool:
        """Whether each request runs by itself, however many requests a batch message has."""
        config = self.model.config
        return config.dynamic_batching is None and config.sequence_batching is None and not config.is_ensemble

    @property
    def is_numbered(self) -> bool:
        """Whether its instances keep states of sequences, so that no other can run what was sent to one."""
        return bool(self._numbered)

    def instance(self, number: int) -> AnyInstance | None:
        """The instance that a scheduler addresses by `number`; None if it is gone, as after a reload."""
        if self._numbered:
            return self._numbered.get(number)
        return self.instances[number] if 0 <= number < len(self.instances) else None

    def obstacle(self, instance: ModelInstance) -> NotRunReason | None:
        """Why the instance can't take a batch now: it is down, or its process waits for another model.

        The process may wait for a response to this very request: a model may call itself as long as it has a free instance.
        """
        if self._numbered:
            return None
        if self.model.health.is_down(instance.key):
            return NotRunReason.DOWN
        calls = self.model.calls
        is_calling = calls is not None and instance.held > 0 and calls.has_open_calls(instance.key)
        return NotRunReason.CALLING if is_calling else None

    @contained()
    def unload(self, wait_for_readers: bool = False) -> bool:
        """Finishes submitted batches and unloads the version; `wait_for_readers` as in `ModelInstance.stop`.

        Does not affect what belongs to a predecessor that still serves. Returns whether nothing raised meanwhile.
        """
        foreign = set() if self._predecessor is None else {running.instance for running in self._predecessor._running}
        own: list[AnyInstance] = [running.instance for running in self._running]
        leaving = [instance for instance in own or self.instances if instance not in foreign]
        for instance in leaving:
            # All stop at the same time: each may need time to finish its batches and to finalize its model.
            if isinstance(instance, ModelInstance):
                instance.ask_to_stop(wait_for_readers)
        for instance in leaving:
            instance.stop(wait_for_readers)
        self.instances.clear()
        self._running.clear()
        self._shared.release()
        return True
