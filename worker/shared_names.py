"""`SharedNames`: what a load or unload by name means where models in several namespaces have that name.

As in Triton, it is one of all of them. Each is a model of its own, with its own turns; the name itself has no model then,
and only tells which operation was carried out on them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from repository.layout import FoundModel, ModelRepository
from schemas.desired import WantedModel
from schemas.errors import WeirError
from schemas.model_identity import plain_name
from worker.controlled_model import ControlledModel
from worker.controlled_models import ControlledModels
from worker.model_records import ModelRecords


class SharedNames:
    """See the module. `load` and `unload` carry out an operation on one model, whose turn it is."""

    def __init__(
        self,
        repository: ModelRepository,
        models: ControlledModels,
        records: ModelRecords,
        load: Callable[[ControlledModel, WantedModel, int], Awaitable[None]],
        unload: Callable[[ControlledModel, int], Awaitable[None]],
    ) -> None:
        self._repository = repository
        self._models = models
        self._records = records
        self._load = load
        self._unload = unload

    async def load(self, model: ControlledModel, wanted: WantedModel, revision: int) -> None:
        """Loads `model`, or all models of its name where there are several; it is the caller's turn."""
        if self._repository.namespacing:
            await self._load_all(model, wanted, revision)
        else:
            await self._load(model, wanted, revision)

    async def unload(self, model: ControlledModel, revision: int) -> None:
        """Unloads `model` and all others of its name; it is the caller's turn."""
        await self._unload_parts(model, revision)
        model.shared_by = frozenset()
        await self._unload(model, revision)

    async def _load_all(self, model: ControlledModel, wanted: WantedModel, revision: int) -> None:
        # Files that come with the request stand in for whatever lies in the repositories under this name.
        found = [] if wanted.files else await asyncio.to_thread(self._find, model.name)
        identities = frozenset(one.identity for one in found if one.is_ambiguous)
        errors = await asyncio.gather(*(self._load_part(name, wanted, revision) for name in sorted(identities)))
        if identities:
            if model.is_serving:
                await self._unload(model, model.revision)  # the name has become ambiguous
            model.shared_by = identities
            model.revision = max(model.revision, revision)
            model.error = next((error for error in errors if error is not None), None)
            await self._records.tell(model)
        else:
            await self._load(model, wanted, revision)
            if model.error is not None:
                return  # what was there goes on
            model.shared_by = frozenset()
        await self._unload_parts(model, revision, but=identities)

    async def _load_part(self, name: str, wanted: WantedModel, revision: int) -> WeirError | None:
        async with self._models.turn(name) as part:
            await self._load(part, wanted, revision)
            return part.error

    async def _unload_parts(self, model: ControlledModel, revision: int, but: frozenset[str] = frozenset()) -> None:
        others = [other.name for other in self._models if other is not model and plain_name(other.name) == model.name]
        for name in others:
            if name not in but:
                async with self._models.turn(name) as part:
                    await self._unload(part, revision)

    def _find(self, name: str) -> list[FoundModel]:
        try:
            return self._repository.find_all(name)
        except WeirError:
            return []  # loading it tells
