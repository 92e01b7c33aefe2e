"""`KnownModels`: models that were served before (bucket `known-models`), for which requests wait while no worker runs.

Schedulers with `--scale-to-zero` write it, because they outlive the last worker; all callers follow it, so that their
requests wait. An entry is the last record of a model by its workers, with all versions that were READY. The bucket is on
disk; if the broker has lost it, the schedulers write it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from nats.errors import Error as NatsError
from nats.js.api import KeyValueConfig, StorageType
from nats.js.errors import NotFoundError

from weir.bus.kv.desired_models import DesiredModels
from weir.bus.kv.view import KvView
from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus
from weir.runtime.containment import call_each, contained
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.model_control import DesiredModel
from weir.schemas.wire.registry import ModelRecord

logger = logging.getLogger("weir.bus")

KNOWN_TTL_S = 7 * 86400.0
"""How long a model stays known without a worker."""

MAX_KNOWN = 10_000
"""Models that stay known without a worker; more are forgotten with their last one."""


class KnownModels:
    """All entries by model. Listeners run in the event loop after a change."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._view = KvView(bus, subjects.KNOWN_MODELS_BUCKET, self._apply, self._remove)
        self._entries: dict[str, ModelRecord] = {}
        self._listeners: list[Callable[[str], None]] = []
        self._is_writer = False
        self._background: asyncio.TaskGroup | None = None

    def get(self, name: str) -> ModelRecord | None:
        """The last record of a model, None for one that is not known."""
        return self._entries.get(name)

    def names(self) -> set[str]:
        """The names of all known models."""
        return set(self._entries)

    def on_change(self, listener: Callable[[str], None]) -> None:
        """`listener(model)` after its entry was written or removed."""
        self._listeners.append(listener)

    async def start(self, background: asyncio.TaskGroup, is_writer: bool = False) -> None:
        """Reads all entries, and follows changes from now on. A writer creates the bucket unless it exists.

        Raises NatsError, OSError or TimeoutError if the broker is lost meanwhile; then it may be called again.
        """
        if self._background is None:
            self._is_writer = is_writer
            self._background = background
            self._bus.on_reconnect(self._recover)
        if is_writer:
            await self._ensure_bucket()
        await self._view.start()

    async def write(self, record: ModelRecord) -> None:
        """Replaces the entry of a model."""
        if record.name not in self._entries and len(self._entries) >= MAX_KNOWN:
            logger.warning("model %s is not kept as a known model: the limit of %d is reached", record.name, MAX_KNOWN)
            return
        # Applied at once: the broker's copy may arrive after the next decision.
        known, key, data = self._entries.get(record.name), subjects.token(record.name), record.pack()
        self._apply(key, data)
        applied = self._entries.get(record.name)
        try:
            await self._put(key, data)
        except BaseException:
            if self._entries.get(record.name) is applied:
                self._restore(record.name, known)
            raise

    async def _put(self, key: str, data: bytes) -> None:
        try:
            await self._view.bucket.put(key, data)
        except NotFoundError:
            if not self._is_writer:
                raise
            await self._recover()  # another scheduler has removed the bucket
            await self._view.bucket.put(key, data)

    async def forget(self, name: str) -> None:
        """Removes the entry of a model."""
        known = self._entries.get(name)
        self._drop(name)
        try:
            await self._view.bucket.delete(subjects.token(name))
        except BaseException:
            if name not in self._entries:
                self._restore(name, known)
            raise

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
        desired.on_change(lambda entry: self._on_desired(entry) if is_followed() else None)

    def _on_desired(self, entry: DesiredModel) -> None:
        if not entry.wanted.load and entry.name in self._entries and self._background is not None:
            self._background.create_task(self._try_to_forget(entry.name))

    @contained()
    async def _try_to_forget(self, name: str) -> None:
        try:
            await self.forget(name)
        except (NatsError, OSError, TimeoutError) as error:
            logger.warning("the entry of known model %s could not be removed: %s", name, error)

    async def _recover(self) -> None:
        """Restores the bucket after a reconnection."""
        if self._is_writer:
            await self._ensure_bucket()
        await self._view.read(self._packed if self._is_writer else dict)

    def _packed(self) -> dict[str, bytes]:
        return {subjects.token(name): record.pack() for name, record in self._entries.items()}

    async def _ensure_bucket(self) -> None:
        try:
            await self._bus.jetstream.stream_info(subjects.KNOWN_MODELS_STREAM)
        except NotFoundError:
            await self._bus.jetstream.create_key_value(
                KeyValueConfig(
                    bucket=subjects.KNOWN_MODELS_BUCKET,
                    history=1,
                    storage=StorageType.FILE,
                    ttl=KNOWN_TTL_S,
                    replicas=self._bus.replicas,
                )
            )

    def _remove(self, key: str) -> None:
        self._drop(subjects.untoken(key))

    def _apply(self, key: str, data: bytes) -> None:
        try:
            record = ModelRecord.unpack(data)
        except MalformedMessage as error:
            logger.warning("known model %r: %s", key, error)
            return
        if subjects.token(record.name) != key or record.config is None:
            return
        known = self._entries.get(record.name)
        if known is None and len(self._entries) >= MAX_KNOWN:
            return
        if known is None or record.written_ns >= known.written_ns:
            self._entries[record.name] = record
            self._notify(record.name)

    def _drop(self, name: str) -> None:
        if self._entries.pop(name, None) is not None:
            self._notify(name)

    def _restore(self, name: str, known: ModelRecord | None) -> None:
        """Reverts a write that failed; the caller may repeat it."""
        if known is None:
            self._drop(name)
        else:
            self._entries[name] = known
            self._notify(name)

    def _notify(self, name: str) -> None:
        call_each("weir.bus.kv.known_models: a listener", self._listeners, name)
