"""The CUDA streams of one instance, the events between them, and device memory in their order.

An instance computes on one stream, which backends know by its handle. Its copies to the device have a stream of their own,
so that those of one batch go on while another is computed; its copies from the device have one where the model's
configuration asks for it (`optimization.cuda.output_copy_stream`, as in Triton).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from schemas.errors import unavailable
from worker.cuda.runtime import cuda_runtime, refuse, succeed

_KEEP_EVERYTHING = 2**64 - 1


class CudaStream:
    """A stream of GPU `device_id`; see `worker.device_runner.InstanceStream`. Made in the thread that will use it.

    `handle` is its `cudaStream_t`. It lasts for as long as anything refers to it, memory that was allocated on it included.
    """

    def __init__(self, device_id: int) -> None:
        self.device_id = device_id
        self.handle = 0
        self._runtime = runtime = cuda_runtime()
        succeed(runtime.cudaSetDevice(device_id), f"choosing GPU {device_id}")
        _MemoryPools.prepare(runtime, device_id)
        stream = succeed(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking), "making a stream")
        self.handle = int(stream)
        self._elsewhere: tuple[CudaStream, list[DeviceBuffer]] | None = None
        self._to_free: list[int] = []

    def allocate(self, size_bytes: int) -> DeviceBuffer:
        """See `InstanceStream`."""
        if self._elsewhere is None:
            return DeviceBuffer(self, size_bytes)
        stream, kept = self._elsewhere
        memory = stream.allocate(size_bytes)
        stream.synchronize()
        kept.append(memory)
        return memory

    def free(self, pointer: int) -> None:
        """Gives up memory that was allocated on this stream, after what it has been told to do."""
        if self._elsewhere is None:
            self._runtime.cudaFreeAsync(pointer, self.handle)
        else:
            self._to_free.append(pointer)

    @contextlib.contextmanager
    def allocating_on(self, other: CudaStream) -> Iterator[list[DeviceBuffer]]:
        """Meanwhile memory comes from the other stream, and is there at once; what was allocated is in the list.

        For the time while a graph is recorded, to which memory of this stream would belong, and whose launches would each
        give up again what is given up meanwhile: that waits.
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
        """The event is what the stream has been told to do by now."""
        status = self._runtime.cudaEventRecord(event.handle, self.handle)[0]
        if status:
            refuse(status, "recording an event")

    def wait(self, event: CudaEvent) -> None:
        """What the stream is told to do from now on is done after the event, as it was recorded last."""
        status = self._runtime.cudaStreamWaitEvent(self.handle, event.handle, 0)[0]
        if status:
            refuse(status, "ordering streams")

    def copy_in(self, to: int, source: int, size_bytes: int) -> None:
        """Copies host memory to device memory, once the stream has come so far."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        status = self._runtime.cudaMemcpyAsync(to, source, size_bytes, kind, self.handle)[0]
        if status:
            refuse(status, "copying inputs to the GPU")

    def copy_out(self, to: int, source: int, size_bytes: int) -> None:
        """Copies device memory to host memory, once the stream has come so far."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        status = self._runtime.cudaMemcpyAsync(to, source, size_bytes, kind, self.handle)[0]
        if status:
            refuse(status, "copying outputs from the GPU")

    def synchronize(self) -> None:
        """Waits until everything is done that the stream was told to do."""
        succeed(self._runtime.cudaStreamSynchronize(self.handle), "waiting for a stream")

    def check(self) -> None:
        """Raises DeviceLost if the GPU can't be used any more: errors that stay are the answer to whatever is asked."""
        status = self._runtime.cudaStreamQuery(self.handle)[0]
        if status and status != self._runtime.cudaError_t.cudaErrorNotReady:
            refuse(status, "looking after a failure")

    def __del__(self) -> None:
        if self.handle:
            self._runtime.cudaStreamDestroy(self.handle)


