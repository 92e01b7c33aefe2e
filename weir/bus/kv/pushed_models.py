"""`PushedModels`: a model repository in NATS, which `weir push` writes and workers read.

Files are in an object store, in pieces named by the hash of their content: content that exists is not sent again, and
neither side holds more than a piece in memory. A model is a manifest in a bucket, which is written last, and only over
the manifest that its writer has read. Both are on disk until they are deleted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from nats.js.api import ObjectMeta, ObjectMetaOptions, ObjectStoreConfig, StorageType
from nats.js.errors import BadRequestError, BucketNotFoundError, NotFoundError, ObjectNotFoundError
from nats.js.object_store import ObjectStore

from weir.bus.kv.view import KvBucket
from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus
from weir.bus.streams.declarations import Bucket, ensure_bucket
from weir.bus.streams.stored_objects import description_subject, list_objects
from weir.schemas.core.errors import WeirError, invalid, unavailable
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.model_control import PushedFile, PushedModel

logger = logging.getLogger("weir.bus")

PIECE_BYTES = 4 << 20
"""The size of the pieces of a file, and the most of it that either side holds in memory."""

_CHUNK_BYTES = 512 << 10
_NEW_S = 3600.0  # another process may still be writing the manifest


class PushedModels:
    """The repository called `name`, which is created by the first write."""

    def __init__(self, bus: Bus, name: str) -> None:
        self._bus = bus
        self.name = name
        self._bucket = subjects.repository_bucket(name)
        self._manifests = KvBucket(bus, self._bucket)

    async def models(self) -> dict[str, PushedModel | WeirError]:
        """All models, sorted by name, UNAVAILABLE in place of one whose manifest is malformed."""
        found: dict[str, PushedModel | WeirError] = {}
        for key, data in sorted((await self._manifests.values()).items()):
            if data:
                name = subjects.untoken(key)
                try:
                    found[name] = _unpack(name, data)
                except WeirError as error:
                    found[name] = error
        return found

    async def find(self, name: str) -> tuple[PushedModel, int] | None:
        """The model and the revision of its manifest; None without one. Raises UNAVAILABLE for a malformed manifest."""
        try:
            data, sequence = await self._manifests.entry(subjects.token(name))
        except NotFoundError:
            return None
        return (_unpack(name, data), sequence) if data else None

    async def write(self, model: PushedModel, last: int) -> None:
        """Replaces the manifest of revision `last` (0: none).

        Raises UNAVAILABLE if another manifest was written meanwhile, INVALID_ARG for a model with too many files.
        """
        data = model.pack()
        if len(data) > self._bus.max_payload_bytes - 4096:
            raise invalid(f"model '{model.name}' has too many files for one manifest")
        await ensure_bucket(self._bus, Bucket(self._bucket, StorageType.FILE, is_followed=False))
        key = subjects.token(model.name)
        if not await (self._manifests.swap(key, data, last) if last else self._manifests.create(key, data)):
            raise unavailable(f"model '{model.name}' was pushed by another process meanwhile: push it again")

    async def delete(self, name: str) -> bool:
        """Deletes the model; returns whether it existed."""
        try:
            if await self.find(name) is None:
                return False
        except WeirError:
            logger.warning("deleting model '%s', whose manifest can't be read", name)
        await self._manifests.delete(subjects.token(name))
        return True

    async def has(self, file: PushedFile) -> bool:
        """Whether the content of the file is stored."""
        count = pieces_of(file)
        try:
            return not count or bool(await (await self._store()).get_info(f"{file.digest}.{count - 1}"))
        except (BucketNotFoundError, NotFoundError, ObjectNotFoundError):
            return False

    async def put_piece(self, file: PushedFile, number: int, content: bytes) -> None:
        """Stores a piece of the file's content. `has` finds the file after its last piece."""
        options = ObjectMetaOptions(max_chunk_size=min(_CHUNK_BYTES, self._bus.max_payload_bytes // 2))
        name = f"{file.digest}.{number}"
        await (await self._store(make=True)).put(name, content, ObjectMeta(name=name, options=options))

    async def piece(self, file: PushedFile, number: int) -> bytes:
        """A piece of the file's content. Raises UNAVAILABLE if it is not stored."""
        try:
            return await self._piece(f"{file.digest}.{number}")
        except (BucketNotFoundError, NotFoundError, ObjectNotFoundError) as error:
            raise unavailable(f"the content of file '{file.path}' is not in the repository") from error

    async def _piece(self, name: str) -> bytes:
        """A stored piece. Read again from its start if the same piece was stored again meanwhile."""
        store, stream = await self._store(), f"OBJ_{self._bucket}"
        info = await store.get_info(name)
        while True:
            subject, content, sequence = f"$O.{self._bucket}.C.{info.nuid}", bytearray(), 0
            try:
                while len(content) < min(info.size or 0, PIECE_BYTES):
                    chunk = await self._bus.jetstream.get_msg(stream, sequence + 1, subject, direct=True, next=True)
                    content += chunk.data or b""
                    sequence = int(chunk.seq or 0)
                return bytes(content)
            except NotFoundError:
                before, info = info, await store.get_info(name)
                if info.nuid == before.nuid:
                    raise

    async def sweep(self) -> int:
        """Removes content that no model uses, unless it is new; returns the number of files.

        Removes nothing if a manifest can't be read, because it may use any of them.
        """
        try:
            store = await self._store()
            objects = await list_objects(self._bus, self._bucket)
            used = await self._used()
        except (BucketNotFoundError, NotFoundError, WeirError):
            return 0
        before_ms = (time.time() - _NEW_S) * 1000
        old = [name for name, stored_ms in objects.items() if stored_ms < before_ms]
        unused = [name for name in old if name.rpartition(".")[0] not in used]
        # The last pieces first: an incomplete file must not look complete.
        for name in sorted(unused, key=lambda name: -int(name.rpartition(".")[2] or 0)):
            await store.delete(name)
            await self._bus.jetstream.purge(f"OBJ_{self._bucket}", description_subject(self._bucket, name))
        return len({name.rpartition(".")[0] for name in unused})

    async def _used(self) -> Collection[str]:
        used: set[str] = set()
        for name in await self.models():
            found = await self.find(name)  # as the leader has it: what is deleted is lost
            used |= {file.digest for file in found[0].files} if found is not None else set()
        return used

    async def _store(self, make: bool = False) -> ObjectStore:
        try:
            return await self._bus.jetstream.object_store(self._bucket)
        except (BucketNotFoundError, NotFoundError):
            if not make:
                raise
            config = ObjectStoreConfig(bucket=self._bucket, storage=StorageType.FILE, replicas=self._bus.replicas)
            try:
                return await self._bus.jetstream.create_object_store(self._bucket, config)
            except BadRequestError:
                return await self._bus.jetstream.object_store(self._bucket)


def _unpack(name: str, data: bytes) -> PushedModel:
    try:
        model = PushedModel.unpack(data)
        if model.name != name:
            raise MalformedMessage(f"the manifest names model '{model.name}'")
    except MalformedMessage as error:
        raise unavailable(f"the manifest of model '{name}' can't be read: {error}; push the model again") from error
    return model


def pieces_of(file: PushedFile) -> int:
    """The number of pieces of the file, 0 for an empty one."""
    return -(-file.size_bytes // PIECE_BYTES)
