"""GPU memory that clients share by CUDA's interprocess handles: `CudaRegions` accesses it, `CudaSharedMemoryService` serves
gateways' requests to open and close it.

CUDA is not imported before a client shares such memory. Every access is checked against the size of the opened allocation,
because CUDA itself does not prevent accesses beyond it.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from bus.naming import subjects
from bus.naming.identity import host
from bus.naming.reserved_subjects import may_reply_to
from bus.nats.connection import Bus, Message
from bus.payloads.client_regions import RegionError
from runtime.containment import contained
from schemas.core.tensors import CudaRegionRef
from schemas.kserve.regions import CudaOpened, CudaOpening
from schemas.wire.codec import MalformedMessage
from worker.devices.gpus import find_gpus

logger = logging.getLogger("weir.worker")


MAX_OPEN_ALLOCATIONS = 256
"""Allocations that a worker has open at a time; the least recently used one is closed for another."""

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


class CudaAllocation(Protocol):
    """One opened allocation of `size` bytes. Methods raise RegionError if CUDA fails."""

    size: int

    def read(self, offset: int, target: memoryview) -> None:
        """Copies from `offset` into host memory, as many bytes as `target` has."""

    def write(self, offset: int, content: bytes | memoryview) -> None:
        """Copies host memory to `offset`; returns when the copy has ended."""

    def close(self) -> None:
        """Closes the allocation."""


OpenAllocation = Callable[[bytes, int], CudaAllocation]
"""Opens the allocation of (cudaIpcMemHandle_t, GPU). Raises RegionError."""


class CudaRegions:
    """Clients' allocations, each opened once for all instances of a worker. Thread-safe."""

    def __init__(self, open_allocation: OpenAllocation | None = None) -> None:
        self._open_allocation = open_allocation or IpcAllocation
        # Copies hold the lock as well: they share one bus, and an allocation must not be closed during a copy.
        self._lock = threading.Lock()
        self._open: dict[tuple[bytes, int], CudaAllocation] = {}

    def check(self, handle: bytes, device: int, size: int) -> None:
        """Opens an allocation. Raises RegionError unless it has at least `size` bytes."""
        with self._lock:
            allocation = self._get(handle, device)
            if not 0 < size <= allocation.size:
                raise RegionError(f"the region has {size} bytes, but its allocation {allocation.size}")

    def read(self, ref: CudaRegionRef, target: memoryview) -> None:
        """Copies the region `ref` into `target`, which has its size. Raises RegionError."""
        with self._lock:
            self._allocation_of(ref, len(target)).read(ref.offset, target)

    def write(self, ref: CudaRegionRef, content: bytes | memoryview) -> None:
        """Copies `content`, at most `ref.size` bytes, to the start of the region `ref`. Raises RegionError."""
        with self._lock:
            self._allocation_of(ref, len(content)).write(ref.offset, content)

    def close(self, handle: bytes, device: int) -> None:
        """Closes an allocation that its client has unregistered."""
        with self._lock:
            allocation = self._open.pop((handle, device), None)
            if allocation is not None:
                allocation.close()

    def _allocation_of(self, ref: CudaRegionRef, size: int) -> CudaAllocation:
        allocation = self._get(ref.handle, ref.device)
        if ref.offset < 0 or not 0 <= size <= ref.size or ref.offset + ref.size > allocation.size:
            raise RegionError("the region is outside of the CUDA allocation")
        return allocation

    def _get(self, handle: bytes, device: int) -> CudaAllocation:
        key = (handle, device)
        allocation = self._open.pop(key, None)
        if allocation is None:
            if len(handle) != _HANDLE_BYTES or device < 0:
                raise RegionError("not a handle of CUDA memory")
            allocation = self._open_allocation(handle, device)
            if len(self._open) >= MAX_OPEN_ALLOCATIONS:
                self._open.pop(next(iter(self._open))).close()
        self._open[key] = allocation  # at the end: most recently used
        return allocation


