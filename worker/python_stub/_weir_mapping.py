"""Large inputs as a model sees them: private, writable mappings of memory that others own.

A model may change its inputs in place and keep them as long as it likes, as under Triton, where each is a copy. Here
nothing is copied until it has to be: a page becomes the model's own when the model writes to it (copy on write), and
all pages of an input do when the model still holds it after `execute`, before its memory is used again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

import numpy as np
from _weir_segments import Segments

_MADV_POPULATE_WRITE = 23
_MAP_FAILED = ctypes.c_void_p(-1).value

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class PrivateMapping:
    """Copy-on-write pages of a file, unmapped when the last array over them is gone.

    libc's mmap is called because Python's keeps a file descriptor open for each mapping, which a model that collects
    its inputs would run out of.
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
        """Makes every page private now, so that no later change of the file shows.

        Threads of the model may be writing meanwhile, so the kernel does it (Linux 5.14); where it can't, one byte of
        each page is written as it was.
        """
        if libc.madvise(self._address, self._size, _MADV_POPULATE_WRITE) == 0:
            return
        pages = np.asarray(self)[:: mmap.PAGESIZE]
        pages[...] = pages.copy()


class InputMemory:
    """Finds large inputs: in the memory shared with the worker, or in a segment that a gateway or a client filled."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._segments = Segments()
        self._mappings: list[weakref.ref[PrivateMapping]] = []

    def array(self, place: tuple[Any, ...]) -> np.ndarray:
        """The bytes at `place`, (offset, size) or (segment name, offset, size), as uint8.

        Raises ValueError for a place that does not exist, OSError for a segment that is gone.
        """
        if len(place) == 2:
            offset, size = place
            return self._map(self._fd, offset, size)
        segment, offset, size = place
        return self._map(self._segments.open(segment), offset, size)

    def detach(self) -> None:
        """Ends a batch: inputs the model still holds become its own, before their memory is used again."""
        if self._mappings:
            for reference in self._mappings:
                mapping = reference()
                if mapping is not None:
                    mapping.detach()
            self._mappings.clear()

    def _map(self, fd: int, offset: int, size: int) -> np.ndarray:
        if offset < 0 or size <= 0 or offset + size > os.fstat(fd).st_size:
            raise ValueError("an input lies outside of its shared memory")
        lead = offset % mmap.PAGESIZE
        mapping = PrivateMapping(fd, offset - lead, lead + size)
        self._mappings.append(weakref.ref(mapping))
        return np.asarray(mapping)[lead:]
