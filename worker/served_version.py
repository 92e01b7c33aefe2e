"""`ServedVersion`: one loaded version of a model, with its instances, from load to unload."""

from __future__ import annotations

import time
from typing import NamedTuple

from schemas.registry import MAX_INSTANCES, ModelState, VersionRecord
from worker.backend import LoadedModel, ModelVersion, VersionLoader
from worker.ensembles.backend import EnsembleModel
from worker.ensembles.instance import EnsembleInstance
from worker.instance_plan import planned_instances, used_gpus
from worker.latencies import observer_for
from worker.model_environment import ModelEnvironment
from worker.model_instance import ModelInstance
from worker.rate_limiter import needs_of
from worker.state_declarations import StateDeclarations
from worker.statistics import ModelStatistics
from worker.warmup import warm_up_samples

AnyInstance = ModelInstance | EnsembleInstance
"""What runs batches: a model's instance in a thread of its own, or the coordinator of an ensemble."""


class Load(NamedTuple):
    """One load of a version: `number` is another for each load in this worker, `mark` stands in the registry for what is
    loaded.
    """

    number: int
    mark: str = ""


class ServedVersion:
    """Loads a version and creates its instances; blocking, so called off the event loop.

    `instances` are those that take batches; passive ones are only made. Those that keep the state of sequences are
    numbered by their load. Raises WeirError when the version or one of its instances can't be made; nothing is left over
    then.
    """

    def __init__(self, backend: VersionLoader, model: ModelVersion, environment: ModelEnvironment, load: Load) -> None:
        begun_s = time.monotonic()
        self.model = model
        self.statistics = ModelStatistics(latencies=observer_for(model.config, environment.metrics))
        self._first_instance = load.number * MAX_INSTANCES if model.config.sequence_batching else 0
        self._load_mark = load.mark
        self._arena_name = f"{environment.arena_prefix}_{load.number}"
        self.instances: list[AnyInstance] = []
        self._passive: list[ModelInstance] = []
        states = StateDeclarations(model.config, model.model_directory)
        if states.checkpoint_every and environment.checkpoints is not None:
            environment.checkpoints.prepare()
        gpus = used_gpus(planned_instances(model.config, environment.devices))
        with environment.gpu_memory.loading(model.name, gpus) as taken:
            self._loaded: LoadedModel = backend.load(model)
            if isinstance(self._loaded, EnsembleModel):
                self.instances.append(self._coordinator(self._loaded, environment))
            else:
                self._start_instances(self._loaded, environment, states)
        self.statistics.memory_usage = [("GPU", gpu, size_bytes) for gpu, size_bytes in taken.items()]
        self._load_duration_s = time.monotonic() - begun_s

    def _coordinator(self, loaded: EnsembleModel, environment: ModelEnvironment) -> EnsembleInstance:
        name = f"{self._arena_name}_0"
        return EnsembleInstance(self.model, loaded.plan, name, self.statistics, loaded.calls, environment)

    def _start_instances(self, loaded: LoadedModel, environment: ModelEnvironment, states: StateDeclarations) -> None:
        config, turns = self.model.config, environment.turns
        try:
            warm_up = warm_up_samples(self.model)
            for number, (device, group) in enumerate(planned_instances(config, environment.devices)):
                turn = None
                if turns is not None and not group.passive:
                    turn = turns.join(needs_of(group.rate_limiter, device.device_id))
                instance = ModelInstance(
                    loaded,
                    self.model,
                    device,
                    f"{self._arena_name}_{number}",
                    self.statistics,
                    environment,
                    states,
                    () if group.passive else warm_up,
                    turn,
                )
                instance.start()
                (self._passive if group.passive else self.instances).append(instance)
        except BaseException:
            self.unload()
            raise

    @property
    def record(self) -> VersionRecord:
        """What the registry is told of this version."""
        return VersionRecord(
            ModelState.READY,
            instances=len(self.instances),
            load_duration_s=self._load_duration_s,
            first_instance=self._first_instance,
            load=self._load_mark,
        )

    def instance(self, number: int) -> AnyInstance | None:
        """The instance that a scheduler means by `number`; None where the state it counts on went with another load."""
        number -= self._first_instance
        if 0 <= number < len(self.instances):
            return self.instances[number] if self._first_instance else self._not_asking(number)
        # After a reload there may be fewer than the scheduler knew of when it sent the batch.
        return None if self._first_instance or not self.instances else self.instances[number % len(self.instances)]

    def _not_asking(self, number: int) -> AnyInstance:
        """The instance of this number; while its process waits for other models, the next that does not, if there is one.

        What it waits for may be this very request: a model may ask itself, as long as it has an instance left.
        """
        wanted = self.instances[number]
        if len(self.instances) == 1 or not self._is_asking(wanted):
            return wanted
        others = (*self.instances[number + 1 :], *self.instances[:number])
        return next((other for other in others if not self._is_asking(other)), wanted)

    def _is_asking(self, instance: AnyInstance) -> bool:
        calls = self.model.calls
        return calls is not None and isinstance(instance, ModelInstance) and calls.is_asking(instance.name)

    def unload(self, wait_for_readers: bool = False) -> None:
        """Finishes what was submitted and gives everything up; `wait_for_readers` as in `ModelInstance.stop`."""
        for instance in (*self.instances, *self._passive):
            instance.stop(wait_for_readers)
        self.instances.clear()
        self._passive.clear()
        self._loaded.unload()
