"""`StoredObject`: an object of an object store, read chunk by chunk, as fast as its reader takes it.

Whoever may write to the store decides what a description and the chunks contain, so nothing of them is trusted: no more
is read than the description announces, and links to other stores are not followed.
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

from bus.connection import Bus
from bus.stored_messages import StoredMessages

MIN_MEAN_CHUNK_BYTES = 1024
"""An object in smaller chunks than this, on average, is refused: each costs a round trip (clients write 128 KiB)."""

_SPARE_CHUNKS = 16
_DIGEST_TYPE = "sha-256="
_DIGEST_BYTES = 32
_OFF_LOOP_BYTES = 1 << 20  # hashing this much takes about a millisecond


class DamagedObject(ValueError):
    """The object's description cannot be read, or its content is not what the description says. The text says which."""


class StoredObject:
    """One stored object, read in chunks. `size_bytes` is the size that its description announces, and the most it reads."""

    def __init__(self, messages: StoredMessages, store: str, id: str, size_bytes: int, digest: bytes) -> None:
        self._messages = messages
        self._store = store
        self._id = id
        self._digest = digest
        self.size_bytes = size_bytes

    @classmethod
    async def find(cls, messages: StoredMessages, store: str, name: str) -> StoredObject | None:
        """The object of this name; None where there is none. Raises DamagedObject, and TimeoutError as `messages`."""
        described = await messages.last(f"OBJ_{store}", description_subject(store, name))
        if described is None:
            return None
        told = _description(described.data)
        if told.get("deleted"):
            return None
        options = told.get("options")
        if isinstance(options, dict) and options.get("link"):
            raise DamagedObject("it is a link to another object, which is not followed")
        id, size_bytes = _id_of(told), told.get("size")
        if type(size_bytes) is not int or size_bytes < 0:
            raise DamagedObject("'size' of its description is not a number of bytes")
        return cls(messages, store, id, size_bytes, _digest_of(told.get("digest")))

    async def chunks(self) -> AsyncIterator[bytes]:
        """Its content, at most one chunk more than `size_bytes`.

        Raises EOFError where it ends early, DamagedObject where it is longer than announced or comes in too many pieces,
        TimeoutError as `find`.
        """
        left, sequence = self.size_bytes, 1
        chunk_subject = _chunk_subject(self._store, self._id)
        chunks_left = self.size_bytes // MIN_MEAN_CHUNK_BYTES + _SPARE_CHUNKS
        while left > 0:
            chunk = await self._messages.next(f"OBJ_{self._store}", chunk_subject, sequence)
            if chunk is None:
                raise EOFError(f"{left} of the {self.size_bytes} bytes that its description announces are missing")
            left -= len(chunk.data)
            chunks_left -= 1
            if left < 0:
                raise DamagedObject(f"it is longer than the {self.size_bytes} bytes that its description announces")
            if chunks_left < 0:
                raise DamagedObject(f"its chunks are smaller than {MIN_MEAN_CHUNK_BYTES} bytes on average")
            sequence = chunk.sequence + 1
            yield chunk.data

    async def read(self) -> bytes:
        """All of its content, checked against the digest. Raises as `chunks`."""
        content: list[bytes] = []
        hashed = hashlib.sha256()
        async for chunk in self.chunks():
            content.append(chunk)
            if len(chunk) < _OFF_LOOP_BYTES:
                hashed.update(chunk)
            else:
                await asyncio.to_thread(hashed.update, chunk)
        if hashed.digest() != self._digest:
            raise DamagedObject("its content does not have the SHA-256 digest that its description announces")
        return b"".join(content)


async def has_object(bus: Bus, store: str, name: str) -> bool:
    """Whether an object of this name is there, as the stream's leader knows. Raises NatsError or TimeoutError."""
    described = await _last_description(bus, store, name)
    if described is None:
        return False
    try:
        return not _description(described[1]).get("deleted")
    except DamagedObject:
        return True


async def remove_object(bus: Bus, store: str, name: str) -> None:
    """Removes an object, if it is there; chunks of one whose description can't be read go when they are old enough.

    Raises NatsError or TimeoutError.
    """
    described = await _last_description(bus, store, name)
    if described is None:
        return
    sequence, data = described
    try:
        chunks = _chunk_subject(store, _id_of(_description(data)))
    except DamagedObject:
        chunks = ""
    # Exactly the object that was found: another one may be stored under its name meanwhile.
    if chunks:
        await bus.ask(f"$JS.API.STREAM.PURGE.OBJ_{store}", {"filter": chunks})
    await bus.ask(
        f"$JS.API.STREAM.PURGE.OBJ_{store}", {"filter": description_subject(store, name), "seq": sequence + 1}
    )


async def _last_description(bus: Bus, store: str, name: str) -> tuple[int, bytes] | None:
    question = {"last_by_subj": description_subject(store, name)}
    answer = await bus.ask(f"$JS.API.STREAM.MSG.GET.OBJ_{store}", question)
    message = answer.get("message")
    if not isinstance(message, dict):
        return None
    return int(message["seq"]), base64.b64decode(message.get("data") or b"")


def description_subject(store: str, name: str) -> str:
    """The subject of an object's description."""
    return f"$O.{store}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


def _chunk_subject(store: str, id: str) -> str:
    return f"$O.{store}.C.{id}"


def _description(data: bytes) -> dict[str, Any]:
    try:
        told = orjson.loads(data)
    except ValueError as error:
        raise DamagedObject("its description is not JSON") from error
    if not isinstance(told, dict):
        raise DamagedObject("its description is not a JSON object")
    return told


def _id_of(told: dict[str, Any]) -> str:
    id = told.get("nuid")
    if not isinstance(id, str) or not (id.isascii() and id.isalnum()):  # it is made part of a subject
        raise DamagedObject("'nuid' of its description is not a word of letters and digits")
    return id


def _digest_of(text: object) -> bytes:
    if not isinstance(text, str) or text[: len(_DIGEST_TYPE)].lower() != _DIGEST_TYPE:
        raise DamagedObject("its description has no SHA-256 'digest'")
    try:
        digest = base64.urlsafe_b64decode(text[len(_DIGEST_TYPE) :])
    except (binascii.Error, ValueError):
        digest = b""
    if len(digest) != _DIGEST_BYTES:
        raise DamagedObject("'digest' of its description is not a SHA-256 digest in base64")
    return digest
