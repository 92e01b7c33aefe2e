"""`TrafficRecords`: what operators have set for the traffic of models (bucket `traffic`, on disk), by the model's identity.

A gateway writes a record, and all callers of models follow the bucket. If the broker has lost it, the first caller to
reconnect writes the records again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from nats.errors import Error as NatsError
from nats.js.api import KeyValueConfig, StorageType
from nats.js.errors import NotFoundError

from weir.bus.kv.view import KvView
from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus
from weir.runtime.containment import call_each
from weir.schemas.core.errors import unavailable
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.traffic import TrafficRecord

logger = logging.getLogger("weir.bus")

MAX_RECORDS = 10_000
"""Models with a record; those of more models are dropped."""


class TrafficRecords:
    """All records. Listeners run in the event loop after a change, with the identity of the model."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._view = KvView(bus, subjects.TRAFFIC_BUCKET, self._take, self._remove)
        self._records: dict[str, TrafficRecord] = {}
        self._listeners: list[Callable[[str], None]] = []

    def get(self, model: str) -> TrafficRecord | None:
        """The record of a model, None where nothing was set for it."""
        return self._records.get(model)

    def all(self) -> list[TrafficRecord]:
        """Every record."""
        return list(self._records.values())

    def on_change(self, listener: Callable[[str], None]) -> None:
        """`listener(model)` after its record was written or removed."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Creates the bucket unless it exists, reads all records, and follows changes from now on.

        Raises NatsError, OSError or TimeoutError if the broker is lost meanwhile; then it may be called again.
        """
        await self._ensure_bucket()
        await self._view.start()
        self._bus.on_reconnect(self._recover)

    async def write(self, record: TrafficRecord) -> None:
        """Writes a record, and applies it here. Raises WeirError (UNAVAILABLE) without a broker."""
        key, data = subjects.token(record.model), record.pack()
        await self._change(key, data)
        self._take(key, data)

    async def remove(self, model: str) -> None:
        """Removes the record of a model. Raises WeirError (UNAVAILABLE) without a broker."""
        key = subjects.token(model)
        await self._change(key, b"")
        self._remove(key)

    async def _change(self, key: str, data: bytes) -> None:
        bucket = self._view.bucket
        try:
            await (bucket.put(key, data) if data else bucket.delete(key))
        except (NatsError, OSError, TimeoutError) as error:
            logger.warning("the traffic record %s could not be written: %s: %s", key, type(error).__name__, error)
            raise unavailable("the message broker is not available") from error

    async def _ensure_bucket(self) -> None:
        try:
            await self._bus.jetstream.stream_info(self._view.bucket.stream)
        except NotFoundError:
            await self._bus.jetstream.create_key_value(
                KeyValueConfig(
                    bucket=subjects.TRAFFIC_BUCKET, history=1, storage=StorageType.FILE, replicas=self._bus.replicas
                )
            )

    async def _recover(self) -> None:
        await self._ensure_bucket()
        await self._view.read(lambda: {subjects.token(record.model): record.pack() for record in self.all()})

    def _take(self, key: str, data: bytes) -> None:
        try:
            record = TrafficRecord.unpack(data)
            _ = record.rule  # raises ValueError for an invalid one
        except (MalformedMessage, ValueError) as error:
            logger.warning("dropped the traffic record %s: %s", key, error)
            return
        known = self._records.get(record.model)
        if subjects.token(record.model) != key or (known is not None and record.revision < known.revision):
            return
        if known is None and len(self._records) >= MAX_RECORDS:
            logger.warning("dropped the traffic record of %s: %d models have one", record.model, MAX_RECORDS)
            return
        self._records[record.model] = record
        if record != known:
            call_each("weir.bus.kv.traffic: a listener", self._listeners, record.model)

    def _remove(self, key: str) -> None:
        model = subjects.untoken(key)
        if self._records.pop(model, None) is not None:
            call_each("weir.bus.kv.traffic: a listener", self._listeners, model)
