"""`ModelFiles`: the files that load requests bring, on their way from gateways to workers.

They may be larger than a message, so they lie in an object store, in memory; whoever has a request's files removes them
when no entry of the desired state names them any more.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Collection, Iterable, Mapping

from nats.errors import Error as NatsError
from nats.js.api import ObjectStoreConfig, StorageType
from nats.js.errors import APIError, NotFoundError, ObjectNotFoundError
from nats.js.object_store import ObjectStore

from bus import subjects
from bus.connection import Bus
from schemas.errors import unavailable

logger = logging.getLogger("weir.bus")

MODEL_FILES_MAX_BYTES = 1 << 30
"""Files of all load requests that are in force or on their way."""

_NEW_NS = 3_600_000_000_000  # another gateway may still be writing the entry


class ModelFiles:
    """The object store, made when it is first written."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def put(self, contents: Mapping[str, bytes]) -> None:
        """Stores contents by object name. Raises UNAVAILABLE when there is no room."""
        try:
            store = await self._store()
            for name, content in contents.items():
                await store.put(name, content)
        except APIError as error:
            await self.remove(contents)
            raise unavailable(f"there is no room for the files of the load request: {error.description}") from error

    async def fetch(self, files: Mapping[str, str]) -> dict[str, bytes]:
        """The contents by path of files given as object names by path. Raises UNAVAILABLE for one that is gone."""
        store = await self._store()
        contents: dict[str, bytes] = {}
        for path, name in files.items():
            try:
                contents[path] = bytes((await store.get(name)).data or b"")
            except ObjectNotFoundError as error:
                raise unavailable(f"file '{path}' of the load request is gone") from error
        return contents

    async def missing(self, names: Iterable[str]) -> set[str]:
        """Those of these objects that are not there."""
        store = await self._store()
        absent: set[str] = set()
        for name in names:
            try:
                await store.get_info(name)
            except ObjectNotFoundError:
                absent.add(name)
        return absent

    async def sweep(self, referenced: Collection[str], now_ns: int) -> None:
        """Removes what a gateway that died has left: objects that no entry refers to, and that are not new."""
        try:
            found = await (await self._store()).list()
        except NotFoundError:
            return
        names = [info.name for info in found if info.name is not None and info.name not in referenced]
        await self.remove([name for name in names if revision_of(name) < now_ns - _NEW_NS])

    async def remove(self, names: Iterable[str]) -> None:
        """Removes objects; one that is not there, or can't be removed just now, is no error."""
        for name in names:
            try:
                store = await self._store()
                await store.delete(name)
                await self._bus.jetstream.purge_stream(subjects.MODEL_FILES_STREAM, subject=_tombstone(name))
            except NotFoundError:
                continue
            except (NatsError, OSError, TimeoutError) as error:
                logger.warning("a file of a load request could not be removed: %s", error)

    async def _store(self) -> ObjectStore:
        try:
            return await self._bus.jetstream.object_store(subjects.MODEL_FILES_STORE)
        except NotFoundError:
            config = ObjectStoreConfig(
                bucket=subjects.MODEL_FILES_STORE,
                storage=StorageType.MEMORY,
                max_bytes=MODEL_FILES_MAX_BYTES,
                replicas=self._bus.replicas,
            )
            return await self._bus.jetstream.create_object_store(subjects.MODEL_FILES_STORE, config)


def object_name(model: str, revision: int, number: int) -> str:
    """The name of a load request's file, of those that came with this revision of the model's entry."""
    return f"{subjects.token(model)}.{revision}.{number}"


def revision_of(name: str) -> int:
    """The revision in an object's name; 0 for a name that is none of ours."""
    parts = name.split(".")
    return int(parts[1]) if len(parts) == 3 and parts[1].isascii() and parts[1].isdigit() else 0


def _tombstone(name: str) -> str:
    """The subject on which an object's description lies, and after its removal a mark that would stay for ever."""
    return f"$O.{subjects.MODEL_FILES_STORE}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"
