"""Large inputs as a model sees them: private mappings, and copies of payloads that may be released meanwhile."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import weir.worker.python_stub
from weir.bus.payloads.arena import PayloadArena, Slot
from weir.worker.python_stub._weir_memory import MemoryWriter, create_memory

_STUB_FOLDER = str(Path(weir.worker.python_stub.__file__).parent)
sys.path.insert(0, _STUB_FOLDER)
from _weir_shared_memory import InputMemory, Segments  # noqa: E402

sys.path.remove(_STUB_FOLDER)


@pytest.fixture
def fd() -> Iterator[int]:
    fd = create_memory("test")
    yield fd
    os.close(fd)


@pytest.fixture
def slot() -> Iterator[Slot]:
    arena = PayloadArena(f"test_{uuid.uuid4().hex[:8]}")
    slot = arena.allocate(8)
    assert slot is not None
    slot.view[:8] = b"payload!"
    yield slot
    arena.close()


def test_an_input_is_writable_and_the_memory_unchanged(fd: int) -> None:
    place = MemoryWriter(fd).place(b"\1" * 5000)
    array = InputMemory(fd).array(place)
    array[:] = 7
    assert os.pread(fd, 2, place[0]) == b"\1\1"


@pytest.mark.parametrize("is_detached", [True, False])
def test_a_detached_input_does_not_follow_the_memory(fd: int, is_detached: bool) -> None:
    writer, inputs = MemoryWriter(fd), InputMemory(fd)
    array = inputs.array(writer.place(b"\1" * 5000))
    if is_detached:
        inputs.detach()
    writer.rewind()
    writer.place(b"\2" * 5000)
    assert set(array.tolist()) == {1 if is_detached else 2}


@pytest.mark.parametrize("place", [(-4096, 8), (0, 0), (0, 1 << 40), (1 << 40, 8)])
def test_an_input_outside_its_memory_is_an_error(fd: int, place: tuple[int, int]) -> None:
    MemoryWriter(fd).place(b"x")
    with pytest.raises(ValueError, match="outside its shared memory"):
        InputMemory(fd).array(place)


@pytest.mark.parametrize("name", ["../etc/passwd", "other", "weir-a/b", "", "weir-\n"])
def test_only_segments_of_weir_are_opened(name: str) -> None:
    with pytest.raises(ValueError, match="not a shared-memory segment"):
        Segments().open(name)


def test_a_payload_is_copied(slot: Slot) -> None:
    ref = slot.ref()
    assert Segments().copy(*ref).tobytes() == b"payload!"
    assert Segments().copy(*slot.ref(3, 2)).tobytes() == b"lo"


def test_a_payload_that_was_released_is_an_error(slot: Slot) -> None:
    ref = slot.ref()
    slot.free()
    with pytest.raises(ValueError, match="released before it was read"):
        Segments().copy(*ref)


def test_a_segment_that_was_removed_is_an_error(slot: Slot) -> None:
    segments, ref = Segments(), slot.ref()
    segments.open(ref.segment)
    (Path("/dev/shm") / ref.segment).unlink()
    with pytest.raises(OSError, match=ref.segment):
        segments.copy(*ref)


def test_a_mapping_ends_with_its_array(fd: int) -> None:
    inputs = InputMemory(fd)
    array = inputs.array(MemoryWriter(fd).place(b"x" * 8))
    address = array.__array_interface__["data"][0]
    maps = Path("/proc/self/maps")
    assert f"{address:x}-" in maps.read_text()
    del array
    assert f"{address:x}-" not in maps.read_text()
    inputs.detach()
    np.testing.assert_array_equal(inputs.array((0, 1)), [ord("x")])
