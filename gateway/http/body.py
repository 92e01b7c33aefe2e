"""`RequestBody`: the body of an inference request while it arrives, and the memory that it holds.

It is received directly into the memory from which it will be read: a shared-memory slot if it is large, placed so that
the tensors behind the JSON header are aligned.
"""

from __future__ import annotations

import asyncio
from typing import Any

from weir.bus.payloads.arena import ALIGNMENT_BYTES, Slot
from weir.calls.payload_store import PayloadStore
from weir.gateway.http.compression import IN_PLACE_BYTES, BodyInflation
from weir.gateway.inflation import inflate
from weir.http_server.connection_memory import ConnectionMemory, no_memory
from weir.schemas.core.errors import WeirError

SLOT_AFTER_BYTES = 16 * 1024
SLOT_AFTER_SHARE = 8
"""A body gets a payload slot, which reserves memory for all of it, only after this many bytes have arrived, and an eighth
(one of `SLOT_AFTER_SHARE` parts) of its announced size. Until then it is kept in ordinary memory."""

_BODY = "http"
_DECOMPRESSED = "decompressed"


class RequestBody:
    """A body of `announced` bytes (0: unknown), of which `received` have arrived."""

    __slots__ = (
        "_announced",
        "_data",
        "_held_bytes",
        "_inflated_bytes",
        "_memory",
        "_payloads",
        "_slot_after",
        "_slot_bytes",
        "padding",
        "received",
        "slot",
    )

    def __init__(self, memory: ConnectionMemory, payloads: PayloadStore, announced: int) -> None:
        self._announced = announced
        self._data: Any = b""
        self._held_bytes = 0  # charged for `_data`
        self._inflated_bytes = 0
        self._memory = memory
        self._payloads = payloads
        self._slot_after = 0  # bytes after which it gets a slot; 0: never
        self._slot_bytes = 0  # charged for the slot while the body arrives
        self.padding = 0
        """Bytes of the slot before the body."""
        self.received = 0
        self.slot: Slot | None = None
        """The payload slot that holds it; the exchange sets None once the request owns the slot."""

    def plan_slot(self, header_bytes: int) -> None:
        """Has the body, which begins with a JSON header of this length, received in a slot once enough has arrived."""
        self.padding = -header_bytes % ALIGNMENT_BYTES
        self._slot_after = max(SLOT_AFTER_BYTES, self._announced // SLOT_AFTER_SHARE)

    def rejection(self) -> WeirError | None:
        """The error for a body of the announced size if memory has no room for it now. Charges nothing yet."""
        account, size = self._memory.account, self._announced
        if account.fits(size) or (self._slot_after and self._memory.slots.fits(_slot_size(size + self.padding))):
            return None
        account.refuse(_BODY)
        return no_memory()

    @property
    def content(self) -> bytes | bytearray | memoryview:
        """What has arrived, where it was received, or its decompressed content."""
        if self.slot is None:
            return self._data  # type: ignore[no-any-return]
        return self.slot.view[self.padding : self.padding + self.received]

    def receive(self, data: bytes) -> bool:
        """Takes the next piece, which `received` counts already. Returns False if memory has no room for it."""
        if self._slot_after and self.received >= self._slot_after:
            self._take_slot()
        if self.slot is not None:
            end = self.padding + self.received
            self.slot.view[end - len(data) : end] = data
            return True
        if not self._data:
            self._data = data
        else:
            if type(self._data) is bytes:
                self._data = bytearray(self._data)
            self._data += data
        if not self._memory.account.charge(_BODY, self.received - self._held_bytes):
            return False
        self._held_bytes = self.received
        return True

    def space(self) -> memoryview | None:
        """The memory of the slot for the rest of the body; None without one."""
        if self.slot is None or self.received >= self._announced:
            return None
        return self.slot.view[self.padding + self.received : self.padding + self._announced]

    def _take_slot(self) -> None:
        """Moves what has arrived into a payload slot. Without a free slot it stays where it is."""
        self._slot_after = 0
        size = max(self._announced, self.received) + self.padding
        slot_bytes = _slot_size(size)
        if not self._memory.slots.charge(_BODY, slot_bytes):
            return
        self.slot = self._payloads.slot_for_body(size)
        if self.slot is None:
            self._memory.slots.release(_BODY, slot_bytes)
            return
        self._slot_bytes = slot_bytes
        self.slot.view[self.padding : self.padding + len(self._data)] = self._data
        self._data = b""
        self._memory.account.release(_BODY, self._held_bytes)
        self._held_bytes = 0

    def complete(self) -> None:
        """All of it has arrived: its slot is not an arriving one any more."""
        if self._slot_bytes:
            self._memory.slots.release(_BODY, self._slot_bytes)
            self._slot_bytes = 0

    def inflate(self, compressed: bytes | bytearray | memoryview, limit_bytes: int) -> asyncio.Task[None] | None:
        """Sets `content` to what is in `compressed`; for a large body a task does that in threads. Raises WeirError."""
        inflation = BodyInflation(compressed, limit_bytes)
        is_complete = inflation.advance(IN_PLACE_BYTES)
        size = inflation.size_bytes
        if not self._charge_inflated(size):
            raise no_memory()
        if is_complete:
            self._data = inflation.content
            return None
        return asyncio.get_running_loop().create_task(self._inflate_rest(inflation, size))

    async def _inflate_rest(self, inflation: BodyInflation, charged_bytes: int) -> None:
        await inflate(inflation, self._charge_inflated, no_memory, charged_bytes)
        self._data = inflation.content

    def _charge_inflated(self, size: int) -> bool:
        if not self._memory.account.charge(_DECOMPRESSED, size):
            return False
        self._inflated_bytes += size
        return True

    def release(self) -> None:
        """Releases all memory that it holds."""
        if self.slot is not None:
            self.slot.free()
            self.slot = None
        self.complete()
        self._memory.account.release(_BODY, self._held_bytes)
        self._memory.account.release(_DECOMPRESSED, self._inflated_bytes)
        self._held_bytes = self._inflated_bytes = 0
        self._data = b""


def _slot_size(size: int) -> int:
    """How much memory the slot for a body of `size` bytes reserves."""
    return 1 << (size - 1).bit_length()
