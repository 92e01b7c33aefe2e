"""`ModelRecords`: what the registry is told of the models of this worker, whether the broker is there or not."""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from typing import Any, Protocol

from nats.errors import Error as NatsError

from schemas.registry import ModelRecord
from worker.controlled_model import ControlledModel

logger = logging.getLogger("weir.worker")


class RecordHost(Protocol):
    """The worker's shell, as far as it writes records."""

    async def write_model(self, record: ModelRecord) -> None:
        """Tells the registry of a model."""

    async def remove_model(self, name: str) -> None:
        """Tells the registry that the model is not there."""

    async def describe(self, **changes: Any) -> None:
        """Tells the registry of the worker itself; `changes` are fields of `WorkerRecord` that are so from now on."""


class ModelRecords:
    """See the module."""

    def __init__(self, host: RecordHost) -> None:
        self._host = host

    async def tell(self, model: ControlledModel) -> None:
        """Tells how the model stands."""
        record = model.record()
        await self.write(record)
        if not record.versions and not record.reason:
            # It is not here at all: whoever asked is answered by now, and nobody else need know.
            await self._try(self._host.remove_model(model.name), model.name)

    async def write(self, record: ModelRecord) -> None:
        """Writes this record."""
        await self._try(self._host.write_model(record), record.name)

    async def describe(self, **changes: Any) -> None:
        """Writes what has changed of the worker itself."""
        await self._try(self._host.describe(**changes), "this worker")

    async def _try(self, change: Coroutine[Any, Any, None], name: str) -> None:
        try:
            await change
        except (NatsError, OSError, TimeoutError) as error:
            # The broker is away: the registry is written again when it is back.
            logger.warning("'%s': the registry could not be told: %s: %s", name, type(error).__name__, error)
