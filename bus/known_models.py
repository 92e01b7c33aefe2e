"""The models that were served (bucket `known-models`), so that requests for them wait while no worker is there.

Schedulers with `--scale-to-zero` write it, for nobody else is sure to be there when the last worker goes; all who ask
models follow it, so that a request waits whoever sent it. An entry is a model's record as its workers told it last, with
all versions that were READY. The bucket lies on disk; when the broker comes back without it, whoever wrote it writes it
again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from nats.errors import Error as NatsError
from nats.js.api import KeyValueConfig, StorageType
from nats.js.errors import NoKeysError, NotFoundError

from bus import subjects
from bus.connection import Bus
from bus.desired_models import DesiredModels
from bus.kv_view import KvView
from runtime.containment import call_each, contained
from schemas.desired import DesiredModel
from schemas.registry import ModelRecord, pack_record, unpack_model_record
from schemas.wire import MalformedMessage

logger = logging.getLogger("weir.bus")

KNOWN_TTL_S = 7 * 86400.0
"""How long a model that nobody serves stays known."""

MAX_KNOWN = 10_000
"""Models that are known; more are forgotten with their last worker."""


class KnownModels:
    """All entries, by model. Listeners are called in the event loop after one has come or gone."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._view = KvView(bus, subjects.KNOWN_MODELS_BUCKET, self._apply, self._remove)
        self._entries: dict[str, ModelRecord] = {}
        self._listeners: list[Callable[[str], None]] = []
        self._is_writer = False
        self._background: asyncio.TaskGroup | None = None

    def get(self, name: str) -> ModelRecord | None:
        """The model as it was served last; None for one that is not known."""
        return self._entries.get(name)

    def names(self) -> set[str]:
        """All models that are known."""
        return set(self._entries)

    def on_change(self, listener: Callable[[str], None]) -> None:
        """`listener(model)` after its entry has come or gone."""
        self._listeners.append(listener)

    async def start(self, background: asyncio.TaskGroup, is_writer: bool = False) -> None:
        """Listens, then reads what was written before. A writer makes the bucket unless it is there.

        Raises NatsError, OSError or TimeoutError where the broker goes away meanwhile; then it may be called again.
        """
        if self._background is None:
            self._is_writer = is_writer
            self._background = background
            await self._view.listen()
            self._bus.on_reconnect(self._recover)
        await self._bus.flush()
        await self._recover()

    async def write(self, record: ModelRecord) -> None:
        """Writes a model's entry in place of its last one."""
        if record.name not in self._entries and len(self._entries) >= MAX_KNOWN:
            logger.warning("model %s: %d models are known already", record.name, MAX_KNOWN)
            return
        # It is known at once: the broker's echo comes over another connection, perhaps after what is decided next.
        known, key, data = self._entries.get(record.name), subjects.token(record.name), pack_record(record)
        self._apply(key, data)
        applied = self._entries.get(record.name)
        try:
            await self._put(key, data)
        except BaseException:
            if self._entries.get(record.name) is applied:
                self._put_back(record.name, known)
            raise

    async def _put(self, key: str, data: bytes) -> None:
        try:
            bucket = await self._bus.jetstream.key_value(subjects.KNOWN_MODELS_BUCKET)
        except NotFoundError:
            if not self._is_writer:
                raise
            await self._recover()  # another scheduler has removed it
            bucket = await self._bus.jetstream.key_value(subjects.KNOWN_MODELS_BUCKET)
        await bucket.put(key, data)

    async def forget(self, name: str) -> None:
        """Takes a model's entry away."""
        known = self._entries.get(name)
        self._drop(name)
        try:
            bucket = await self._bus.jetstream.key_value(subjects.KNOWN_MODELS_BUCKET)
            await bucket.delete(subjects.token(name))
        except BaseException:
            if name not in self._entries:
                self._put_back(name, known)
            raise

    async def abolish(self) -> None:
        """Removes all entries, and the bucket: no model is to be known any more without a worker."""
        try:
            bucket = await self._bus.jetstream.key_value(subjects.KNOWN_MODELS_BUCKET)
            for key in await bucket.keys():
                await bucket.delete(key)  # so that those who follow it hear of it
        except (NotFoundError, NoKeysError):
            pass
        try:
            await self._bus.jetstream.delete_key_value(subjects.KNOWN_MODELS_BUCKET)
        except NotFoundError:
            pass

    def follow(self, desired: DesiredModels, is_followed: Callable[[], bool]) -> None:
        """A model that is to be unloaded is forgotten, where workers follow what is desired."""
        desired.on_change(lambda entry: self._on_desired(entry) if is_followed() else None)

    def _on_desired(self, entry: DesiredModel) -> None:
        if not entry.wanted.load and entry.name in self._entries and self._background is not None:
            self._background.create_task(self._try_to_forget(entry.name))

    @contained()
    async def _try_to_forget(self, name: str) -> None:
        try:
            await self.forget(name)
        except (NatsError, OSError, TimeoutError) as error:
            logger.warning("model %s could not be forgotten: %s", name, error)

    async def _recover(self) -> None:
        """The broker came back, perhaps without the bucket."""
        if self._is_writer:
            await self._make()
        present = set(map(subjects.untoken, await self._view.read()))
        if self._is_writer:
            for name in self._entries.keys() - present:
                await self.write(self._entries[name])

    async def _make(self) -> None:
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
            record = unpack_model_record(data)
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
            self._tell(record.name)

    def _drop(self, name: str) -> None:
        if self._entries.pop(name, None) is not None:
            self._tell(name)

    def _put_back(self, name: str, known: ModelRecord | None) -> None:
        """What was tried has failed, and may be tried again by who finds it undone."""
        if known is None:
            self._drop(name)
        else:
            self._entries[name] = known
            self._tell(name)

    def _tell(self, name: str) -> None:
        call_each("bus.known_models: a listener", self._listeners, name)
