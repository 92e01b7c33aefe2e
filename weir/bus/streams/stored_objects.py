"""`StoredObject`: an object of an object store, read chunk by chunk, as fast as its reader takes it.

Any producer may have written the description and the chunks, so neither is trusted: no more is read than the description
announces, and links to other stores are not followed.
Source: NATS ADR-20 (object store): a description on `$O.<store>.M.<name>`, chunks on `$O.<store>.C.<id>`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import orjson
from nats.js.errors import NotFoundError

from weir.bus.nats.connection import Bus
from weir.bus.nats.jetstream import JetStream, StoredMessage

MIN_MEAN_CHUNK_BYTES = 1024
"""An object with a smaller mean size of chunks is rejected: each chunk costs a round trip (clients write 128 KiB)."""

_SPARE_CHUNKS = 16
_DIGEST_TYPE = "sha-256="
_DIGEST_BYTES = 32
_OFF_LOOP_BYTES = 1 << 20  # hashing this much takes about a millisecond


class CorruptObject(ValueError):
    """The description of the object is malformed, or does not match its content. The text says how."""


class StoredObject:
    """One stored object. `size_bytes` is the size in its description, and the most that is read."""

    def __init__(self, jetstream: JetStream, store: str, id: str, size_bytes: int, digest: bytes) -> None:
        self._jetstream = jetstream
        self._store = store
        self._id = id
        self._digest = digest
        self.size_bytes = size_bytes

    @classmethod
    async def find(cls, jetstream: JetStream, store: str, name: str) -> StoredObject | None:
        """The object of this name, None without one. Raises CorruptObject, and TimeoutError as `JetStream.last`."""
        described = await jetstream.last(f"OBJ_{store}", description_subject(store, name))
        if described is None:
            return None
        description = _description(described.data)
        if description.get("deleted"):
            return None
        options = description.get("options")
        if isinstance(options, dict) and options.get("link"):
            raise CorruptObject("it is a link to another object, which is not followed")
        id, size_bytes = _id_of(description), description.get("size")
        if type(size_bytes) is not int or size_bytes < 0:
            raise CorruptObject("'size' of its description is not a number of bytes")
        return cls(jetstream, store, id, size_bytes, _digest_of(description.get("digest")))

    async def chunks(self) -> AsyncIterator[bytes]:
        """Its content, at most one chunk more than `size_bytes`.

        Raises EOFError if it ends early, CorruptObject if it is longer than announced or in too many chunks, TimeoutError
        as `find`.
        """
        left, sequence = self.size_bytes, 1
        chunk_subject = _chunk_subject(self._store, self._id)
        chunks_left = self.size_bytes // MIN_MEAN_CHUNK_BYTES + _SPARE_CHUNKS
        while left > 0:
            chunk = await self._jetstream.next(f"OBJ_{self._store}", chunk_subject, sequence)
            if chunk is None:
                raise EOFError(f"{left} of the {self.size_bytes} bytes that its description announces are missing")
            left -= len(chunk.data)
            chunks_left -= 1
            if left < 0:
                raise CorruptObject(f"it is longer than the {self.size_bytes} bytes that its description announces")
            if chunks_left < 0:
                raise CorruptObject(f"its chunks are smaller than {MIN_MEAN_CHUNK_BYTES} bytes on average")
            sequence = chunk.sequence + 1
            yield chunk.data

    async def read(self) -> bytes:
        """The whole content, checked against the digest. Raises as `chunks`."""
        content: list[bytes] = []
        hashed = hashlib.sha256()
        async for chunk in self.chunks():
            content.append(chunk)
            if len(chunk) < _OFF_LOOP_BYTES:
                hashed.update(chunk)
            else:
                await asyncio.to_thread(hashed.update, chunk)
        if hashed.digest() != self._digest:
            raise CorruptObject("its content does not have the SHA-256 digest that its description announces")
        return b"".join(content)


async def has_object(bus: Bus, store: str, name: str) -> bool:
    """Whether an object of this name exists, as the stream's leader has it. Raises NatsError or TimeoutError."""
    described = await _last_description(bus, store, name)
    if described is None:
        return False
    try:
        return not _description(described.data).get("deleted")
    except CorruptObject:
        return True


async def remove_object(bus: Bus, store: str, name: str) -> None:
    """Removes an object, if it exists. Chunks of one with a malformed description stay until they expire.

    Raises NatsError or TimeoutError.
    """
    described = await _last_description(bus, store, name)
    if described is None:
        return
    try:
        chunks = _chunk_subject(store, _id_of(_description(described.data)))
    except CorruptObject:
        chunks = ""
    # Only the object that was found: another one may be stored under its name meanwhile.
    if chunks:
        await bus.jetstream.purge(f"OBJ_{store}", chunks)
    await bus.jetstream.purge(f"OBJ_{store}", description_subject(store, name), described.sequence + 1)


async def _last_description(bus: Bus, store: str, name: str) -> StoredMessage | None:
    try:
        return await bus.jetstream.stored(f"OBJ_{store}", subject=description_subject(store, name))
    except NotFoundError:
        return None


async def list_objects(bus: Bus, store: str) -> dict[str, int]:
    """The names of a store's objects, and when each was stored (unix ms). A description that can't be read is left out.

    Raises NotFoundError where there is no such store, NatsError, OSError or TimeoutError while the broker is away.
    """
    return {name: stored_ms for name, (stored_ms, _) in (await describe_objects(bus, store)).items()}


async def describe_objects(bus: Bus, store: str) -> dict[str, tuple[int, str]]:
    """As `list_objects`, with the text that describes each object ("" without one)."""
    objects: dict[str, tuple[int, str]] = {}
    async for message in bus.jetstream.scan(f"OBJ_{store}", f"$O.{store}.M.>"):
        try:
            description = _description(message.data)
        except CorruptObject:
            continue
        name = description.get("name")
        if isinstance(name, str) and not description.get("deleted"):
            text = description.get("description")
            objects[name] = message.stored_ms, text if isinstance(text, str) else ""
    return objects


def description_subject(store: str, name: str) -> str:
    """The subject of an object's description."""
    return f"$O.{store}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


def _chunk_subject(store: str, id: str) -> str:
    return f"$O.{store}.C.{id}"


def _description(data: bytes) -> dict[str, Any]:
    try:
        description = orjson.loads(data)
    except ValueError as error:
        raise CorruptObject("its description is not JSON") from error
    if not isinstance(description, dict):
        raise CorruptObject("its description is not a JSON object")
    return description


def _id_of(description: dict[str, Any]) -> str:
    id = description.get("nuid")
    if not isinstance(id, str) or not (id.isascii() and id.isalnum()):  # it becomes part of a subject
        raise CorruptObject("'nuid' of its description has characters other than letters and digits")
    return id


def _digest_of(text: object) -> bytes:
    if not isinstance(text, str) or text[: len(_DIGEST_TYPE)].lower() != _DIGEST_TYPE:
        raise CorruptObject("its description has no SHA-256 'digest'")
    try:
        digest = base64.urlsafe_b64decode(text[len(_DIGEST_TYPE) :])
    except (binascii.Error, ValueError):
        digest = b""
    if len(digest) != _DIGEST_BYTES:
        raise CorruptObject("'digest' of its description is not a SHA-256 digest in base64")
    return digest
