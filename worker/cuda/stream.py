"""The CUDA streams of one instance, events between them, and stream-ordered device memory.

An instance computes on one stream, whose handle its backend gets. Copies to the device have their own stream, so that one
batch is copied while another is computed. Copies from the device have their own stream if the model's configuration sets
`optimization.cuda.output_copy_stream`, as in Triton.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, ClassVar

from weir.schemas.core.errors import unavailable
from weir.worker.cuda.runtime import (
    check_cuda,
    cuda_runtime,
    current_gpu,
    free_on,
    handle_of,
    raise_cuda,
    select_gpu,
)

_KEEP_EVERYTHING = 2**64 - 1


class CudaStream:
    """An `InstanceStream` of GPU `device_id`. It must be created in the thread that uses it.

    `handle` is its `cudaStream_t`. When nothing refers to it any more, as memory that was allocated on it does, the next
    `CudaStream` of the GPU gets the handle: PyTorch keeps memory for each stream that it has ever seen, such as a workspace
    of cuBLAS.
    """

    _idle: ClassVar[defaultdict[int, list[int]]] = defaultdict(list)  # handles by GPU

    def __init__(self, device_id: int) -> None:
        self.device_id = device_id
        self.handle = 0
        self._runtime = runtime = cuda_runtime()
        select_gpu(device_id)
        _MemoryPools.prepare(runtime, device_id)
        try:
            self.handle = self._idle[device_id].pop()
        except IndexError:
            stream = check_cuda(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking), "creating a stream")
            self.handle = handle_of(stream)
        self._elsewhere: tuple[CudaStream, list[DeviceBuffer]] | None = None
        self._to_free: list[int] = []

    def allocate(self, size_bytes: int) -> DeviceBuffer:
        """Allocates device memory in the order of the stream."""
        if self._elsewhere is None:
            return DeviceBuffer(self, size_bytes)
        stream, kept = self._elsewhere
        memory = stream.allocate(size_bytes)
        stream.synchronize()
        kept.append(memory)
        return memory

    def free(self, pointer: int) -> None:
        """Frees memory of this stream, after the work that is enqueued on it."""
        if self._elsewhere is None:
            self._runtime.cudaFreeAsync(pointer, self.handle)
        else:
            self._to_free.append(pointer)

    @contextlib.contextmanager
    def allocating_on(self, other: CudaStream) -> Iterator[list[DeviceBuffer]]:
        """Allocates from the other stream, synchronously, while the context lasts; yields the list of allocations.

        Used while a graph is captured: memory of this stream would belong to the graph. Frees are delayed until the end,
        because each launch of the graph would repeat them.
        """
        kept: list[DeviceBuffer] = []
        self._elsewhere = other, kept
        try:
            yield kept
        finally:
            self._elsewhere = None
            while self._to_free:
                self.free(self._to_free.pop())

    def record(self, event: CudaEvent) -> None:
        """Records the event after the work that is enqueued now."""
        status = self._runtime.cudaEventRecord(event.handle, self.handle)[0]
        if status:
            raise_cuda(status, "recording an event")

    def wait(self, event: CudaEvent) -> None:
        """Lets work that is enqueued from now on wait for the last record of the event."""
        status = self._runtime.cudaStreamWaitEvent(self.handle, event.handle, 0)[0]
        if status:
            raise_cuda(status, "ordering streams")

    def copy_in(self, to: int, source: int, size_bytes: int) -> None:
        """Enqueues a copy of host memory to device memory."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        status = self._runtime.cudaMemcpyAsync(to, source, size_bytes, kind, self.handle)[0]
        if status:
            raise_cuda(status, "copying inputs to the GPU")

    def copy_within(self, to: int, source: int, size_bytes: int) -> None:
        """Enqueues a copy of device memory to device memory of the same GPU."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        status = self._runtime.cudaMemcpyAsync(to, source, size_bytes, kind, self.handle)[0]
        if status:
            raise_cuda(status, "copying within the GPU")

    def copy_out(self, to: int, source: int, size_bytes: int) -> None:
        """Enqueues a copy of device memory to host memory."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        status = self._runtime.cudaMemcpyAsync(to, source, size_bytes, kind, self.handle)[0]
        if status:
            raise_cuda(status, "copying outputs from the GPU")

    def synchronize(self) -> None:
        """Waits until all enqueued work is done."""
        check_cuda(self._runtime.cudaStreamSynchronize(self.handle), "waiting for a stream")

    def check(self) -> None:
        """Raises DeviceLost if the GPU can't be used any more: any query returns a sticky error then."""
        status = self._runtime.cudaStreamQuery(self.handle)[0]
        if status and status != self._runtime.cudaError_t.cudaErrorNotReady:
            raise_cuda(status, "checking the GPU after a failure")

    def __del__(self) -> None:
        if self.handle:
            self._idle[self.device_id].append(self.handle)


