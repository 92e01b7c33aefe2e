"""GPU memory that clients share by CUDA's interprocess handles: `CudaRegions` accesses it, `CudaSharedMemoryService` serves
gateways' requests to open and close it.

CUDA is not imported before a client shares such memory. Every access is checked against the size of the opened allocation,
because CUDA itself does not prevent accesses beyond it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import numpy as np

from weir.bus.naming import subjects
from weir.bus.naming.identity import host
from weir.bus.naming.reserved_subjects import may_reply_to
from weir.bus.nats.connection import Bus, Message
from weir.bus.payloads.client_regions import RegionError
from weir.runtime.containment import contained
from weir.schemas.core.tensors import CudaRegionRef
from weir.schemas.kserve.regions import CudaOpened, CudaOpening
from weir.schemas.wire.codec import MalformedMessage
from weir.worker.devices.gpus import find_gpus

logger = logging.getLogger("weir.worker")


MAX_OPEN_ALLOCATIONS = 256
"""Allocations that a worker has open at a time; the least recently used one is closed for another."""

_HANDLE_BYTES = 64


class CudaAllocation(Protocol):
    """One opened allocation of `size` bytes at `pointer`. Methods raise RegionError if CUDA fails; for any thread."""

    pointer: int
    size: int

    def read(self, offset: int, target: memoryview) -> None:
        """Copies from `offset` into host memory, as many bytes as `target` has."""

    def write(self, offset: int, content: bytes | memoryview) -> None:
        """Copies host memory to `offset`; returns when the copy has ended."""

    def close(self) -> None:
        """Closes the allocation."""


OpenAllocation = Callable[[bytes, int], CudaAllocation]
"""Opens the allocation of (cudaIpcMemHandle_t, GPU). Raises RegionError."""

AllocateHost = Callable[[int, int], np.ndarray]
"""Allocates an array in host memory of that number of bytes, for copies from this GPU."""


def _ordinary_memory(size_bytes: int, _device: int) -> np.ndarray:
    return np.empty(size_bytes, np.uint8)


class _OpenAllocation:
    """One allocation of `CudaRegions`. Its `users` keep it open after it was removed (`is_removed`)."""

    def __init__(self) -> None:
        self.opening = threading.Lock()
        self.allocation: CudaAllocation | None = None
        self.users = 0
        self.is_removed = False


class CudaRegions:
    """Clients' allocations, each opened once for all instances of a worker. Thread-safe.

    Registered regions are opened if they lie on one of `own_gpus` (None: on any GPU), where the worker has a context in any
    case. A request that has a region on another GPU makes the worker open it there as well. No lock is held during a copy:
    an allocation that is closed meanwhile stays open until its last copy has ended. Regions are read into memory of
    `allocate_host`.
    """

    def __init__(
        self,
        open_allocation: OpenAllocation,
        own_gpus: Collection[int] | None = None,
        allocate_host: AllocateHost = _ordinary_memory,
    ) -> None:
        self._open_allocation = open_allocation
        self._own_gpus = own_gpus
        self.allocate_host = allocate_host
        # Reentrant: the last reference to a `MappedRegion` may be dropped by the garbage collector at any time.
        self._lock = threading.RLock()
        self._open: dict[tuple[bytes, int], _OpenAllocation] = {}

    def check(self, handle: bytes, device: int, size: int) -> None:
        """Opens an allocation on an own GPU. Raises RegionError unless it has at least `size` bytes."""
        if self._own_gpus is not None and device not in self._own_gpus:
            raise RegionError(f"no instance of this worker runs on GPU {device}")
        with self._using(handle, device) as allocation:
            if not 0 < size <= allocation.size:
                raise RegionError(f"the region has {size} bytes, but its allocation {allocation.size}")

    def read(self, ref: CudaRegionRef, target: memoryview) -> None:
        """Copies the region `ref` into `target`, which has its size. Raises RegionError."""
        with self._using(ref.handle, ref.device) as allocation:
            _check_place(ref, len(target), allocation)
            allocation.read(ref.offset, target)

    def write(self, ref: CudaRegionRef, content: bytes | memoryview) -> None:
        """Copies `content`, at most `ref.size` bytes, to the start of the region `ref`. Raises RegionError."""
        with self._using(ref.handle, ref.device) as allocation:
            _check_place(ref, len(content), allocation)
            allocation.write(ref.offset, content)

    def map(self, ref: CudaRegionRef) -> MappedRegion:
        """The region's place in this process, for work of the GPU on which it lies. Raises RegionError."""
        opened = self._acquire(ref.handle, ref.device)
        assert opened.allocation is not None  # noqa: S101 - opened by `_acquire`
        try:
            _check_place(ref, ref.size, opened.allocation)
        except RegionError:
            self._release(opened)
            raise
        return MappedRegion(opened.allocation, ref.offset, ref.size, partial(self._release, opened))

    def close(self, handle: bytes, device: int) -> None:
        """Closes an allocation that its client has unregistered, as soon as nothing uses it."""
        with self._lock:
            opened = self._open.pop((handle, device), None)
            is_unused = opened is not None and self._remove(opened)
        if opened is not None and is_unused:
            _close(opened)

    @contextmanager
    def _using(self, handle: bytes, device: int) -> Iterator[CudaAllocation]:
        opened = self._acquire(handle, device)
        try:
            assert opened.allocation is not None  # noqa: S101 - opened by `_acquire`
            yield opened.allocation
        finally:
            self._release(opened)

    def _acquire(self, handle: bytes, device: int) -> _OpenAllocation:
        """The opened allocation with one user more. Raises RegionError."""
        if len(handle) != _HANDLE_BYTES or device < 0:
            raise RegionError("not a handle of CUDA memory")
        key, unused = (handle, device), None
        with self._lock:
            opened = self._open.pop(key, None) or _OpenAllocation()
            opened.users += 1
            if len(self._open) >= MAX_OPEN_ALLOCATIONS:
                oldest = self._open.pop(next(iter(self._open)))
                unused = oldest if self._remove(oldest) else None
            self._open[key] = opened  # at the end: most recently used
        if unused is not None:
            _close(unused)
        try:
            with opened.opening:
                if opened.allocation is None:
                    opened.allocation = self._open_allocation(handle, device)
        except BaseException:
            with self._lock:
                if self._open.get(key) is opened:
                    del self._open[key]
                opened.is_removed = True
            self._release(opened)
            raise
        return opened

    def _release(self, opened: _OpenAllocation) -> None:
        with self._lock:
            opened.users -= 1
            is_unused = opened.is_removed and not opened.users
        if is_unused:
            _close(opened)

    @staticmethod
    def _remove(opened: _OpenAllocation) -> bool:
        """Marks an allocation as removed; returns whether it can be closed at once."""
        opened.is_removed = True
        return not opened.users


