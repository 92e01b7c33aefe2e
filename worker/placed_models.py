"""`PlacedModels`: brings about what the plan says of models that declare what they need, as workers come and go."""

from __future__ import annotations

import asyncio
import logging

from bus.desired_models import DesiredModels
from repository.layout import ModelRepository
from schemas.errors import WeirError
from schemas.model_identity import plain_name
from worker.control_tasks import ControlTasks
from worker.controlled_model import ControlledModel
from worker.controlled_models import ControlledModels
from worker.loading import Loading
from worker.model_placement import ModelPlacement
from worker.model_records import ModelRecords
from worker.placement_rules import Holding, Step
from worker.unloading import Unloading

logger = logging.getLogger("weir.worker")


class PlacedModels:
    """See the module. A model is given up here only when another worker has it, or its room is needed."""

    def __init__(
        self,
        repository: ModelRepository,
        models: ControlledModels,
        records: ModelRecords,
        unloading: Unloading,
        loading: Loading,
        desired: DesiredModels,
        placement: ModelPlacement,
        tasks: ControlTasks,
    ) -> None:
        self._repository = repository
        self._models = models
        self._records = records
        self._unloading = unloading
        self._loading = loading
        self._desired = desired
        self._placement = placement
        self._tasks = tasks
        self._following: set[str] = set()
        placement.holding = self._holding
        placement.on_step = self._on_step

    def _holding(self, name: str) -> Holding:
        model = self._models.find(name)
        if model is not None and model.is_serving:
            return Holding.READY
        if self._placement.is_loading(name):
            return Holding.LOADING
        if model is not None and (model.served or model.retiring):
            return Holding.LEAVING
        return Holding.FAILED if self._placement.has_failed(name) else Holding.ABSENT

    def _on_step(self, name: str, step: Step) -> None:
        if name in self._following or not self._tasks.is_open:
            return
        model = self._models.find(name)
        is_told_nowhere = model is not None and model.elsewhere
        if step in (Step.LOAD, Step.UNLOAD) or is_told_nowhere != (step is Step.NOWHERE):
            self._following.add(name)
            self._tasks.operate(self._follow(name))

    async def _follow(self, name: str) -> None:
        try:
            async with self._models.turn(name) as model:
                self._following.discard(name)  # what changes from now on is a reason of its own
                step = self._placement.step(name)
                if not self._placement.is_offered(name):
                    return
                if step is Step.UNLOAD and model.is_serving:
                    await self._give_up(model)
                elif step is not Step.KEEP and not model.is_serving:
                    await self._load(model)
        finally:
            self._following.discard(name)

    async def _give_up(self, model: ControlledModel) -> None:
        logger.info("'%s' is unloaded: other workers are to have it", model.name)
        model.is_moving = True
        model.retire()
        await self._records.tell(model)
        self._unloading.begin(model)

    async def _load(self, model: ControlledModel) -> None:
        """Loads the model, or tells anew why it can't be."""
        entry = self._desired.get(plain_name(model.name))
        if entry is None:
            try:
                found = await asyncio.to_thread(self._repository.find, model.name)
            except WeirError:
                await self._placement.withdraw(model.name)
                return
            await self._loading.load_found(model, found, None, 0)
            await self._records.tell(model)
        elif entry.wanted.load:
            await self._loading.load(model, entry.wanted, max(model.revision, entry.revision))
