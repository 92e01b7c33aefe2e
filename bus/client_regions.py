"""Clients' own shared memory: POSIX objects that a client made, read and written in place of content in a message.

Promises:
- Nothing outside of the place that a reference names is ever read or written, and no object is made larger or smaller,
  whatever its owner does to it meanwhile. So objects are never mapped: an access to a page that the owner has cut off
  would end the process. Reading and writing are system calls, which come back short instead.
- A reference means the very object that was registered, by its inode, not whatever has its name today.
- Nothing is held: each access opens the object anew (5 us of the 70 that 600 KB take), so an object that its owner
  unlinks is gone at once.

Writing needs one assumption: an owner who cuts the object off in the microseconds between the look at its size and the
write finds it as large as it was before.
"""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from bus.identity import SHARED_MEMORY_DIRECTORY
from schemas.tensors import RegionRef

_RESERVED = ("triton_python_backend_shm_region_", "weir-", ".weir-")
"""How the names of a server's own objects begin: a client can't have them."""

_FOLDER = f"{SHARED_MEMORY_DIRECTORY}/"
_NAME_MAX = 255
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class RegionUnusable(Exception):
    """The place can't be read or written; the text says why, for the client."""


class ObjectFacts(NamedTuple):
    """Which object has a name, and how large it is in bytes."""

    inode: int
    size: int


def file_name(key: str) -> str | None:
    """The name, in the folder of shared memory, of the object that POSIX calls `key`; None for a key that can't be one.

    As in `shm_open`, slashes before the name don't matter, and there are none in it. The server's own names are none.
    """
    name = key.lstrip("/")
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        return None
    if not 0 < length <= _NAME_MAX or "/" in name or "\0" in name or name in (".", ".."):
        return None
    return None if reserved_prefix(key) else name


def reserved_prefix(key: str) -> str:
    """The beginning of `key`, slashes aside, that only the server's own objects may have; "" where it has none of them."""
    name = key.lstrip("/")
    return next((prefix for prefix in _RESERVED if name.startswith(prefix)), "")


def object_facts(name: str) -> ObjectFacts:
    """The object that has this name now. Raises OSError when there is none that may be read and written."""
    fd = os.open(_FOLDER + name, os.O_RDWR | _FLAGS)
    try:
        status = os.fstat(fd)
    finally:
        os.close(fd)
    if not stat.S_ISREG(status.st_mode):
        raise OSError("not a shared-memory object")
    return ObjectFacts(status.st_ino, status.st_size)


def read_region(ref: RegionRef, target: memoryview) -> None:
    """Copies the bytes that `ref` names into `target`, which is as large. Raises RegionUnusable."""
    fd = _open(ref, os.O_RDONLY)
    try:
        done = 0
        while done < ref.size:
            count = os.preadv(fd, [target[done : ref.size]], ref.offset + done)
            if count == 0:
                raise _cut_off(ref)
            done += count
    except OSError as error:
        raise RegionUnusable(f"shared memory object '{ref.name}' can't be read: {error.strerror}") from error
    finally:
        os.close(fd)


def write_region(ref: RegionRef, content: bytes | memoryview) -> None:
    """Copies `content`, of at most `ref.size` bytes, to the start of the place `ref`. Raises RegionUnusable."""
    if len(content) > ref.size:
        raise RegionUnusable(f"{len(content)} bytes do not fit into {ref.size}")
    fd = _open(ref, os.O_WRONLY)
    try:
        view = memoryview(content)
        done = 0
        while done < len(view):
            # Once more before each piece: a write beyond the end would make the object larger.
            if os.fstat(fd).st_size < ref.offset + len(view):
                raise _cut_off(ref)
            done += os.pwrite(fd, view[done:], ref.offset + done)
    except OSError as error:
        raise RegionUnusable(f"shared memory object '{ref.name}' can't be written: {error.strerror}") from error
    finally:
        os.close(fd)


def _open(ref: RegionRef, access: int) -> int:
    if file_name(ref.name) != ref.name:
        raise RegionUnusable("not the name of a client's shared memory object")
    try:
        fd = os.open(_FOLDER + ref.name, access | _FLAGS)
    except OSError as error:
        raise RegionUnusable(f"Unable to open shared memory region: '{ref.name}'") from error
    status = os.fstat(fd)
    if status.st_ino != ref.inode or not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise RegionUnusable(f"shared memory object '{ref.name}' is not the one that was registered")
    if ref.offset + ref.size > status.st_size:
        os.close(fd)
        raise _cut_off(ref)
    return fd


def _cut_off(ref: RegionRef) -> RegionUnusable:
    return RegionUnusable(f"shared memory object '{ref.name}' is smaller than it was when it was registered")
