"""Clients' memory objects: nothing outside a region is touched, whatever happens to the object."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weir.bus.naming.identity import SHARED_MEMORY_DIRECTORY
from weir.bus.payloads.client_regions import RegionError, file_name, object_facts, read_region, write_region
from weir.schemas.core.tensors import RegionRef

SIZE = 3 * 4096
CONTENT = bytes(range(256)) * (SIZE // 256)
GUARD = b"\x5a" * 64


@pytest.fixture
def path() -> Iterator[Path]:
    """A client's object with known content."""
    made = SHARED_MEMORY_DIRECTORY / f"test_{secrets.token_hex(6)}"
    made.write_bytes(CONTENT)
    yield made
    made.unlink(missing_ok=True)


def place(path: Path, offset: int, size: int) -> RegionRef:
    return RegionRef(path.name, path.stat().st_ino, offset, size)


def read(ref: RegionRef, size: int | None = None) -> bytes:
    """What is read for `ref`, having looked that nothing around the target has changed."""
    length = ref.size if size is None else size
    buffer = bytearray(GUARD + bytes(length) + GUARD)
    try:
        read_region(ref, memoryview(buffer)[64 : 64 + length])
    finally:
        assert buffer.startswith(GUARD)
        assert buffer.endswith(GUARD)
    return bytes(buffer[64:-64])


ends = st.integers(0, SIZE + 5000)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(offset=ends, size=ends, length=ends, cut=st.none() | st.integers(0, 2 * SIZE))
def test_nothing_outside_is_read_or_written(path: Path, offset: int, size: int, length: int, cut: int | None) -> None:
    path.write_bytes(CONTENT)
    ref = place(path, offset, size)
    if cut is not None:
        os.truncate(path, cut)
    before = path.read_bytes()
    inside = offset + size <= len(before)
    if inside:
        assert read(ref) == before[offset : offset + size]
    else:
        with pytest.raises(RegionError):
            read(ref)
    assert path.read_bytes() == before
    content = b"\xee" * length
    if inside and length <= size:
        write_region(ref, memoryview(content))
        assert path.read_bytes() == before[:offset] + content + before[offset + length :]
    else:
        with pytest.raises(RegionError):
            write_region(ref, content)
        assert path.read_bytes() == before


def test_the_object_must_be_the_one_that_was_registered(path: Path) -> None:
    ref = place(path, 0, 16)
    aside = path.with_name(f"{path.name}_aside")
    path.rename(aside)
    try:
        for text in ("Unable to open shared memory region", "is not the one that was registered"):
            with pytest.raises(RegionError, match=text):
                read(ref)
            with pytest.raises(RegionError, match=text):
                write_region(ref, b"x")
            path.write_bytes(CONTENT)
        assert path.read_bytes() == CONTENT
    finally:
        aside.unlink()


def test_no_file_but_a_client_s_memory_is_opened(path: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(CONTENT)
    inode = secret.stat().st_ino
    link = path.with_name(f"{path.name}_link")
    link.symlink_to(secret)
    try:
        names = [link.name, os.path.relpath(secret, SHARED_MEMORY_DIRECTORY), str(secret), "..", ".", "", "weir-x.1"]
        for name in names:
            with pytest.raises(RegionError):
                read(RegionRef(name, inode, 0, 16))
            with pytest.raises(RegionError):
                write_region(RegionRef(name, inode, 0, 16), b"x")
        with pytest.raises(OSError):
            object_facts(link.name)
    finally:
        link.unlink()
    assert secret.read_bytes() == CONTENT


def test_an_object_that_may_not_be_written_can_t_be_registered(path: Path) -> None:
    assert object_facts(path.name) == (path.stat().st_ino, SIZE)
    if os.geteuid():
        path.chmod(0o400)
        with pytest.raises(OSError):
            object_facts(path.name)


@pytest.mark.parametrize(
    "key,name",
    [
        ("/a", "a"),
        ("a", "a"),
        ("///a.b-c", "a.b-c"),
        ("x" * 255, "x" * 255),
        *(
            (key, None)
            for key in ("", "/", "///", "a/b", "a/", ".", "/..", "\0", "a\0b", "x" * 256, "ä" * 128, "\ud800")
        ),
        *((key, None) for key in ("weir-a.1", "/.weir-a", "//triton_python_backend_shm_region_1")),
    ],
)
def test_names_of_objects(key: str, name: str | None) -> None:
    assert file_name(key) == name
