"""`ModelHistory`: the last `MAX_CHANGES` changes of models by clients and ramps, in stream HISTORY on disk."""

from __future__ import annotations

import logging

from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import NotFoundError

from weir.bus.naming import subjects
from weir.bus.nats.connection import BROKER_ERRORS, Bus
from weir.bus.streams.declarations import ensure_stream
from weir.schemas.core.errors import unavailable
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.history import ModelChange, NumberedChange

logger = logging.getLogger("weir.bus")

MAX_CHANGES = 10_000
"""Changes of all models that are kept; older ones are dropped."""


class ModelHistory:
    """Writes and reads the changes."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def start(self) -> None:
        """Creates the stream unless it exists. Raises NatsError, OSError or TimeoutError."""
        await ensure_stream(
            self._bus,
            StreamConfig(
                name=subjects.HISTORY_STREAM,
                subjects=[subjects.HISTORY_SUBJECTS],
                storage=StorageType.FILE,
                retention=RetentionPolicy.LIMITS,
                discard=DiscardPolicy.OLD,
                max_msgs=MAX_CHANGES,
                allow_direct=True,
                num_replicas=self._bus.replicas,
            ),
        )

    async def record(self, change: ModelChange) -> None:
        """Stores a change that has been made. A change that can't be stored is logged: it is in effect all the same."""
        try:
            await self._bus.jetstream.publish(subjects.history(change.model), change.pack())
        except BROKER_ERRORS as error:
            logger.warning(
                "the history of model %s lacks its change '%s': %s: %s",
                change.model,
                change.kind,
                type(error).__name__,
                error,
            )

    async def of(self, model: str) -> list[NumberedChange]:
        """The stored changes of a model, oldest first. Raises WeirError (UNAVAILABLE) without a broker."""
        found: list[NumberedChange] = []
        try:
            scan = self._bus.jetstream.scan(subjects.HISTORY_STREAM, subjects.history(model), start=1)
            async for message in scan:
                try:
                    found.append(NumberedChange(message.sequence, ModelChange.unpack(message.data)))
                except MalformedMessage as error:
                    logger.warning("change %d of model %s can't be read: %s", message.sequence, model, error)
        except NotFoundError:
            return []
        except BROKER_ERRORS as error:
            raise unavailable("the message broker is not available") from error
        return found
