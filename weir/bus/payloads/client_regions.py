"""Reads and writes clients' own shared memory: POSIX objects that a client created, used instead of content in messages.

- Nothing outside the range of a reference is ever read or written, and no object changes its size, whatever its owner does
  meanwhile. So objects are never mapped: an access to a page that the owner has truncated would end the process. Reads and
  writes are system calls, which return fewer bytes instead.
- A reference means the object that was registered, by its inode, not one that has the name now.
- Each access opens the object (5 us of the 70 that 600 KB take), so an object that its owner unlinks is released at once.

One race remains: if the owner truncates the object in the microseconds between the check of its size and a write, the write
restores the old size.
"""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from weir.bus.naming.identity import SHARED_MEMORY_DIRECTORY
from weir.schemas.core.tensors import RegionRef

_RESERVED = ("triton_python_backend_shm_region_", "weir-", ".weir-")
"""Prefixes of the server's own objects, which clients may not register."""

_FOLDER = f"{SHARED_MEMORY_DIRECTORY}/"
_NAME_MAX = 255
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class RegionError(Exception):
    """The region can't be read or written; the text is for the client."""


class ObjectFacts(NamedTuple):
    """The inode and the size in bytes of an object."""

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
    """The reserved prefix of `key`, after any slashes; "" without one."""
    name = key.lstrip("/")
    return next((prefix for prefix in _RESERVED if name.startswith(prefix)), "")


def object_facts(name: str) -> ObjectFacts:
    """The object of this name. Raises OSError if it does not exist, or may not be read and written."""
    fd = os.open(_FOLDER + name, os.O_RDWR | _FLAGS)
    try:
        status = os.fstat(fd)
    finally:
        os.close(fd)
    if not stat.S_ISREG(status.st_mode):
        raise OSError("not a shared-memory object")
    return ObjectFacts(status.st_ino, status.st_size)


def read_region(ref: RegionRef, target: memoryview) -> None:
    """Copies the bytes of `ref` into `target`, which has the same size. Raises RegionError."""
    fd = _open(ref, os.O_RDONLY)
    try:
        done = 0
        while done < ref.size:
            count = os.preadv(fd, [target[done : ref.size]], ref.offset + done)
            if count == 0:
                raise _truncated(ref)
            done += count
    except OSError as error:
        raise RegionError(f"shared memory object '{ref.name}' can't be read: {error.strerror}") from error
    finally:
        os.close(fd)


def write_region(ref: RegionRef, content: bytes | memoryview) -> None:
    """Copies `content`, of at most `ref.size` bytes, to the start of `ref`. Raises RegionError."""
    if len(content) > ref.size:
        raise RegionError(f"{len(content)} bytes do not fit into {ref.size}")
    fd = _open(ref, os.O_WRONLY)
    try:
        view = memoryview(content)
        done = 0
        while done < len(view):
            # Checked before each piece: a write beyond the end would enlarge the object.
            if os.fstat(fd).st_size < ref.offset + len(view):
                raise _truncated(ref)
            done += os.pwrite(fd, view[done:], ref.offset + done)
    except OSError as error:
        raise RegionError(f"shared memory object '{ref.name}' can't be written: {error.strerror}") from error
    finally:
        os.close(fd)


def _open(ref: RegionRef, access: int) -> int:
    if file_name(ref.name) != ref.name:
        raise RegionError("not the name of a client's shared memory object")
    try:
        fd = os.open(_FOLDER + ref.name, access | _FLAGS)
    except OSError as error:
        raise RegionError(f"Unable to open shared memory region: '{ref.name}'") from error
    status = os.fstat(fd)
    if status.st_ino != ref.inode or not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise RegionError(f"shared memory object '{ref.name}' is not the one that was registered")
    if ref.offset + ref.size > status.st_size:
        os.close(fd)
        raise _truncated(ref)
    return fd


def _truncated(ref: RegionRef) -> RegionError:
    return RegionError(f"shared memory object '{ref.name}' is smaller than it was when it was registered")
