"""`PushedModels`: a model repository that lies in NATS, where `weir push` puts models and workers get them from.

Files lie in an object store, in pieces, under the hash of their content: what is there already is not sent again, and
neither side ever holds more than a piece. A model is a manifest in a bucket, written last, and only over the one that its
writer had seen. Both are kept on disk, and belong to nobody: they are there until they are deleted.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import AsyncIterator, Collection
from datetime import UTC, datetime, timedelta

from nats.js.api import KeyValueConfig, ObjectMeta, ObjectMetaOptions, ObjectStoreConfig, StorageType
from nats.js.errors import (
    BadRequestError,
    BucketNotFoundError,
    KeyNotFoundError,
    KeyWrongLastSequenceError,
    NoKeysError,
    NotFoundError,
    ObjectNotFoundError,
)
from nats.js.kv import KeyValue
from nats.js.object_store import ObjectStore

from bus import subjects
from bus.connection import Bus
from schemas.errors import WeirError, invalid, unavailable
from schemas.pushed_model import PushedFile, PushedModel, pack_pushed, unpack_pushed
from schemas.wire import MalformedMessage

logger = logging.getLogger("weir.bus")

PIECE_BYTES = 4 << 20
"""A file is sent and fetched in pieces of this size: what either side holds of it."""

_CHUNK_BYTES = 512 << 10
_NEW = timedelta(hours=1)  # somebody may still be writing the manifest


class PushedModels:
    """The repository called `name`, which is made when it is first written."""

    def __init__(self, bus: Bus, name: str) -> None:
        self._bus = bus
        self.name = name
        self._bucket = subjects.repository_bucket(name)

    async def names(self) -> list[str]:
        """The models that are there, in order."""
        try:
            keys = await (await self._manifests()).keys()
        except (BucketNotFoundError, NoKeysError, NotFoundError):
            return []
        return sorted(map(subjects.untoken, keys))

    async def find(self, name: str) -> tuple[PushedModel, int] | None:
        """The model and the revision of its manifest; None where there is no such model.

        Raises UNAVAILABLE for a manifest that makes no sense.
        """
        try:
            entry = await (await self._manifests()).get(subjects.token(name))
        except (BucketNotFoundError, KeyNotFoundError, NotFoundError):
            return None
        try:
            model = unpack_pushed(entry.value or b"")
            if model.name != name:
                raise MalformedMessage("a manifest under another model's name")
        except MalformedMessage as error:
            raise unavailable(f"what was pushed of model '{name}' can't be read: {error}") from error
        return model, entry.revision or 0

    async def write(self, model: PushedModel, last: int) -> None:
        """Writes the manifest in the place of revision `last` (0: of none).

        Raises UNAVAILABLE where another one has been written meanwhile, INVALID_ARG for a model of too many files.
        """
        data = pack_pushed(model)
        if len(data) > self._bus.max_payload_bytes - 4096:
            raise invalid(f"model '{model.name}' has too many files for one manifest")
        manifests = await self._manifests(make=True)
        key = subjects.token(model.name)
        try:
            await (manifests.update(key, data, last=last) if last else manifests.create(key, data))
        except KeyWrongLastSequenceError as error:
            raise unavailable(f"somebody else has pushed model '{model.name}' meanwhile: push it again") from error

    async def delete(self, name: str) -> bool:
        """Takes the model out of the repository; returns whether it was there."""
        try:
            if await self.find(name) is None:
                return False
        except WeirError:
            logger.warning("model '%s' was pushed in a form that can't be read", name)
        await (await self._manifests()).delete(subjects.token(name))
        return True

    async def has(self, file: PushedFile) -> bool:
        """Whether the content of the file is there."""
        count = pieces_of(file)
        try:
            return not count or bool(await (await self._store()).get_info(f"{file.digest}.{count - 1}"))
        except (BucketNotFoundError, NotFoundError, ObjectNotFoundError):
            return False

    async def put_piece(self, file: PushedFile, number: int, content: bytes) -> None:
        """Stores a piece of the file's content; the last one makes it one that `has` finds."""
        options = ObjectMetaOptions(max_chunk_size=min(_CHUNK_BYTES, self._bus.max_payload_bytes // 2))
        name = f"{file.digest}.{number}"
        await (await self._store(make=True)).put(name, content, ObjectMeta(name=name, options=options))

    async def pieces(self, file: PushedFile) -> AsyncIterator[bytes]:
        """The content of the file. Raises UNAVAILABLE where it is not there."""
        for number in range(pieces_of(file)):
            try:
                yield await self._piece(f"{file.digest}.{number}")
            except (BucketNotFoundError, NotFoundError, ObjectNotFoundError) as error:
                raise unavailable(f"the content of file '{file.path}' is not in the repository") from error

    async def _piece(self, name: str) -> bytes:
        """A stored piece. Each of its chunks is asked for by itself: `ObjectStore.get` follows a consumer, and waits for
        ever where the broker has lost that, or somebody has put the same piece there anew.
        """
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
        """Removes content that no model has, unless it is new; returns how many files it was.

        Nothing, where a manifest can't be read: it may need anything.
        """
        try:
            store = await self._store()
            objects = await store.list()
            used = await self._used()
        except (BucketNotFoundError, NotFoundError, WeirError):
            return 0
        before = datetime.now(UTC) - _NEW
        old = [one.name for one in objects if one.name and not one.deleted and _written(one.mtime) < before]
        unused = [name for name in old if name.rpartition(".")[0] not in used]
        # The last pieces first: what is there in part must not pass for whole.
        for name in sorted(unused, key=lambda name: -int(name.rpartition(".")[2] or 0)):
            await store.delete(name)
            place = f"$O.{self._bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"
            await self._bus.jetstream.purge_stream(f"OBJ_{self._bucket}", subject=place)
        return len({name.rpartition(".")[0] for name in unused})

    async def _used(self) -> Collection[str]:
        used: set[str] = set()
        for name in await self.names():
            found = await self.find(name)
            used |= {file.digest for file in found[0].files} if found is not None else set()
        return used

    async def _manifests(self, make: bool = False) -> KeyValue:
        try:
            return await self._bus.jetstream.key_value(self._bucket)
        except (BucketNotFoundError, NotFoundError):
            if not make:
                raise
            config = KeyValueConfig(
                bucket=self._bucket, history=1, storage=StorageType.FILE, replicas=self._bus.replicas
            )
            try:
                return await self._bus.jetstream.create_key_value(config)
            except BadRequestError:  # somebody was faster
                return await self._bus.jetstream.key_value(self._bucket)

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


def pieces_of(file: PushedFile) -> int:
    """How many pieces the file has; an empty one has none."""
    return -(-file.size_bytes // PIECE_BYTES)


def _written(text: str | None) -> datetime:
    """When an object was written; long ago where it doesn't say."""
    try:
        moment = datetime.fromisoformat(text or "")
    except ValueError:
        return datetime.fromtimestamp(0, UTC)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
