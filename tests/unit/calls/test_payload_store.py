"""Which content is placed in payload slots, and when the slots are freed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from weir.bus.payloads.arena import INLINE_LIMIT_BYTES, REMOTE_INLINE_LIMIT_BYTES, PayloadArena, PayloadBudget
from weir.bus.payloads.reach import process_reach
from weir.calls.payload_store import FRAME_INLINE_BYTES, SLOT_FROM_BYTES, PayloadStore, free_all, is_large
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import PayloadRef, Tensor
from weir.schemas.wire.request_body import body_ref

LARGE = INLINE_LIMIT_BYTES + 1


@pytest.fixture
def arena() -> Iterator[PayloadArena]:
    arena = PayloadArena("store")
    yield arena
    arena.close()


def tensor(name: str, content: bytes | memoryview) -> Tensor:
    return Tensor(name, "UINT8", [len(content)], content)


def test_only_large_tensors_are_placed(arena: PayloadArena) -> None:
    store = PayloadStore(arena, lambda model: True)
    small, large = tensor("small", b"x"), tensor("large", b"y" * LARGE)
    assert is_large(InferRequest("m", inputs=[small, large]))
    slots = store.place("m", [small, large], None)
    assert small.data == b"x"
    assert isinstance(large.data, PayloadRef)
    assert large.size_bytes == LARGE
    assert (len(slots), store.slots_in_use) == (1, 1)
    free_all(slots)
    assert store.slots_in_use == 0


def test_content_in_the_body_s_slot_is_not_copied(arena: PayloadArena) -> None:
    store = PayloadStore(arena, lambda model: True)
    slot = store.slot_for_body(3 * LARGE)
    assert slot is not None
    inside = tensor("inside", slot.view[LARGE : 2 * LARGE])
    assert store.place("m", [inside], slot) == [slot]
    assert store.slots_in_use == 1
    assert isinstance(inside.data, PayloadRef)
    assert inside.data == slot.ref(LARGE, LARGE)
    slot.free()


def test_smaller_content_of_a_body_in_a_slot_is_not_copied_either(arena: PayloadArena) -> None:
    store = PayloadStore(arena, lambda model: True)
    slot = store.slot_for_body(3 * LARGE)
    assert slot is not None
    medium, small = tensor("medium", slot.view[:2000]), tensor("small", slot.view[2000:2010])
    elsewhere = tensor("elsewhere", b"x" * 2000)
    assert store.place("m", [medium, small, elsewhere], slot) == [slot]
    assert medium.data == slot.ref(0, 2000)
    assert isinstance(small.data, memoryview)
    assert isinstance(elsewhere.data, bytes)
    slot.free()


def test_workers_on_other_hosts_get_more_content_inline(arena: PayloadArena) -> None:
    store = PayloadStore(arena, lambda model: False)
    medium, large = tensor("medium", b"x" * LARGE), tensor("large", b"y" * (REMOTE_INLINE_LIMIT_BYTES + 1))
    slots = store.place("m", [medium, large], None)
    assert isinstance(medium.data, bytes)
    assert isinstance(large.data, PayloadRef)
    free_all(slots)


def test_workers_that_can_t_fetch_get_all_content_inline(arena: PayloadArena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_reach(), "is_served", False)
    far, near = PayloadStore(arena, lambda model: False), PayloadStore(arena, lambda model: True)
    assert not far.is_within_reach("m")
    assert near.is_within_reach("m")
    slot = far.slot_for_body(2 * REMOTE_INLINE_LIMIT_BYTES)
    assert slot is not None
    inside, large = tensor("inside", slot.view), tensor("large", b"y" * (REMOTE_INLINE_LIMIT_BYTES + 1))
    assert far.place("m", [inside, large], slot) == []
    assert isinstance(inside.data, memoryview)
    assert isinstance(large.data, bytes)
    assert far.place_bodies("m", [large.data]) is None
    assert near.place("m", [inside, large], slot)[0] is slot
    assert far.bytes_without_room("m", [tensor("large", bytes(REMOTE_INLINE_LIMIT_BYTES + 1))]) == 0
    slot.free()


def test_small_bodies_need_no_slot(arena: PayloadArena) -> None:
    store = PayloadStore(arena, lambda model: True)
    assert store.slot_for_body(SLOT_FROM_BYTES) is None
    assert store.place_bodies("m", [b"x" * FRAME_INLINE_BYTES]) is None


def test_the_slot_of_several_bodies_is_freed_with_the_last(arena: PayloadArena) -> None:
    store = PayloadStore(arena, lambda model: True)
    placed = store.place_bodies("m", [b"x" * FRAME_INLINE_BYTES, b"yy"])
    assert placed is not None
    refs, slot = placed
    assert [ref.size for ref in map(body_ref, refs) if ref is not None] == [FRAME_INLINE_BYTES, 2]
    slot.free()
    assert store.slots_in_use == 1
    slot.free()
    assert store.slots_in_use == 0


def test_a_failing_resource_does_not_keep_the_others(arena: PayloadArena) -> None:
    class Failing:
        def free(self) -> None:
            raise RuntimeError("no")

    slot = arena.allocate(10)
    assert slot is not None
    free_all([Failing(), slot])
    assert arena.slots_in_use == 0


def test_bytes_that_have_no_room_now_are_those_that_would_fit_into_empty_memory() -> None:
    budget = PayloadBudget(1 << 20)
    arena = PayloadArena("short", budget=budget)
    store = PayloadStore(arena, lambda model: True)
    try:
        first, second = tensor("first", b"x" * 300_000), tensor("second", b"x" * 300_000)
        slots = store.place("m", [first], None) + store.place("m", [second], None)
        assert isinstance(first.data, PayloadRef)
        assert not isinstance(second.data, PayloadRef)  # two slots of 512 KiB, with their headers, are over 1 MiB
        small = tensor("small", b"y")
        assert store.bytes_without_room("m", [first, second, small]) == 300_000
        assert store.bytes_without_room("m", [tensor("never", b"x" * (2 << 20)), small]) == 0
        assert store.bytes_without_room("m", [second, tensor("beside it", b"x" * 300_000)]) == 0
        elsewhere = PayloadStore(arena, lambda model: False)
        assert elsewhere.bytes_without_room("m", [tensor("in the message", b"x" * 100_000)]) == 0
    finally:
        free_all(slots)
        arena.close()
