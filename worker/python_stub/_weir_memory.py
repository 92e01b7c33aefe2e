"""Memory for large tensors between a worker and the process of a Python model.

Each direction has one file without a name (a memfd), written by one side, read by the other, reused by every batch. It
grows when a batch needs more and is sealed against shrinking, so that no reader can be made to fault on a lost page.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np

_GROWTH = 1024 * 1024


def create_memory(name: str) -> int:
    """The file descriptor of a new, empty memory; `name` is for people who look at the process."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


class MemoryWriter:
    """The writing side: places one batch's tensors one after another, each at the start of a page."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map: mmap.mmap | None = None
        self._capacity = 0
        self._end = 0

    def rewind(self) -> None:
        """Begins a new batch: what was placed before may be overwritten."""
        self._end = 0

    def place(self, data: bytes | memoryview | np.ndarray) -> tuple[int, int]:
        """Copies `data` (C-contiguous, of one-byte elements) in; where it lies: (offset, size) in bytes."""
        size = len(data)
        offset = self._end
        self._end = _align(offset + size, mmap.PAGESIZE)
        if self._map is None or self._end > self._capacity:
            self._map = self._grow()
        self._map[offset : offset + size] = data  # type: ignore[assignment]  # any bytes-like object is accepted
        return offset, size

    def close(self) -> None:
        """Unmaps the memory; the file descriptor stays its owner's."""
        if self._map is not None:
            self._map.close()
            self._map = None

    def _grow(self) -> mmap.mmap:
        self.close()
        self._capacity = _align(max(self._end, self._capacity + self._capacity // 2), _GROWTH)
        os.ftruncate(self._fd, self._capacity)
        return mmap.mmap(self._fd, self._capacity)


class MemoryReader:
    """The reading side: views over what the other side placed, without a copy."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._view = memoryview(b"")

    def view(self, offset: int, size: int) -> memoryview:
        """A read-only view, whose content lasts until the writer's next batch. Raises ValueError outside the memory."""
        if offset + size > len(self._view):
            # The old mapping goes when the last view of it does.
            length = os.fstat(self._fd).st_size
            self._view = memoryview(mmap.mmap(self._fd, length, prot=mmap.PROT_READ) if length else b"")
        if offset < 0 or size < 0 or offset + size > len(self._view):
            raise ValueError("a tensor lies outside of the shared memory")
        return self._view[offset : offset + size]


def _align(value: int, unit: int) -> int:
    return -(-value // unit) * unit
