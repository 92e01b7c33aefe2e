"""Memory for tensors between a worker and a model's process: growth, reuse, and bounds."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from weir.worker.python_stub._weir_memory import MemoryReader, MemoryWriter, create_memory

MIB = 1 << 20


@pytest.fixture
def fd() -> Iterator[int]:
    fd = create_memory("test")
    yield fd
    os.close(fd)


def test_placed_content_is_read_without_a_copy(fd: int) -> None:
    writer, reader = MemoryWriter(fd), MemoryReader(fd)
    places = [writer.place(content) for content in (b"a" * 5000, b"", b"bc")]
    assert [bytes(reader.view(*place)) for place in places] == [b"a" * 5000, b"", b"bc"]
    assert reader.view(*places[0]).readonly


def test_rewind_reuses_the_memory(fd: int) -> None:
    writer = MemoryWriter(fd)
    first = writer.place(b"one")
    size = os.fstat(fd).st_size
    writer.rewind()
    assert writer.place(b"two") == first
    assert os.fstat(fd).st_size == size


def test_a_reader_follows_a_memory_that_grows(fd: int) -> None:
    writer, reader = MemoryWriter(fd), MemoryReader(fd)
    small = reader.view(*writer.place(b"small"))
    large = reader.view(*writer.place(b"x" * (3 * MIB)))
    assert bytes(small) == b"small", "views of the old mapping stay valid"
    assert len(large) == 3 * MIB


def test_the_memory_can_not_shrink(fd: int) -> None:
    MemoryWriter(fd).place(b"x")
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)


@pytest.mark.parametrize("place", [(-1, 1), (0, -1), (0, MIB + 1), (MIB, 1), (1 << 62, 1 << 62)])
def test_a_place_outside_the_memory_is_an_error(fd: int, place: tuple[int, int]) -> None:
    MemoryWriter(fd).place(b"x")
    with pytest.raises(ValueError, match="outside the shared memory"):
        MemoryReader(fd).view(*place)


def test_an_empty_memory_has_no_places(fd: int) -> None:
    reader = MemoryReader(fd)
    assert bytes(reader.view(0, 0)) == b""
    with pytest.raises(ValueError, match="outside"):
        reader.view(0, 1)
