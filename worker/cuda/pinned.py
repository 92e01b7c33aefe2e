"""Pinned host memory: what a GPU copies from and to by itself, while everybody goes on.

The process has so much of it and no more (`--pinned-memory-pool-byte-size`, as in Triton): it is taken from all other
processes of the host. Beyond that, buffers are ordinary memory, through which copies are slower and wait for each other.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from typing import Any

import numpy as np

from worker.cuda.runtime import cuda_runtime, refuse

logger = logging.getLogger("weir.worker")

DEFAULT_POOL_BYTES = 256 << 20
"""Triton's default."""

_SMALLEST_BYTES = 64 << 10
_STEP_BYTES = 1 << 20


class PinnedMemory:
    """How much of it the process may have, and has. For any thread.

    `is_available` once there are instances on GPUs here, which alone take of it.
    """

    def __init__(self, total_bytes: int = DEFAULT_POOL_BYTES) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self.is_available = False
        self._lock = threading.Lock()
        self._has_warned = False

    def take(self, size_bytes: int) -> bool:
        """Whether there is so much left; then it is the caller's until `give_back`."""
        with self._lock:
            if self.used_bytes + size_bytes <= self.total_bytes:
                self.used_bytes += size_bytes
                return True
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            logger.warning(
                "failed to allocate pinned system memory, falling back to non-pinned system memory: %d of %d bytes of "
                "--pinned-memory-pool-byte-size are used",
                self.used_bytes,
                self.total_bytes,
            )
        return False

    def give_back(self, size_bytes: int) -> None:
        """So much is not used any more."""
        with self._lock:
            self.used_bytes -= size_bytes


PINNED = PinnedMemory()
"""That of this process."""


class HostBuffer:
    """Host memory of a GPU's copies: `array` are its bytes, `pointer` is where they begin. Pinned where it can be.

    It lasts for as long as anything refers to it or to a part of `array`.
    """

    def __init__(self, size_bytes: int, wants_pinned: bool, pinned: PinnedMemory = PINNED) -> None:
        self.size_bytes = roomy(size_bytes)
        memory = _pinned(self.size_bytes, pinned) if wants_pinned else None
        self.is_pinned = memory is not None
        self.array = np.empty(self.size_bytes, np.uint8) if memory is None else np.frombuffer(memory, np.uint8)
        self.pointer = int(self.array.__array_interface__["data"][0])


def _pinned(size_bytes: int, pinned: PinnedMemory) -> Any:
    """So much pinned memory, which frees itself; None where there is none left."""
    if not pinned.take(size_bytes):
        return None
    runtime = cuda_runtime()
    # Portable: pinned for all GPUs of the process.
    status, address = runtime.cudaHostAlloc(size_bytes, runtime.cudaHostAllocPortable)
    if status:
        pinned.give_back(size_bytes)
        if status != runtime.cudaError_t.cudaErrorMemoryAllocation:
            refuse(status, "pinning memory")
        logger.warning("the host has no %d bytes of memory to be pinned: copies go without", size_bytes)
        return None
    memory = (ctypes.c_ubyte * size_bytes).from_address(int(address))
    weakref.finalize(memory, _free, runtime, int(address), size_bytes, pinned).atexit = False
    return memory


def _free(runtime: Any, address: int, size_bytes: int, pinned: PinnedMemory) -> None:
    runtime.cudaFreeHost(address)
    pinned.give_back(size_bytes)


def roomy(size_bytes: int) -> int:
    """What is allocated for so many bytes: more, so that buffers of batches that grow are seldom made anew."""
    if size_bytes <= _SMALLEST_BYTES:
        return _SMALLEST_BYTES
    if size_bytes <= _STEP_BYTES:
        return 1 << (size_bytes - 1).bit_length()
    return -(-(size_bytes + size_bytes // 4) // _STEP_BYTES) * _STEP_BYTES