def _close(opened: _OpenAllocation) -> None:
    if opened.allocation is not None:
        opened.allocation.close()


def _check_place(ref: CudaRegionRef, size: int, allocation: CudaAllocation) -> None:
    if ref.offset < 0 or not 0 <= size <= ref.size or ref.offset + ref.size > allocation.size:
        raise RegionError("the region is outside of the CUDA allocation")


class MappedRegion:
    """A client's region on the GPU of the instance that uses it: `size` bytes at `pointer`, open until `release`.

    It stands in place of the content of an input that is to be copied by the GPU, and of an output that has been.
    """

    __slots__ = ("_allocation", "_offset", "_release", "pointer", "size")

    def __init__(self, allocation: CudaAllocation, offset: int, size: int, release: Callable[[], None]) -> None:
        self.pointer = allocation.pointer + offset
        self.size = size
        self._allocation = allocation
        self._offset = offset
        self._release: Callable[[], None] | None = release

    def __len__(self) -> int:
        return self.size

    def read(self) -> bytes:
        """A copy of the content on the host. Raises RegionError."""
        content = bytearray(self.size)
        self._allocation.read(self._offset, memoryview(content))
        return bytes(content)

    def release(self) -> None:
        """Ends the use of the region, by the last reference at the latest."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __del__(self) -> None:
        self.release()


def gpu_uuids() -> list[str]:
    """The UUIDs of the usable GPUs in CUDA's order; empty without a driver or without cuda-bindings."""
    gpus = find_gpus().gpus
    if gpus and (importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None):
        logger.warning("CUDA shared memory is not available: the package cuda-bindings is not installed")
        return []
    return [gpu.uuid for gpu in gpus]


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
