"""`StoredObject`: an object of an object store, read chunk by chunk, as fast as its reader takes it.

Source: NATS ADR-20 (object store): a description on `$O.<store>.M.<name>`, chunks on `$O.<store>.C.<id>`.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator

import orjson

from bus.stored_messages import StoredMessages


class StoredObject:
    """See the module. `size_bytes` is that of all of it."""

    def __init__(self, messages: StoredMessages, store: str, id: str, size_bytes: int) -> None:
        self._messages = messages
        self._store = store
        self._id = id
        self.size_bytes = size_bytes

    @classmethod
    async def find(cls, messages: StoredMessages, store: str, name: str) -> StoredObject | None:
        """The object of this name; None where it is not there, or not any more. Raises TimeoutError as `messages`."""
        encoded = base64.urlsafe_b64encode(name.encode()).decode()
        described = await messages.last(f"OBJ_{store}", f"$O.{store}.M.{encoded}")
        if described is None:
            return None
        try:
            told = orjson.loads(described.data)
            if told.get("deleted"):
                return None
            id, size_bytes = str(told["nuid"]), int(told["size"])
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        return cls(messages, store, id, size_bytes) if id.isalnum() else None

    async def chunks(self) -> AsyncIterator[bytes]:
        """Its content. Raises EOFError where it is gone before its end, TimeoutError as `find`."""
        left, sequence = self.size_bytes, 1
        while left > 0:
            chunk = await self._messages.next(f"OBJ_{self._store}", f"$O.{self._store}.C.{self._id}", sequence)
            if chunk is None:
                raise EOFError("the object is gone")
            left -= len(chunk.data)
            sequence = chunk.sequence + 1
            yield chunk.data