class IpcAllocation:
    """A `CudaAllocation` of another process, opened with CUDA's runtime."""

    def __init__(self, handle: bytes, device: int) -> None:
        try:
            from cuda.bindings import driver, runtime
        except ImportError as error:
            raise RegionError(f"cuda-bindings can't be used: {error}") from error
        self._runtime = runtime
        self._device = device
        self._check(runtime.cudaSetDevice(device))
        ipc_handle = runtime.cudaIpcMemHandle_t()
        # Not every release of the package has an attribute for the bytes.
        ctypes.memmove(ipc_handle.getPtr(), handle, _HANDLE_BYTES)
        (pointer,) = self._check(runtime.cudaIpcOpenMemHandle(ipc_handle, _LAZY_PEER_ACCESS))
        self._pointer = int(pointer)
        try:
            # The mapping may start before the allocation; the end of the allocation is the limit.
            base, size = self._check(driver.cuMemGetAddressRange(self._pointer))
            self.size = int(base) + int(size) - self._pointer
        except RegionError:
            self.close()
            raise

    def read(self, offset: int, target: memoryview) -> None:
        """Copies from `offset` into host memory."""
        if len(target):
            kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
            self._copy(_host_address(target), self._pointer + offset, len(target), kind)

    def write(self, offset: int, content: bytes | memoryview) -> None:
        """Copies host memory to `offset`."""
        if len(content):
            kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
            self._copy(self._pointer + offset, _host_address(content), len(content), kind)
            # A copy from pageable memory may return before it has ended.
            self._check(self._runtime.cudaStreamSynchronize(0))

    def close(self) -> None:
        """Closes the allocation; logs a failure."""
        status, *_ = self._runtime.cudaIpcCloseMemHandle(self._pointer)
        if int(status):
            logger.warning("closing CUDA shared memory: %s", status)

    def _copy(self, to: int, source: int, size: int, kind: Any) -> None:
        # The calling thread may have selected another GPU, or none.
        self._check(self._runtime.cudaSetDevice(self._device))
        self._check(self._runtime.cudaMemcpy(to, source, size, kind))

    def _check(self, outcome: tuple[Any, ...]) -> tuple[Any, ...]:
        status, *values = outcome
        if int(status):
            raise RegionError(f"CUDA: {getattr(status, 'name', status)}")
        return tuple(values)


def gpu_uuids() -> list[str]:
    """The UUIDs of the usable GPUs in CUDA's order; empty without a driver or without cuda-bindings."""
    gpus = find_gpus().gpus
    if gpus and (importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None):
        logger.warning("CUDA shared memory is not available: the package cuda-bindings is not installed")
        return []
    return [gpu.uuid for gpu in gpus]


def _host_address(data: bytes | memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


MAX_WAITING_PROBES = 256
"""Requests that wait for the thread; further ones get no reply."""


class CudaSharedMemoryService:
    """Opens and closes GPU memory of clients on request of gateways on the same host.

    A thread of its own calls CUDA: the first use of a GPU may take hundreds of milliseconds.
    """

    def __init__(self, bus: Bus, worker_id: str, regions: CudaRegions) -> None:
        self._bus = bus
        self._worker_id = worker_id
        self._regions = regions
        self._thread = ThreadPoolExecutor(1, "cuda-regions")
        self._waiting: set[asyncio.Task[None]] = set()
        self._background: asyncio.TaskGroup | None = None

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Subscribes to requests; handles them in tasks of `background`."""
        self._background = background
        await self._bus.subscribe(subjects.cuda_open(host()), lambda message: self._on_request(message, self._open))
        await self._bus.subscribe(subjects.cuda_close(host()), lambda message: self._on_request(message, self._close))

    def _on_request(self, message: Message, act: Callable[[CudaOpening], str]) -> None:
        assert self._background is not None  # noqa: S101 - set before the subscription
        try:
            opening = CudaOpening.unpack(message.data)
        except MalformedMessage as error:
            logger.warning("subject %s: %s", message.subject, error)
            return
        if len(self._waiting) >= MAX_WAITING_PROBES:
            return
        reply = message.reply if may_reply_to(message, subjects.cuda_opened("")) else ""
        task = self._background.create_task(self._reply(opening, act, reply))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    @contained()
    async def _reply(self, opening: CudaOpening, act: Callable[[CudaOpening], str], reply: str) -> None:
        reason = await asyncio.get_running_loop().run_in_executor(self._thread, act, opening)
        if reply:
            self._bus.publish(reply, CudaOpened(self._worker_id, reason).pack())

    def _open(self, opening: CudaOpening) -> str:
        try:
            self._regions.check(opening.handle, opening.device_id, opening.size)
        except RegionError as error:
            return str(error) or "the allocation can't be opened"
        return ""

    def _close(self, opening: CudaOpening) -> str:
        self._regions.close(opening.handle, opening.device_id)
        return ""
