"""The numbers of custom metrics: memory that a worker and all its models' processes have mapped.

So a change costs no message, is there before the answer that it belongs to, and outlives the process that made it. Each
series has a place of its own, a run of floats of 64 bits. Whoever changes it holds the kernel's lock on these bytes, which
goes with its holder; who reads a single number needs none. Numbers is all there is: a model that scribbles here spoils
figures, nothing else.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterable

SIZE = 8
"""Bytes of a number."""


class MetricNumbers:
    """See the module: `fd` stays its owner's. For any thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()  # the kernel's holds back other processes only
        self._numbers = memoryview(b"").cast("d")

    def read(self, first: int, count: int) -> tuple[float, ...]:
        """So many numbers from the place `first` on. Raises ValueError outside of the memory."""
        return struct.unpack_from(f"={count}d", self._mapped(first + count).cast("B"), first * SIZE)

    def add(self, first: int, count: int, changes: Iterable[tuple[int, float]]) -> None:
        """Adds to numbers of the series at `first`, which has `count` of them: pairs of place in it and what is added."""
        with self._lock:
            numbers = self._mapped(first + count)
            fcntl.lockf(self._fd, fcntl.LOCK_EX, count * SIZE, first * SIZE)
            try:
                for place, more in changes:
                    numbers[first + place] += more
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, count * SIZE, first * SIZE)

    def write(self, first: int, values: Iterable[float]) -> None:
        """Replaces the numbers of the series at `first`."""
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
                raise ValueError("a metric lies outside of the shared memory")
            # The old mapping goes when nobody uses it any more.
            numbers = self._numbers = memoryview(mmap.mmap(self._fd, length)).cast("d")
        return numbers
