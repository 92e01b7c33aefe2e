"""`ShadowSamples`: the requests whose copies on another version gave the most different responses, in an object store.

Each process keeps a few of each version (`weir.calls.traffic.shadow`), one object for each, which a worse one replaces.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import msgspec
from nats.js.api import ObjectMeta, ObjectStoreConfig, StorageType
from nats.js.errors import NotFoundError
from nats.js.object_store import ObjectStore

from weir.bus.naming import subjects
from weir.bus.nats.connection import BROKER_ERRORS, Bus
from weir.bus.streams.stored_objects import CorruptObject, StoredObject, describe_objects
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.traffic import ShadowSample

logger = logging.getLogger("weir.bus")

MAX_BYTES = 64 << 20
"""The size of all samples; without room, further ones are not kept."""

KEPT_S = 7 * 86400
"""How long a sample is kept."""

_MAX_WAITING = 32


class SampleInfo(msgspec.Struct, frozen=True):
    """What is listed of a sample: `score` is how different the responses are (-1: infinitely), `text` says how."""

    model: str
    version: int
    score: float
    text: str
    request_id: str
    at_ms: int
    name: str = ""


class ShadowSamples:
    """The object store, which is created by the first write. `process_id` names this process in the objects' names."""

    def __init__(self, bus: Bus, process_id: str) -> None:
        self._bus = bus
        self._id = process_id
        self._waiting: dict[str, tuple[SampleInfo, bytes]] = {}
        self._writer: asyncio.Task[None] | None = None

    def keep(self, slot: int, info: SampleInfo, sample: ShadowSample) -> None:
        """Stores a sample soon, in place of the one that this process has stored in `slot` of the version."""
        name = f"{subjects.token(info.model)}.{info.version}.{self._id}.{slot}"
        if len(self._waiting) < _MAX_WAITING or name in self._waiting:
            self._waiting[name] = info, sample.pack()
        if self._writer is None or self._writer.done():
            self._writer = asyncio.get_running_loop().create_task(self._write())

    async def stop(self) -> None:
        """Stores nothing more."""
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)

    async def list(self, model: str) -> list[SampleInfo]:
        """The samples of a model, the worst first. Raises NatsError, OSError or TimeoutError while the broker is away."""
        try:
            found = await describe_objects(self._bus, subjects.SHADOW_STORE)
        except NotFoundError:
            return []
        return sorted(self._infos(model, found), key=lambda info: (info.score >= 0, -info.score, info.at_ms))

    async def read(self, name: str) -> ShadowSample | None:
        """The sample of this name, None if there is none. Raises as `list`."""
        try:
            stored = await StoredObject.find(self._bus.jetstream, subjects.SHADOW_STORE, name)
            return None if stored is None else ShadowSample.unpack(await stored.read())
        except (CorruptObject, MalformedMessage, EOFError, NotFoundError) as error:
            logger.warning("sample %s of shadow traffic can't be read: %s", name, error)
            return None

    @staticmethod
    def _infos(model: str, found: dict[str, tuple[int, str]]) -> Iterator[SampleInfo]:
        for name, (_, description) in found.items():
            if not name.startswith(f"{subjects.token(model)}."):
                continue
            try:
                info = msgspec.json.decode(description, type=SampleInfo)
            except msgspec.MsgspecError:
                continue
            yield msgspec.structs.replace(info, name=name)

    async def _write(self) -> None:
        while self._waiting:
            name = next(iter(self._waiting))
            info, content = self._waiting.pop(name)
            try:
                store = await self._store()
                meta = ObjectMeta(name=name, description=msgspec.json.encode(info).decode())
                await store.put(name, content, meta=meta)
            except BROKER_ERRORS as error:
                logger.warning("a sample of shadow traffic of model %s was not stored: %s", info.model, error)

    async def _store(self) -> ObjectStore:
        try:
            return await self._bus.jetstream.object_store(subjects.SHADOW_STORE)
        except NotFoundError:
            config = ObjectStoreConfig(
                bucket=subjects.SHADOW_STORE,
                storage=StorageType.FILE,
                max_bytes=MAX_BYTES,
                ttl=KEPT_S,
                replicas=self._bus.replicas,
            )
            return await self._bus.jetstream.create_object_store(subjects.SHADOW_STORE, config)
