"""Large inputs as a model sees them: private, writable mappings of memory that others own, or copies of it.

A model may change its inputs in place and keep them as long as it likes, as under Triton, where each input is a copy. Here
a page is copied only when it has to be: when the model writes to it (copy on write), or when the model still holds the
input after `execute`, before its memory is used again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import struct
import weakref
from typing import Any

import numpy as np

_NAME = re.compile(r"weir-[A-Za-z0-9_.-]+")
_FOLDER = "/dev/shm/"  # noqa: S108  # where Linux keeps POSIX shared memory
_GENERATION = struct.Struct("<Q")


class Segments:
    """Opens the shared-memory segments of gateways and workers by name, read-only. For one thread.

    A segment stays open while it has that name.
    """

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}

    def open(self, name: str) -> int:
        """The file descriptor of a segment, which this object closes.

        Raises ValueError for a name that no segment can have, OSError for a segment that does not exist any more.
        """
        fd = self._fds.get(name)
        if fd is not None and os.fstat(fd).st_nlink:
            return fd
        if not _NAME.fullmatch(name):
            raise ValueError("not a shared-memory segment of this server")
        self._forget_removed()
        fd = os.open(_FOLDER + name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._fds[name] = fd
        return fd

    def copy(self, name: str, slot: int, generation: int, offset: int, size: int) -> np.ndarray:
        """A copy of the payload at (`offset`, `size`) as uint8; `slot` is the offset of its generation number.

        Raises ValueError or OSError when the payload does not exist, or has been released.
        """
        fd = self.open(name)
        content = np.empty(size, np.uint8)
        view, position = memoryview(content), 0
        while position < size:
            count = os.preadv(fd, [view[position:]], offset + position)
            if count == 0:
                raise ValueError("a payload lies outside its segment")
            position += count
        # Checked after the copy, so that the whole copy is known to be of this payload.
        if os.pread(fd, _GENERATION.size, slot) != _GENERATION.pack(generation):
            raise ValueError("the payload was released before it was read")
        return content

    def _forget_removed(self) -> None:
        for name, fd in list(self._fds.items()):
            if not os.fstat(fd).st_nlink:
                os.close(self._fds.pop(name))


_MADV_POPULATE_WRITE = 23
_MAP_FAILED = ctypes.c_void_p(-1).value

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class PrivateMapping:
    """Copy-on-write pages of a file, unmapped with the last array over them.

    This calls libc's mmap, because Python's keeps a file descriptor open for each mapping: a model that collects its
    inputs would run out of them.
    """

    __slots__ = ("__weakref__", "_address", "_size")

    def __init__(self, fd: int, offset: int, size: int) -> None:
        self._size = 0
        address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, fd, offset)
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._address = address
        self._size = size

    def __del__(self) -> None:
        if self._size:
            libc.munmap(self._address, self._size)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The pages as numpy sees them: a writable array of bytes, which keeps the mapping alive."""
        return {"version": 3, "shape": (self._size,), "typestr": "|u1", "data": (self._address, False)}

    def detach(self) -> None:
        """Makes every page private now, so that later changes of the file are not visible.

        The kernel does it (Linux 5.14), because threads of the model may be writing at the same time. On older kernels one
        byte of each page is rewritten with its own value.
        """
        if libc.madvise(self._address, self._size, _MADV_POPULATE_WRITE) == 0:
            return
        pages = np.asarray(self)[:: mmap.PAGESIZE]
        pages[...] = pages.copy()


class InputMemory:
    """Maps large inputs: from the memory shared with the worker, or from a segment that a gateway or a client filled."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._segments = Segments()
        self._mappings: list[weakref.ref[PrivateMapping]] = []

    def array(self, place: tuple[Any, ...]) -> np.ndarray:
        """The bytes at `place`, (offset, size) or (segment name, offset, size), as uint8.

        Raises ValueError for a place that does not exist, OSError for a segment that does not exist any more.
        """
        if len(place) == 2:
            offset, size = place
            return self._map(self._fd, offset, size)
        segment, offset, size = place
        return self._map(self._segments.open(segment), offset, size)

    def detach(self) -> None:
        """Ends a batch: makes the inputs that the model still holds private, before their memory is used again."""
        if self._mappings:
            for reference in self._mappings:
                mapping = reference()
                if mapping is not None:
                    mapping.detach()
            self._mappings.clear()

    def _map(self, fd: int, offset: int, size: int) -> np.ndarray:
        if offset < 0 or size <= 0 or offset + size > os.fstat(fd).st_size:
            raise ValueError("an input lies outside its shared memory")
        lead = offset % mmap.PAGESIZE
        mapping = PrivateMapping(fd, offset - lead, lead + size)
        self._mappings.append(weakref.ref(mapping))
        return np.asarray(mapping)[lead:]
