"""GPU memory that clients share by CUDA's interprocess handles: opened, read and written by the worker.

Nothing of CUDA is imported before a client shares such memory, and nothing but the driver is looked for before that.
Every access is checked against the size of the opened allocation: CUDA itself would let one run past it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from bus.client_regions import RegionUnusable
from schemas.tensors import CudaRegionRef
from worker.gpus import find_gpus

logger = logging.getLogger("weir.worker")

MAX_OPEN_ALLOCATIONS = 256
"""Allocations that a worker has open; the one not used for longest is closed for another."""

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


class CudaAllocation(Protocol):
    """One opened allocation; `size` is in bytes. Methods raise RegionUnusable for what CUDA refuses."""

    size: int

    def read(self, offset: int, target: memoryview) -> None:
        """Copies from `offset` on into host memory, as much as it takes."""

    def write(self, offset: int, content: bytes | memoryview) -> None:
        """Copies host memory to `offset`; returns when it is there."""

    def close(self) -> None:
        """Gives the memory up."""


OpenAllocation = Callable[[bytes, int], CudaAllocation]
"""Opens the allocation behind (cudaIpcMemHandle_t, GPU). Raises RegionUnusable."""


class CudaRegions:
    """Clients' allocations, each opened once for all instances of a worker. For any thread."""

    def __init__(self, open_allocation: OpenAllocation | None = None) -> None:
        self._open_allocation = open_allocation or IpcAllocation
        # One lock for the copies too: they share one bus, and nothing may be closed under a copy.
        self._lock = threading.Lock()
        self._open: dict[tuple[bytes, int], CudaAllocation] = {}

    def check(self, handle: bytes, device: int, size: int) -> None:
        """Opens an allocation that is about to be used. Raises RegionUnusable unless it has `size` bytes."""
        with self._lock:
            allocation = self._get(handle, device)
            if not 0 < size <= allocation.size:
                raise RegionUnusable(f"{size} bytes of an allocation of {allocation.size}")

    def read(self, ref: CudaRegionRef, target: memoryview) -> None:
        """Copies the bytes that `ref` names into `target`, which is as large. Raises RegionUnusable."""
        with self._lock:
            self._placed(ref, len(target)).read(ref.offset, target)

    def write(self, ref: CudaRegionRef, content: bytes | memoryview) -> None:
        """Copies `content`, of at most `ref.size` bytes, to the start of the place `ref`. Raises RegionUnusable."""
        with self._lock:
            self._placed(ref, len(content)).write(ref.offset, content)

    def close(self, handle: bytes, device: int) -> None:
        """The client doesn't share it any more."""
        with self._lock:
            allocation = self._open.pop((handle, device), None)
            if allocation is not None:
                allocation.close()

    def _placed(self, ref: CudaRegionRef, size: int) -> CudaAllocation:
        allocation = self._get(ref.handle, ref.device)
        if ref.offset < 0 or not 0 <= size <= ref.size or ref.offset + ref.size > allocation.size:
            raise RegionUnusable("the place lies outside of the CUDA allocation")
        return allocation

    def _get(self, handle: bytes, device: int) -> CudaAllocation:
        key = (handle, device)
        allocation = self._open.pop(key, None)
        if allocation is None:
            if len(handle) != _HANDLE_BYTES or device < 0:
                raise RegionUnusable("not a handle of CUDA memory")
            allocation = self._open_allocation(handle, device)
            if len(self._open) >= MAX_OPEN_ALLOCATIONS:
                self._open.pop(next(iter(self._open))).close()
        self._open[key] = allocation  # last: used most recently
        return allocation


class IpcAllocation:
    """An allocation of another process, opened with CUDA's runtime. See `CudaAllocation`."""

    def __init__(self, handle: bytes, device: int) -> None:
        try:
            from cuda.bindings import driver, runtime
        except ImportError as error:
            raise RegionUnusable(f"cuda-bindings can't be used: {error}") from error
        self._runtime = runtime
        self._device = device
        self._succeed(runtime.cudaSetDevice(device))
        ipc_handle = runtime.cudaIpcMemHandle_t()
        # Its bytes have no attribute in every release of the package.
        ctypes.memmove(ipc_handle.getPtr(), handle, _HANDLE_BYTES)
        (pointer,) = self._succeed(runtime.cudaIpcOpenMemHandle(ipc_handle, _LAZY_PEER_ACCESS))
        self._pointer = int(pointer)
        try:
            # The mapping may begin before the allocation, whose own end is what counts.
            base, size = self._succeed(driver.cuMemGetAddressRange(self._pointer))
            self.size = int(base) + int(size) - self._pointer
        except RegionUnusable:
            self.close()
            raise

    def read(self, offset: int, target: memoryview) -> None:
        """See CudaAllocation."""
        if len(target):
            kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
            self._copy(_host_address(target), self._pointer + offset, len(target), kind)

    def write(self, offset: int, content: bytes | memoryview) -> None:
        """See CudaAllocation."""
        if len(content):
            kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
            self._copy(self._pointer + offset, _host_address(content), len(content), kind)
            # A copy out of pageable memory may return before its last piece has arrived.
            self._succeed(self._runtime.cudaStreamSynchronize(0))

    def close(self) -> None:
        """See CudaAllocation."""
        status, *_ = self._runtime.cudaIpcCloseMemHandle(self._pointer)
        if int(status):
            logger.warning("closing CUDA shared memory: %s", status)

    def _copy(self, to: int, source: int, size: int, kind: Any) -> None:
        # The calling thread may have used another GPU, or none yet.
        self._succeed(self._runtime.cudaSetDevice(self._device))
        self._succeed(self._runtime.cudaMemcpy(to, source, size, kind))

    def _succeed(self, outcome: tuple[Any, ...]) -> tuple[Any, ...]:
        status, *values = outcome
        if int(status):
            raise RegionUnusable(f"CUDA: {getattr(status, 'name', status)}")
        return tuple(values)


def gpu_uuids() -> list[str]:
    """The UUIDs of the GPUs that can be used, in CUDA's order; empty without a driver or without cuda-bindings."""
    gpus = find_gpus().gpus
    if gpus and (importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None):
        logger.warning("CUDA shared memory is not available: the package cuda-bindings is not installed")
        return []
    return [gpu.uuid for gpu in gpus]


def _host_address(data: bytes | memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])