class DeviceBuffer:
    """A `DeviceMemory` that is freed in the order of its stream when nothing refers to it any more."""

    def __init__(self, stream: CudaStream, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.pointer = 0
        self._stream = stream
        self._runtime = runtime = stream._runtime
        # CUDA does not allocate 0 bytes, but a tensor without elements needs an address as well.
        size = max(1, size_bytes)
        status, pointer = runtime.cudaMallocAsync(size, stream.handle)
        out_of_memory = runtime.cudaError_t.cudaErrorMemoryAllocation
        if status == out_of_memory:
            _MemoryPools.trim(runtime, stream)
            status, pointer = runtime.cudaMallocAsync(size, stream.handle)
        if status == out_of_memory:
            info = runtime.cudaMemGetInfo()
            free = "its free memory is unknown" if info[0] else f"{info[1]} of its {info[2]} bytes are free"
            raise unavailable(f"GPU {stream.device_id} has no memory for {size_bytes} bytes more: {free}")
        if status:
            raise_cuda(status, f"allocating {size_bytes} bytes on GPU {stream.device_id}")
        self.pointer = int(pointer)

    def __del__(self) -> None:
        if self.pointer:
            free_on(self._stream.device_id, self._stream.free, self.pointer)


class CudaEvent:
    """An event with a time. A thread that waits for it sleeps, or `spins`, which reacts faster and occupies a core."""

    def __init__(self, spins: bool = False) -> None:
        self.handle = 0
        self._gpu = current_gpu()
        self._runtime = runtime = cuda_runtime()
        flags = runtime.cudaEventDefault if spins else runtime.cudaEventBlockingSync
        self.handle = handle_of(check_cuda(runtime.cudaEventCreateWithFlags(flags), "creating an event"))

    def synchronize(self, doing: str) -> None:
        """Waits for the event. Raises errors of the work before it, as `check_cuda` does with `doing`."""
        status = self._runtime.cudaEventSynchronize(self.handle)[0]
        if status:
            raise_cuda(status, doing)

    def ns_until(self, later: CudaEvent) -> int:
        """Nanoseconds from this event to a later one; both must have occurred."""
        elapsed_ms = check_cuda(
            self._runtime.cudaEventElapsedTime(self.handle, later.handle), "reading times of events"
        )
        return int(elapsed_ms * 1e6)

    def __del__(self) -> None:
        if self.handle:
            free_on(self._gpu, self._runtime.cudaEventDestroy, self.handle)


class InstanceStreams:
    """The streams of one instance: `compute`, `copy_in`, and `copy_out`, which is `compute` without `own_copy_out`."""

    def __init__(self, device_id: int, own_copy_out: bool) -> None:
        self.compute = CudaStream(device_id)
        self.copy_in = CudaStream(device_id)
        self.copy_out = CudaStream(device_id) if own_copy_out else self.compute

    def trim(self) -> None:
        """Returns memory that nothing uses from the GPU's pool to the GPU."""
        self.synchronize()
        _MemoryPools.trim(self.compute._runtime, self.compute)

    def synchronize(self) -> None:
        """Waits until all streams are idle."""
        for stream in (self.copy_in, self.compute, self.copy_out):
            stream.synchronize()


class _MemoryPools:
    """The pools of stream-ordered memory, one for each GPU. They keep freed memory for later allocations."""

    _lock = threading.Lock()
    _pools: dict[int, Any] = {}  # noqa: RUF012 - of the process, as CUDA's own are

    @classmethod
    def prepare(cls, runtime: Any, device_id: int) -> None:
        """Lets the GPU's pool keep freed memory; by default it would return it at each synchronization."""
        with cls._lock:
            if device_id in cls._pools:
                return
            from cuda.bindings import driver

            pool = check_cuda(runtime.cudaDeviceGetDefaultMemPool(device_id), "getting the memory pool")
            threshold = runtime.cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold
            kept = driver.cuuint64_t(_KEEP_EVERYTHING)
            check_cuda(runtime.cudaMemPoolSetAttribute(pool, threshold, kept), "configuring the memory pool")
            cls._pools[device_id] = pool

    @classmethod
    def trim(cls, runtime: Any, stream: CudaStream) -> None:
        """Returns unused memory of the pool to the GPU, for other libraries with pools of their own."""
        stream.synchronize()
        check_cuda(runtime.cudaMemPoolTrimTo(cls._pools[stream.device_id], 0), "trimming the memory pool")
