"""`ModelRecords`: what the registry is told of the models of this worker, whether the broker is there or not."""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, Protocol

from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError

from schemas.errors import ErrorCode
from schemas.registry import ModelRecord, ModelState
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
        """Writes this record. A model whose record is larger than a message may be is told as one that can't be served."""
        await self._try(self._write(record), record.name)

    async def _write(self, record: ModelRecord) -> None:
        try:
            await self._host.write_model(record)
        except MaxPayloadError:
            reason = (
                f"{ErrorCode.INVALID_ARG.title}: its configuration and labels are larger than a message of NATS may be"
            )
            logger.error("'%s' can't be served: %s", record.name, reason)
            versions = {
                number: replace(row, state=ModelState.UNAVAILABLE, reason=reason, instances=0, numbers=())
                for number, row in record.versions.items()
            }
            error = f"load failed for model '{record.name}': {reason}\n"
            code = ErrorCode.INVALID_ARG.number
            short = replace(record, versions=versions, config=None, labels={}, error_code=code, error=error)
            await self._host.write_model(short)

    async def describe(self, **changes: Any) -> None:
        """Writes what has changed of the worker itself."""
        await self._try(self._host.describe(**changes), "this worker")

    async def _try(self, change: Coroutine[Any, Any, None], name: str) -> None:
        try:
            await change
        except (NatsError, OSError, TimeoutError) as error:
            # The broker is away: the registry is written again when it is back.
            logger.warning("'%s': the registry could not be told: %s: %s", name, type(error).__name__, error)
