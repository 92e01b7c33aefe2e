"""`ServedVersion`: one loaded version of a model, with its instances, from load to unload."""

from __future__ import annotations

import time
from collections.abc import Callable

from schemas.model_config import ModelConfig
from schemas.registry import MAX_INSTANCES, ModelState, VersionRecord
from telemetry.metrics_config import MetricsConfig
from worker.backend import Backend, InstanceDevice, LoadedModel, ModelVersion
from worker.batch_execution import FinishedBatch
from worker.client_memory import ClientMemoryAccess
from worker.latencies import observer_for
from worker.model_instance import ModelInstance
from worker.reshape import Reshaper
from worker.sequence_controls import SequenceControls
from worker.statistics import ModelStatistics
from worker.warmup import warm_up_samples


class ServedVersion:
    """Loads a version and creates its instances; blocking, so called off the event loop.

    `load_number` is another for each load in this worker: instances that keep the state of sequences are numbered by it.
    Raises WeirError when the version or one of its instances can't be made; nothing is left over then.
    """

    def __init__(
        self,
        backend: Backend,
        model: ModelVersion,
        arena_name: str,
        on_finished: Callable[[FinishedBatch], None],
        metrics: MetricsConfig,
        client_memory: ClientMemoryAccess = ClientMemoryAccess(),  # noqa: B008 - immutable
        load_number: int = 0,
    ) -> None:
        begun_s = time.monotonic()
        self.model = model
        self.statistics = ModelStatistics(latencies=observer_for(model.config, metrics))
        self._first_instance = load_number * MAX_INSTANCES if model.config.sequence_batching else 0
        self.instances: list[ModelInstance] = []
        self._loaded: LoadedModel = backend.load(model)
        reshaper = Reshaper(model.config)
        controls = SequenceControls(model.config)
        try:
            warm_up = warm_up_samples(model)
            for number, device in enumerate(instance_devices(model.config)):
                instance = ModelInstance(
                    self._loaded,
                    model,
                    device,
                    f"{arena_name}_{number}",
                    self.statistics,
                    reshaper if reshaper.is_needed else None,
                    controls if controls.is_needed else None,
                    on_finished,
                    client_memory,
                    warm_up,
                )
                instance.start()
                self.instances.append(instance)
        except BaseException:
            self.unload()
            raise
        self._load_duration_s = time.monotonic() - begun_s

    @property
    def record(self) -> VersionRecord:
        """What the registry is told of this version."""
        return VersionRecord(
            ModelState.READY,
            instances=len(self.instances),
            load_duration_s=self._load_duration_s,
            first_instance=self._first_instance,
        )

    def instance(self, number: int) -> ModelInstance | None:
        """The instance that a scheduler means by `number`; None where the state it counts on went with another load."""
        number -= self._first_instance
        if 0 <= number < len(self.instances):
            return self.instances[number]
        # After a reload there may be fewer than the scheduler knew of when it sent the batch.
        return None if self._first_instance or not self.instances else self.instances[number % len(self.instances)]

    def unload(self, wait_for_readers: bool = False) -> None:
        """Finishes what was submitted and gives everything up; `wait_for_readers` as in `ModelInstance.stop`."""
        for instance in self.instances:
            instance.stop(wait_for_readers)
        self.instances.clear()
        self._loaded.unload()


def instance_devices(config: ModelConfig) -> list[InstanceDevice]:
    """One device for each instance that `instance_group` asks for, named as in Triton (`<group>_<number>`)."""
    devices: list[InstanceDevice] = []
    for group in config.instance_group:
        if group.passive:
            continue
        places = group.gpus if group.kind == "KIND_GPU" else [0]
        for place in places:
            for _ in range(max(1, group.count)):
                devices.append(InstanceDevice(group.kind, place, f"{group.name}_{len(devices)}"))
    return devices or [InstanceDevice("KIND_CPU", 0, f"{config.name}_0")]
