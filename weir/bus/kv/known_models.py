"""`KnownModels`: models that were served before (bucket `known-models`), for which requests wait while no worker runs.

Schedulers with `--scale-to-zero` write it, because they outlive the last worker; all callers follow it, so that their
requests wait. An entry is the last record of a model by its workers, with all versions that were READY. The bucket is on
disk; if the broker has lost it, the schedulers write it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from nats.js.api import StorageType
from nats.js.errors import NotFoundError

from weir.bus.kv.desired_models import DesiredModels
from weir.bus.kv.typed_bucket import MAX_RECORDS, TypedBucket
from weir.bus.naming import subjects
from weir.bus.nats.connection import BROKER_ERRORS, Bus
from weir.bus.streams.declarations import Bucket
from weir.schemas.wire.registry import ModelRecord

logger = logging.getLogger("weir.bus")

KNOWN_TTL_S = 7 * 86400.0
"""How long a model stays known without a worker."""


_BUCKET = Bucket(subjects.KNOWN_MODELS_BUCKET, StorageType.FILE, KNOWN_TTL_S)


class KnownModels(TypedBucket[ModelRecord]):
    """The last records of models. Schedulers make the bucket."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus, _BUCKET, ModelRecord.pack, _unpack, lambda record: record.name)
        self._forgetting: set[asyncio.Task[None]] = set()

    async def write(self, record: ModelRecord) -> None:
        """Replaces the entry of a model, unless it has a newer one. Creates the bucket if another scheduler removed it."""
        if self.get(record.name) is None and len(self.names()) >= MAX_RECORDS:
            logger.warning(
                "model %s is not kept as a known model: the limit of %d is reached", record.name, MAX_RECORDS
            )
            return

        def newer(known: ModelRecord | None) -> ModelRecord:
            return record if known is None or record.written_ns >= known.written_ns else known

        try:
            await self.update(record.name, newer)
        except NotFoundError:
            await self._recover()
            await self.update(record.name, newer)

    async def forget(self, name: str) -> None:
        """Removes the entry of a model."""
        await self.update(name, lambda _known: None)

    async def remove_bucket(self) -> None:
        """Removes all entries and the bucket, because models are no longer kept without a worker."""
        for key in await self._view.bucket.keys():
            await self._view.bucket.delete(key)  # which every view of the bucket receives
        try:
            await self._bus.jetstream.delete_key_value(subjects.KNOWN_MODELS_BUCKET)
        except NotFoundError:
            pass

    def follow(self, desired: DesiredModels, is_followed: Callable[[], bool]) -> None:
        """Forgets each model that a client unloads, while `is_followed()`."""

        def on_desired(name: str) -> None:
            if desired.is_unwanted(name) and self.get(name) is not None and is_followed():
                task = asyncio.get_running_loop().create_task(self._try_to_forget(name))
                self._forgetting.add(task)
                task.add_done_callback(self._forgetting.discard)

        desired.on_change(on_desired)

    async def _try_to_forget(self, name: str) -> None:
        try:
            await self.forget(name)
        except BROKER_ERRORS as error:
            logger.warning("the entry of known model %s could not be removed: %s", name, error)


def _unpack(data: bytes) -> ModelRecord:
    record = ModelRecord.unpack(data)
    if record.config is None:
        raise ValueError("it has no configuration")
    return record
