"""Payload slots: no stale bytes unnoticed, and no segments left of dead processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weir.bus.naming.identity import SHARED_MEMORY_DIRECTORY, new_id
from weir.bus.payloads.arena import (
    ALIGNMENT_BYTES,
    LeasedSlots,
    PayloadArena,
    PayloadBudget,
    PayloadReader,
    Slot,
    StalePayload,
    remove_dead_segments,
)
from weir.schemas.core.tensors import PayloadRef


@pytest.fixture
def arena() -> Iterator[PayloadArena]:
    opened = PayloadArena(new_id("test"), capacity_bytes=4 << 20)
    yield opened
    opened.close()


def test_what_is_written_is_read_in_place(arena: PayloadArena) -> None:
    slot = arena.allocate(100_000)
    assert slot is not None
    slot.view[:] = b"x" * 99_999 + b"y"
    reader = PayloadReader()
    assert bytes(reader.view(slot.ref())) == b"x" * 99_999 + b"y"
    assert bytes(reader.view(slot.ref(99_998))) == b"xy"
    assert bytes(reader.view(slot.ref(0, 3))) == b"xxx"
    with pytest.raises(TypeError):
        reader.view(slot.ref())[0] = 1


def test_payloads_are_aligned(arena: PayloadArena) -> None:
    for _ in range(3):
        slot = arena.allocate(70_000)
        assert slot is not None
        assert slot.ref().offset % ALIGNMENT_BYTES == 0


def test_a_slot_given_back_is_used_again_and_its_references_are_stale(arena: PayloadArena) -> None:
    first = arena.allocate(100_000)
    assert first is not None
    reference = first.ref()
    reader = PayloadReader()
    reader.view(reference)
    first.free()
    assert not reader.is_current(reference)
    with pytest.raises(StalePayload):
        reader.view(reference)
    second = arena.allocate(100_000)
    assert second is not None
    assert (second.offset, second.generation) == (first.offset, first.generation + 1)
    with pytest.raises(StalePayload):
        reader.view(reference)
    first.free()  # once more, too late: the slot is another's now
    assert reader.is_current(second.ref())


def test_a_full_arena_refuses(arena: PayloadArena) -> None:
    slots = []
    while (slot := arena.allocate(1 << 20)) is not None:
        slots.append(slot)
    assert 1 <= len(slots) <= 4
    slots[0].free()
    assert arena.allocate(1 << 20) is not None
    assert arena.allocate(1 << 30) is None


def test_arenas_hold_no_more_than_their_budget_together() -> None:
    budget = PayloadBudget(4 << 20)
    first, second = (PayloadArena(new_id("test"), budget=budget) for _ in range(2))
    kept = [arena.allocate(1 << 20) for arena in (first, second, first)]
    assert all(kept)
    assert second.allocate(1 << 20) is None
    assert budget.held_bytes <= 4 << 20
    first.close()
    assert second.allocate(2 << 20) is not None
    second.close()
    assert budget.held_bytes == 0


def test_slots_that_are_not_used_any_more_give_their_memory_to_those_of_another_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = PayloadBudget(8 << 20)
    arena = PayloadArena(new_id("test"), budget=budget)
    small: list[Slot] = []
    while (slot := arena.allocate(1 << 20)) is not None:
        slot.view[:8] = b"contents"
        small.append(slot)
    references, in_use = [slot.ref() for slot in small], small.pop()
    for slot in small:
        slot.free()
    assert arena.allocate(4 << 20) is None, "a reader may still be reading"
    monkeypatch.setattr("weir.bus.payloads.arena.RECLAIM_AFTER_S", 0.0)
    large = arena.allocate(4 << 20)
    assert large is not None
    assert budget.held_bytes <= 8 << 20
    assert os.stat(SHARED_MEMORY_DIRECTORY / in_use.ref().segment).st_blocks * 512 < len(references) << 20
    reader = PayloadReader()
    assert bytes(reader.view(in_use.ref(0, 8))) == b"contents"
    for reference in references[:-1]:
        with pytest.raises(StalePayload):
            reader.view(reference)
    large.free()
    again = [arena.allocate(1 << 20) for _ in small]
    assert all(again)
    assert not any(reader.is_current(reference) for reference in references[:-1]), "generations outlast their memory"
    assert reader.is_current(references[-1])
    arena.close()
    assert budget.held_bytes == 0


@pytest.mark.parametrize("segment", ["../etc/passwd", "weir-x.1/../y", "other", "", "weir-a b.1", None, 7])
def test_a_reader_opens_nothing_but_segments(segment: str) -> None:
    with pytest.raises(ValueError):
        PayloadReader().view(PayloadRef(segment, 0, 0, 64, 8))


@pytest.mark.parametrize(
    ("slot", "offset", "size"), [(-64, 64, 8), (0, 8, 8), (0, 64, -1), (0, 64, 1 << 40), (1 << 40, 64, 8), (64, 64, 8)]
)
def test_a_reader_reads_nothing_outside_of_segments(arena: PayloadArena, slot: int, offset: int, size: int) -> None:
    given = arena.allocate(100_000)
    assert given is not None
    with pytest.raises(ValueError):
        PayloadReader().view(PayloadRef(given.ref().segment, slot, 0, offset, size))


def test_a_removed_segment_is_stale(arena: PayloadArena) -> None:
    slot = arena.allocate(100_000)
    assert slot is not None
    reference = slot.ref()
    arena.close()
    with pytest.raises(StalePayload):
        PayloadReader().view(reference)


def test_a_reader_drops_mappings_of_removed_segments(arena: PayloadArena) -> None:
    reader = PayloadReader()
    for number in range(5):
        former = PayloadArena(new_id(f"former{number}"))
        slot = former.allocate(100_000)
        assert slot is not None
        reader.view(slot.ref())
        former.close()
    slot = arena.allocate(100_000)
    assert slot is not None
    reader.view(slot.ref())
    assert list(reader.segments) == [slot.ref().segment]


def test_lent_slots_come_back_by_word_or_in_time(arena: PayloadArena) -> None:
    now = 0.0
    leases = LeasedSlots(lease_s=10.0, clock=lambda: now)
    slots = [arena.allocate(100_000) for _ in range(3)]
    references = [leases.lend(slot) for slot in slots if slot is not None]
    reader = PayloadReader()
    first = references[0]
    leases.give_back(first.segment, first.slot, first.generation)
    leases.give_back(first.segment, first.slot, first.generation)
    leases.give_back("weir-unknown.1", 0, 0)
    now = 9.9
    leases.expire()
    assert [reader.is_current(reference) for reference in references if reader.view_unchecked(reference)] == [
        False,
        True,
        True,
    ]
    now = 10.1
    leases.expire()
    assert len(leases) == 0
    assert not any(map(reader.is_current, references))


def test_segments_of_the_dead_are_removed_and_those_of_the_living_stay(arena: PayloadArena) -> None:
    slot = arena.allocate(100_000)
    assert slot is not None
    code = (
        "import os, signal, sys; from weir.bus.payloads.arena import PayloadArena\n"
        "print(PayloadArena(sys.argv[1]).allocate(100_000).ref().segment, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    died = subprocess.run([sys.executable, "-c", code, new_id("test")], capture_output=True, text=True)
    left = SHARED_MEMORY_DIRECTORY / died.stdout.strip()
    # Another process that starts just now may have removed it before.
    remove_dead_segments()
    assert left.name.startswith("weir-test-")
    assert not left.exists()
    assert (SHARED_MEMORY_DIRECTORY / slot.ref().segment).exists()


def test_a_file_just_made_is_not_taken_for_a_dead_one_s(tmp_path: Path) -> None:
    (tmp_path / ".weir-new.131072").touch()
    (tmp_path / "weir-old.131072").touch()
    (tmp_path / "other").touch()
    assert remove_dead_segments(tmp_path) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [".weir-new.131072", "other"]
