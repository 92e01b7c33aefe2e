"""`Unloading`: from versions that are to go to versions that are gone; what is queued for them runs first."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from repository.layout import ModelRepository
from runtime.containment import contained
from schemas.errors import WeirError
from schemas.partitions import partitions_of
from worker.control_tasks import ControlTasks
from worker.controlled_model import ControlledModel
from worker.controlled_models import ControlledModels
from worker.drains import Drains
from worker.model_records import ModelRecords
from worker.override_folder import OverrideFolder
from worker.served_version import ServedVersion

logger = logging.getLogger("weir.worker")


class UnloadingHost(Protocol):
    """The worker's shell, as far as it holds models."""

    def uninstall(self, name: str) -> None:
        """The model is no longer there."""

    def let_go(self, served: ServedVersion) -> None:
        """Finishes what the version holds and unloads it. Blocking."""


class Unloading:
    """See the module."""

    def __init__(
        self,
        host: UnloadingHost,
        repository: ModelRepository,
        drains: Drains,
        records: ModelRecords,
        models: ControlledModels,
        tasks: ControlTasks,
    ) -> None:
        self._host = host
        self._repository = repository
        self._drains = drains
        self._records = records
        self._models = models
        self._tasks = tasks

    def begin(self, model: ControlledModel) -> None:
        """Unloads the retiring versions once nobody needs them."""
        self.halt(model)
        model.draining = self._tasks.operate(self._drain(model))

    def halt(self, model: ControlledModel) -> None:
        """What retires goes on for now."""
        if model.draining is not None:
            model.draining.cancel()
            model.draining = None

    def give_up(self, model: ControlledModel, gone: list[ServedVersion], folder: OverrideFolder | None) -> None:
        """Unloads these versions, to which no batch comes any more, and removes what a load request had brought."""
        self._tasks.end(self._let_go(model, gone, folder))

    async def _drain(self, model: ControlledModel) -> None:
        numbers = set(model.retiring)
        # Of the configurations that the versions were loaded with, or that requests come by now, who has most says it.
        partitions = max((partitions_of(served.model.config) for served in model.served.values()), default=1)
        await self._drains.wait(model.name, numbers, partitions)
        # From here on no batch comes for them, and what is done is not undone by a load in between.
        model.draining = None
        gone = [model.served.pop(number) for number in sorted(numbers) if number in model.served]
        folder = None
        if not model.served:
            self._host.uninstall(model.name)
            model.result, model.is_override = None, False
            folder, model.folder = model.folder, None
        # It must be ended even where this is cancelled.
        await asyncio.shield(self._tasks.end(self._let_go(model, gone, folder)))
        model.gone(numbers)
        await self.conclude(model)
        self._models.drop_if_blank(model)

    async def conclude(self, model: ControlledModel) -> None:
        """Everything that was to go has gone."""
        if not model.served and await self._is_nowhere(model):
            model.past.clear()
        await self._records.tell(model)

    async def _let_go(self, model: ControlledModel, gone: list[ServedVersion], folder: OverrideFolder | None) -> None:
        for served in gone:
            await self._let_go_version(model, served)
        if folder is not None:
            await asyncio.to_thread(folder.remove)

    @contained()
    async def _let_go_version(self, model: ControlledModel, served: ServedVersion) -> None:
        await asyncio.to_thread(self._host.let_go, served)
        if not served.is_succeeded:  # else only some instances of the version have gone
            logger.info("successfully unloaded '%s' version %d", model.name, served.model.version)

    async def _is_nowhere(self, model: ControlledModel) -> bool:
        """Whether the model was here only by a load request's files, has left the repository, or is for other workers."""
        try:
            await asyncio.to_thread(self._repository.find, model.name)
        except WeirError:
            return True
        return model.is_leaving or model.is_moving
