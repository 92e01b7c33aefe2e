"""Memory that a worker shares with the processes of Python models: for large tensors, and for the values of custom metrics.

For tensors each direction has one file without a name (a memfd), which one side writes, the other reads, and every batch
reuses. It grows when a batch needs more and is sealed against shrinking, so that a reader can't fault on a missing page.

The values of custom metrics lie in one memory for all processes of a worker. A change therefore needs no message, is
visible before the response that it belongs to, and outlives the process that made it. Each series has a run of 64-bit
floats. A writer holds the kernel's lock on these bytes, which the kernel releases when the holder ends; reading a
single value needs no lock. A model that writes elsewhere in this memory can corrupt values, but nothing else.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterable

import numpy as np

_GROWTH = 1024 * 1024


def create_memory(name: str) -> int:
    """The file descriptor of a new, empty memory; `name` appears in `/proc/<pid>/fd`."""
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
        """Starts a new batch: what was placed before may be overwritten."""
        self._end = 0

    def place(self, data: bytes | memoryview | np.ndarray) -> tuple[int, int]:
        """Copies `data` (C-contiguous, of one-byte elements) in, and returns its place: (offset, size) in bytes."""
        size = len(data)
        offset = self._end
        self._end = _align(offset + size, mmap.PAGESIZE)
        if self._map is None or self._end > self._capacity:
            self._map = self._grow()
        self._map[offset : offset + size] = data  # type: ignore[assignment]  # any bytes-like object is accepted
        return offset, size

    def append(self, data: bytes) -> int:
        """Copies `data` in, directly behind what was written before, and returns where it ends."""
        offset, end = self._end, self._end + len(data)
        self._end = end
        if self._map is None or end > self._capacity:
            self._map = self._grow()
        self._map[offset:end] = data
        return end

    @property
    def used_bytes(self) -> int:
        """Bytes that were written since the last `rewind`, in whole pages where they were placed."""
        return self._end

    def close(self) -> None:
        """Unmaps the memory; its owner closes the file descriptor."""
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

    @property
    def size_bytes(self) -> int:
        """The present size of the memory."""
        return os.fstat(self._fd).st_size

    def view(self, offset: int, size: int) -> memoryview:
        """A read-only view, valid until the writer's next batch. Raises ValueError for a place outside the memory."""
        if offset + size > len(self._view):
            # The old mapping is unmapped with the last view of it.
            length = os.fstat(self._fd).st_size
            self._view = memoryview(mmap.mmap(self._fd, length, prot=mmap.PROT_READ) if length else b"")
        if offset < 0 or size < 0 or offset + size > len(self._view):
            raise ValueError("a tensor lies outside the shared memory")
        return self._view[offset : offset + size]


def _align(value: int, unit: int) -> int:
    return -(-value // unit) * unit


SIZE = 8
"""Bytes of one metric value."""


class MetricNumbers:
    """Reads and changes the values of custom metrics in the memory `fd`, which its owner closes. For any thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()  # the kernel's lock only excludes other processes
        self._numbers = memoryview(b"").cast("d")

    def read(self, first: int, count: int) -> tuple[float, ...]:
        """`count` values from index `first` on. Raises ValueError outside the memory."""
        return struct.unpack_from(f"={count}d", self._mapped(first + count).cast("B"), first * SIZE)

    def add(self, first: int, count: int, changes: Iterable[tuple[int, float]]) -> None:
        """Adds to values of the series at `first`, which has `count` of them.

        `changes` are (index in the series, increment).
        """
        with self._lock:
            numbers = self._mapped(first + count)
            fcntl.lockf(self._fd, fcntl.LOCK_EX, count * SIZE, first * SIZE)
            try:
                for place, more in changes:
                    numbers[first + place] += more
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, count * SIZE, first * SIZE)

    def write(self, first: int, values: Iterable[float]) -> None:
        """Replaces the values of the series at `first`."""
        values = list(values)
        with self._lock:
            numbers = self._mapped(first + len(values))
            fcntl.lockf(self._fd, fcntl.LOCK_EX, len(values) * SIZE, first * SIZE)
            try:
                for place, value in enumerate(values):
                    numbers[first + place] = value
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, len(values) * SIZE, first * SIZE)

    def _mapped(self, count: int) -> memoryview[float]:
        numbers = self._numbers
        if count > len(numbers):
            length = os.fstat(self._fd).st_size
            if count * SIZE > length:
                raise ValueError("a metric lies outside the shared memory")
            # The old mapping is unmapped with the last view of it.
            numbers = self._numbers = memoryview(mmap.mmap(self._fd, length)).cast("d")
        return numbers
