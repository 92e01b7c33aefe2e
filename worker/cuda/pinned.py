"""Pinned host memory, which a GPU can copy from and to asynchronously.

The process has a limited amount (`--pinned-memory-pool-byte-size`, as in Triton), because other processes of the host can't
use it. Beyond the limit, buffers are ordinary memory: copies are slower, and those to the host block.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from typing import Any

import numpy as np

from weir.worker.cuda.runtime import cuda_runtime, current_gpu, free_on, raise_cuda

logger = logging.getLogger("weir.worker")

LEAST_POOL_BYTES, MOST_POOL_BYTES = 256 << 20, 4 << 30
"""The bounds of the default budget. The least is Triton's default, which two instances for images use up."""

_SHARE_OF_MEMORY = 16
_SMALLEST_BYTES = 64 << 10
_STEP_BYTES = 1 << 20


def default_pool_bytes(memory_bytes: int) -> int:
    """The budget of a worker on a machine, or in a container, with this much memory. It is pinned as it is needed."""
    return min(MOST_POOL_BYTES, max(LEAST_POOL_BYTES, memory_bytes // _SHARE_OF_MEMORY))


class PinnedMemory:
    """The process's budget of pinned memory. Thread-safe. `is_available` once there is an instance on a GPU."""

    def __init__(self, total_bytes: int = LEAST_POOL_BYTES) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self.is_available = False
        self._lock = threading.Lock()
        self._has_warned = False

    def acquire(self, size_bytes: int) -> bool:
        """Takes bytes from the budget; returns whether there were enough."""
        with self._lock:
            if self.used_bytes + size_bytes <= self.total_bytes:
                self.used_bytes += size_bytes
                return True
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            logger.warning(
                "failed to allocate pinned system memory, falling back to non-pinned system memory: a buffer of %d bytes "
                "is needed, and %d of the %d bytes of --pinned-memory-pool-byte-size are used. Copies of these batches to "
                "and from the GPU are slower, and those to the host block: raise the option",
                size_bytes,
                self.used_bytes,
                self.total_bytes,
            )
        return False

    def release(self, size_bytes: int) -> None:
        """Returns bytes to the budget."""
        with self._lock:
            self.used_bytes -= size_bytes


PINNED = PinnedMemory()
"""The budget of this process."""


class HostBuffer:
    """Host memory for copies of a GPU, pinned if possible: `array` has its bytes, which start at `pointer`.

    It is freed when nothing refers to it or to a part of `array` any more.
    """

    def __init__(self, size_bytes: int, wants_pinned: bool, pinned: PinnedMemory = PINNED) -> None:
        self.size_bytes = allocation_size(size_bytes)
        memory = _pinned(self.size_bytes, pinned) if wants_pinned else None
        self.is_pinned = memory is not None
        self.array = np.empty(self.size_bytes, np.uint8) if memory is None else np.frombuffer(memory, np.uint8)
        self.pointer = int(self.array.__array_interface__["data"][0])


def _pinned(size_bytes: int, pinned: PinnedMemory) -> Any:
    """Allocates pinned memory, which is freed with its last reference; None if there is not enough."""
    if not pinned.acquire(size_bytes):
        return None
    runtime = cuda_runtime()
    # Portable: pinned for all GPUs of the process.
    status, address = runtime.cudaHostAlloc(size_bytes, runtime.cudaHostAllocPortable)
    if status:
        pinned.release(size_bytes)
        if status != runtime.cudaError_t.cudaErrorMemoryAllocation:
            raise_cuda(status, "pinning memory")
        logger.warning("the host can't pin %d bytes of memory: slower copies use ordinary memory", size_bytes)
        return None
    memory = (ctypes.c_ubyte * size_bytes).from_address(int(address))
    weakref.finalize(memory, _free, runtime, int(address), current_gpu(), size_bytes, pinned).atexit = False
    return memory


def _free(runtime: Any, address: int, gpu: int, size_bytes: int, pinned: PinnedMemory) -> None:
    free_on(gpu, runtime.cudaFreeHost, address)
    pinned.release(size_bytes)


def allocation_size(size_bytes: int) -> int:
    """The size of a buffer for `size_bytes`: larger, so that growing batches rarely need a new buffer."""
    if size_bytes <= _SMALLEST_BYTES:
        return _SMALLEST_BYTES
    if size_bytes <= _STEP_BYTES:
        return 1 << (size_bytes - 1).bit_length()
    return -(-(size_bytes + size_bytes // 4) // _STEP_BYTES) * _STEP_BYTES
