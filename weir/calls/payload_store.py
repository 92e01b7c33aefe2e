"""`PayloadStore`: payload slots for a caller's content that is too large for messages. Workers read or fetch it there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from weir.bus.naming.identity import host_of, owner_of
from weir.bus.payloads.arena import INLINE_LIMIT_BYTES, PayloadArena, Slot
from weir.bus.payloads.reach import process_reach
from weir.runtime.containment import contained
from weir.schemas.core.errors import invalid, overloaded
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import PayloadRef, Tensor
from weir.schemas.wire.request_body import pack_body_ref

FRAME_INLINE_BYTES = 64 * 1024
"""Bodies of a frame, together, that travel inside the frame; larger ones share a payload slot.

The broker copies each message, and a slot costs the gateway and the worker a message of its own to release it. A worker
runs a batch whose bodies lie in a slot in the instance's thread, which costs more than a fast model (measured).
"""

SLOT_FROM_BYTES = INLINE_LIMIT_BYTES + 4096
"""A larger body is received in a payload slot. Without its JSON header, its content is then too large for a message."""

_MESSAGE_OVERHEAD_BYTES = 4096  # for the envelope and the subject beside a body

_REFERRED_FROM_BYTES = 1024
"""Content that was received in a slot is copied into the message if it is smaller than that."""


class Freeable(Protocol):
    """A resource that a request holds until it ends."""

    def free(self) -> None:
        """Frees the resource."""


class SharedSlot:
    """A slot (or another resource) that several requests use, freed with the last of them."""

    __slots__ = ("_slot", "_users")

    def __init__(self, slot: Freeable, users: int) -> None:
        self._slot = slot
        self._users = users

    def free(self) -> None:
        """Ends the use by one of the requests."""
        self._users -= 1
        if self._users == 0:
            self._slot.free()


class PayloadStore:
    """Slots for request bodies and tensors. `is_shared(model)`: whether every worker of the model is on this host."""

    def __init__(self, arena: PayloadArena, is_shared: Callable[[str], bool]) -> None:
        self._arena = arena
        self._is_shared = is_shared

    @property
    def slots_in_use(self) -> int:
        """Slots that are allocated."""
        return self._arena.slots_in_use

    def slot_for_body(self, size_bytes: int) -> Slot | None:
        """A slot to receive a request body of this size in; None if it should be received in ordinary memory."""
        if size_bytes <= SLOT_FROM_BYTES:
            return None
        return self._arena.allocate(size_bytes)

    def hold(
        self, model: str, request: InferRequest, regions: RegionRegistry | None, body_slot: Slot | None
    ) -> list[Freeable]:
        """Places large tensors in payload slots and holds clients' regions. Returns what to free when the request ends."""
        held: list[Freeable] = []
        if request.regions:
            if regions is None:
                raise invalid("shared memory regions can't be used here")
            held.append(regions.hold(model, request.regions))
        if body_slot is not None or is_large(request):
            try:
                held += self.place(model, request.inputs, body_slot)
            except Exception:
                free_all(held)
                raise
        return held

    def place(self, model: str, tensors: Iterable[Tensor], body_slot: Slot | None) -> list[Slot]:
        """Replaces the content of large tensors by references; returns the slots that hold it, including `body_slot` if
        used.

        A view over `body_slot` becomes a reference without a copy, even if it is smaller; other content is copied into a
        slot once. Without free memory, content stays where it is and travels inside the message.
        """
        slots: list[Slot] = []
        is_shared = self._is_shared(model)
        limit_bytes = self._inline_limit_bytes(model)
        least_bytes = _REFERRED_FROM_BYTES if is_shared and body_slot is not None else limit_bytes
        start = 0 if body_slot is None else _address(body_slot.view)
        for tensor in tensors:
            data = tensor.data
            if isinstance(data, tuple) or len(data) <= least_bytes:
                continue
            if body_slot is not None and 0 <= (offset := _address(data) - start) <= body_slot.size - len(data):
                tensor.data = body_slot.ref(offset, len(data))
                if body_slot not in slots:
                    slots.append(body_slot)
                continue
            slot = self._arena.allocate(len(data)) if len(data) > limit_bytes else None
            if slot is not None:
                slot.view[:] = data
                tensor.data = slot.ref()
                slots.append(slot)
        return slots

    def check_size(self, model: str, tensors: Iterable[Tensor], size_bytes: int, message_bytes: int) -> None:
        """Raises WeirError for a body that no message takes: UNAVAILABLE where only shared memory is short for it now.

        `size_bytes` are those of the body, after `place`; `message_bytes` is the limit of the broker.
        """
        limit_bytes = message_bytes - _MESSAGE_OVERHEAD_BYTES
        if size_bytes <= limit_bytes:
            return
        if size_bytes - self.bytes_without_room(model, tensors) <= limit_bytes:
            raise overloaded("the shared memory for large tensors is full; try again later")
        is_reached = self.is_within_reach(model)
        why = "" if is_reached else " on another host: larger tensors need --payload-listen in this process"
        raise invalid(
            f"the request of {size_bytes} bytes is larger than the {message_bytes} bytes that can be sent to a worker{why}"
        )

    def bytes_without_room(self, model: str, tensors: Iterable[Tensor]) -> int:
        """The bytes of the tensors that `place` has left in the message because memory is short now.

        0 if they would not fit even while no other request holds memory.
        """
        limit_bytes = self._inline_limit_bytes(model)
        left = [tensor.size_bytes for tensor in tensors if not isinstance(tensor.data, PayloadRef)]
        large = [size for size in left if size > limit_bytes]
        return sum(large) if self._arena.could_hold(large) else 0

    def is_within_reach(self, model: str) -> bool:
        """Whether the workers of the model can read or fetch what lies in slots."""
        return process_reach().is_served or self._is_shared(model)

    def _inline_limit_bytes(self, model: str) -> int:
        return process_reach().inline_limit_bytes(self._is_shared(model))

    def place_bodies(self, model: str, bodies: Sequence[bytes]) -> tuple[list[bytes], SharedSlot] | None:
        """Copies the packed bodies of a frame into one slot; returns the references that replace them, and the slot.

        None when they are small enough for a message, or memory is short. Where a worker of the model may have to fetch
        them one by one, only a body that is large by itself, and therefore alone in its frame, is placed.
        """
        total = sum(map(len, bodies))
        if total <= FRAME_INLINE_BYTES:
            return None
        if not self._is_shared(model) and (len(bodies) > 1 or total <= process_reach().inline_limit_bytes(False)):
            return None
        slot = self._arena.allocate(total)
        if slot is None:
            return None
        refs: list[bytes] = []
        offset = 0
        for body in bodies:
            end = offset + len(body)
            slot.view[offset:end] = body
            refs.append(pack_body_ref(slot.ref(offset, len(body))))
            offset = end
        return refs, SharedSlot(slot, len(bodies))

    def close(self) -> None:
        """Removes the shared memory."""
        self._arena.close()


def is_large(request: InferRequest) -> bool:
    """Whether any tensor of the request is too large for a message."""
    return any(tensor.size_bytes > INLINE_LIMIT_BYTES for tensor in request.inputs)


def free_all(held: Iterable[Freeable]) -> None:
    """Frees all of these resources."""
    for each in held:
        _free(each)


@contained()
def _free(each: Freeable) -> None:
    each.free()


def host_of_payloads(tensors: Iterable[Tensor]) -> str:
    """The host that holds the largest tensor in a payload slot, "" without any."""
    largest = max((tensor.data for tensor in tensors if isinstance(tensor.data, PayloadRef)), key=_size, default=None)
    return "" if largest is None else host_of(owner_of(largest.segment))


def _size(ref: PayloadRef) -> int:
    return ref.size


def _address(data: bytes | memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


class RegionRegistry(Protocol):
    """The registry of clients' shared-memory regions, as callers use it."""

    def hold(self, model: str, names: Sequence[str]) -> Freeable:
        """Keeps regions registered until the request ends. Raises WeirError (UNSUPPORTED) if the model's workers lack
        them.
        """