class DeviceBuffer:
    """Device memory, given up in the order of its stream when nothing refers to it. See `DeviceMemory`."""

    def __init__(self, stream: CudaStream, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.pointer = 0
        self._stream = stream
        self._runtime = runtime = stream._runtime
        # CUDA has no memory of no bytes, and a tensor without elements has an address all the same.
        size = max(1, size_bytes)
        status, pointer = runtime.cudaMallocAsync(size, stream.handle)
        out_of_memory = runtime.cudaError_t.cudaErrorMemoryAllocation
        if status == out_of_memory:
            _MemoryPools.trim(runtime, stream)
            status, pointer = runtime.cudaMallocAsync(size, stream.handle)
        if status == out_of_memory:
            told = runtime.cudaMemGetInfo()
            free = f"{told[1]} of its {told[2]} bytes are free" if not told[0] else "it does not tell how much is free"
            raise unavailable(f"GPU {stream.device_id} has no memory for {size_bytes} bytes more: {free}")
        if status:
            refuse(status, f"allocating {size_bytes} bytes on GPU {stream.device_id}")
        self.pointer = int(pointer)

    def __del__(self) -> None:
        if self.pointer:
            self._stream.free(self.pointer)


class CudaEvent:
    """An event, which has a time. Whoever waits for it sleeps or `spins`, which is quicker and costs a processor."""

    def __init__(self, spins: bool = False) -> None:
        self.handle = 0
        self._runtime = runtime = cuda_runtime()
        flags = runtime.cudaEventDefault if spins else runtime.cudaEventBlockingSync
        self.handle = int(succeed(runtime.cudaEventCreateWithFlags(flags), "making an event"))

    def synchronize(self, doing: str) -> None:
        """Waits for it. Raises what went wrong before it, as `succeed` does with `doing`."""
        status = self._runtime.cudaEventSynchronize(self.handle)[0]
        if status:
            refuse(status, doing)

    def ns_until(self, later: CudaEvent) -> int:
        """Nanoseconds between the two, once both have come about."""
        elapsed_ms = succeed(self._runtime.cudaEventElapsedTime(self.handle, later.handle), "reading times of events")
        return int(elapsed_ms * 1e6)

    def __del__(self) -> None:
        if self.handle:
            self._runtime.cudaEventDestroy(self.handle)


class InstanceStreams:
    """Those of one instance: `compute`, `copy_in` and `copy_out`, which is `compute` unless it is to be another."""

    def __init__(self, device_id: int, own_copy_out: bool) -> None:
        self.compute = CudaStream(device_id)
        self.copy_in = CudaStream(device_id)
        self.copy_out = CudaStream(device_id) if own_copy_out else self.compute

    def synchronize(self) -> None:
        """Waits until all of them are idle."""
        for stream in (self.copy_in, self.compute, self.copy_out):
            stream.synchronize()


class _MemoryPools:
    """The pools that stream-ordered memory comes from, one a GPU. They keep what is given up for what comes next."""

    _lock = threading.Lock()
    _pools: dict[int, Any] = {}  # noqa: RUF012 - of the process, as CUDA's own are

    @classmethod
    def prepare(cls, runtime: Any, device_id: int) -> None:
        """Has the GPU's pool keep its memory; by default it would be given back at each wait for the GPU."""
        with cls._lock:
            if device_id in cls._pools:
                return
            from cuda.bindings import driver

            pool = succeed(runtime.cudaDeviceGetDefaultMemPool(device_id), "looking for the memory pool")
            threshold = runtime.cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold
            kept = driver.cuuint64_t(_KEEP_EVERYTHING)
            succeed(runtime.cudaMemPoolSetAttribute(pool, threshold, kept), "setting up the memory pool")
            cls._pools[device_id] = pool

    @classmethod
    def trim(cls, runtime: Any, stream: CudaStream) -> None:
        """Gives back what the pool keeps and nobody uses: other libraries have pools of their own to be filled again."""
        stream.synchronize()
        succeed(runtime.cudaMemPoolTrimTo(cls._pools[stream.device_id], 0), "giving back kept memory")
