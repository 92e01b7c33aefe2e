"""`RepositoryControl`: what clients ask of the model repository: the index, loads and unloads."""

from __future__ import annotations

from collections.abc import Mapping

from bus.desired_models import DesiredModels
from calls.model_operations import ModelOperations
from gateway.repository_index import RepositoryIndex, Row

UNLOAD_DEPENDENTS = "unload_dependents"


class RepositoryControl:
    """See the module."""

    def __init__(self, index: RepositoryIndex, operations: ModelOperations, desired: DesiredModels) -> None:
        self._index = index
        self._operations = operations
        self._desired = desired

    async def start(self) -> None:
        """Listens to workers, and to the operations of other roles."""
        await self._index.start()
        await self._desired.start()

    async def index(self, ready: bool) -> list[Row]:
        """The repository index; with `ready` only its READY rows."""
        return await self._index.rows(ready)

    async def load(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        """See `ModelOperations.load`."""
        await self._operations.load(name, config, files)

    async def unload(self, name: str, with_dependents: bool) -> None:
        """See `ModelOperations.unload`."""
        await self._operations.unload(name, with_dependents)
