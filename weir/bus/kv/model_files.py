"""`ModelFiles`: passes the files of load requests from gateways to workers.

They may be larger than a message, so they are in an object store, in memory. Gateways and workers remove files that no
entry of the desired state names any longer.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping

from nats.js.api import ObjectStoreConfig, StorageType
from nats.js.errors import APIError, NotFoundError, ObjectNotFoundError
from nats.js.object_store import ObjectStore

from weir.bus.naming import subjects
from weir.bus.nats.connection import BROKER_ERRORS, Bus
from weir.bus.streams.stored_objects import StoredObject, description_subject, list_objects
from weir.schemas.core.errors import unavailable

logger = logging.getLogger("weir.bus")

MODEL_FILES_MAX_BYTES = 1 << 30
"""The size of the files of all load requests in effect."""

_NEW_NS = 3_600_000_000_000  # another gateway may not have written the entry yet


class ModelFiles:
    """The object store, which is created by the first write."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def put(self, contents: Mapping[str, bytes]) -> None:
        """Stores contents by object name. Raises UNAVAILABLE if the broker has no room."""
        try:
            store = await self._store()
            for name, content in contents.items():
                await store.put(name, content)
        except APIError as error:
            await self.remove(contents)
            raise unavailable(
                f"the message broker has no room for the files of the load request: {error.description}"
            ) from error

    async def fetch(self, files: Mapping[str, str]) -> dict[str, bytes]:
        """The contents by path of files given as object names by path. Raises UNAVAILABLE for a file that was removed."""
        contents: dict[str, bytes] = {}
        for path, name in files.items():
            stored = await StoredObject.find(self._bus.jetstream, subjects.MODEL_FILES_STORE, name)
            if stored is None:
                raise unavailable(f"file '{path}' of the load request is gone")
            contents[path] = await stored.read()
        return contents

    async def missing(self, names: Iterable[str]) -> set[str]:
        """Those of the objects that do not exist."""
        store = await self._store()
        absent: set[str] = set()
        for name in names:
            try:
                await store.get_info(name)
            except ObjectNotFoundError:
                absent.add(name)
        return absent

    async def sweep(self, referenced: Collection[str], now_ns: int) -> None:
        """Removes objects that no entry refers to and that are not new, as a gateway that died may leave them."""
        try:
            names = await list_objects(self._bus, subjects.MODEL_FILES_STORE)
        except NotFoundError:
            return
        unused = [name for name in names if name not in referenced]
        await self.remove([name for name in unused if revision_of(name) < now_ns - _NEW_NS])

    async def remove(self, names: Iterable[str]) -> None:
        """Removes objects that exist. Logs a failure, after which a later `sweep` removes them."""
        for name in names:
            try:
                store = await self._store()
                await store.delete(name)
                # `delete` leaves a description that marks the object as deleted, which would stay for ever.
                tombstone = description_subject(subjects.MODEL_FILES_STORE, name)
                await self._bus.jetstream.purge(subjects.MODEL_FILES_STREAM, tombstone)
            except NotFoundError:
                continue
            except BROKER_ERRORS as error:
                logger.warning("a file of a load request could not be removed, a later sweep does it: %s", error)

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
    """The object name of a file of the load request with this revision of the model's entry."""
    return f"{subjects.token(model)}.{revision}.{number}"


def revision_of(name: str) -> int:
    """The revision in an object's name; 0 for a name in another form."""
    parts = name.split(".")
    return int(parts[1]) if len(parts) == 3 and parts[1].isascii() and parts[1].isdigit() else 0
