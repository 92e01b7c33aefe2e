"""`ServedVersion`: one loaded version of a model, with its instances, from load to unload."""

from __future__ import annotations

import time
from collections.abc import Callable

from bus.sequence_states import SequenceStates
from schemas.registry import MAX_INSTANCES, ModelState, VersionRecord
from telemetry.metrics_config import MetricsConfig
from worker.backend import Backend, LoadedModel, ModelVersion
from worker.batch_execution import FinishedBatch
from worker.client_memory import ClientMemoryAccess
from worker.ensembles.backend import EnsembleModel
from worker.ensembles.instance import EnsembleInstance
from worker.execution_turns import ExecutionTurns
from worker.implicit_state import ImplicitStates
from worker.instance_plan import planned_instances
from worker.latencies import observer_for
from worker.model_instance import ModelInstance
from worker.rate_limiter import needs_of
from worker.reshape import Reshaper
from worker.sequence_controls import SequenceControls
from worker.state_declarations import StateDeclarations
from worker.statistics import ModelStatistics
from worker.warmup import warm_up_samples

AnyInstance = ModelInstance | EnsembleInstance
"""What runs batches: a model's instance in a thread of its own, or the coordinator of an ensemble."""


class ServedVersion:
    """Loads a version and creates its instances; blocking, so called off the event loop.

    `instances` are those that take batches; passive ones are only made. `turns` says when instances may execute, None for
    always. `load_number` is another for each load in this worker: instances that keep the state of sequences are numbered
    by it. `load_mark` stands for what is loaded, in the registry. Raises WeirError when the version or one of its instances
    can't be made; nothing is left over then.
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
        turns: ExecutionTurns | None = None,
        load_mark: str = "",
        checkpoints: SequenceStates | None = None,
    ) -> None:
        begun_s = time.monotonic()
        self.model = model
        self.statistics = ModelStatistics(latencies=observer_for(model.config, metrics))
        self._first_instance = load_number * MAX_INSTANCES if model.config.sequence_batching else 0
        self._load_mark = load_mark
        self.instances: list[AnyInstance] = []
        self._passive: list[ModelInstance] = []
        declared = StateDeclarations(model.config, model.model_directory)
        if declared.checkpoint_every and checkpoints is not None:
            checkpoints.prepare()
        self._loaded: LoadedModel = backend.load(model)
        if isinstance(self._loaded, EnsembleModel):
            calls, plan = self._loaded.calls, self._loaded.plan
            coordinator = EnsembleInstance(
                model, plan, f"{arena_name}_0", self.statistics, calls, on_finished, client_memory
            )
            self.instances.append(coordinator)
            self._load_duration_s = time.monotonic() - begun_s
            return
        reshaper = Reshaper(model.config)
        controls = SequenceControls(model.config)
        try:
            warm_up = warm_up_samples(model)
            for number, (device, group) in enumerate(planned_instances(model.config)):
                turn = None
                if turns is not None and not group.passive:
                    turn = turns.join(needs_of(group.rate_limiter, device.device_id))
                instance = ModelInstance(
                    self._loaded,
                    model,
                    device,
                    f"{arena_name}_{number}",
                    self.statistics,
                    reshaper if reshaper.is_needed else None,
                    controls if controls.is_needed else None,
                    ImplicitStates(declared, checkpoints) if declared.states else None,
                    on_finished,
                    client_memory,
                    () if group.passive else warm_up,
                    turn,
                )
                instance.start()
                (self._passive if group.passive else self.instances).append(instance)
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
        calls = self.model.calls
        if calls is not None and len(self.instances) > 1:
            for instance in (*self.instances[number:], *self.instances[:number]):
                if isinstance(instance, ModelInstance) and not calls.is_asking(instance.name):
                    return instance
        return self.instances[number]

    def unload(self, wait_for_readers: bool = False) -> None:
        """Finishes what was submitted and gives everything up; `wait_for_readers` as in `ModelInstance.stop`."""
        for instance in (*self.instances, *self._passive):
            instance.stop(wait_for_readers)
        self.instances.clear()
        self._passive.clear()
        self._loaded.unload()
