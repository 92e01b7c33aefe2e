"""`Device`: the fake GPUs of a process with memory, streams and errors; `tests/support/fakes/README.md` has the model."""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

FRESH = 0xA5
"""What memory holds before anything is written to it."""

POISON = 0xDD
"""What memory holds after it was freed."""

LEGACY = 1
"""cudaStreamLegacy, as well as 0: the default stream of the current GPU."""

_FIRST_ADDRESS = 0x7000_0000_0000


class cudaError_t(IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35
    cudaErrorDevicesUnavailable = 46
    cudaErrorInvalidDevice = 101
    cudaErrorMapBufferObjectFailed = 205
    cudaErrorECCUncorrectable = 214
    cudaErrorInvalidResourceHandle = 400
    cudaErrorNotReady = 600
    cudaErrorIllegalAddress = 700
    cudaErrorLaunchOutOfResources = 701
    cudaErrorAssert = 710
    cudaErrorLaunchFailure = 719
    cudaErrorStreamCaptureUnsupported = 900
    cudaErrorStreamCaptureInvalidated = 901
    cudaErrorStreamCaptureIsolation = 905
    cudaErrorStreamCaptureImplicit = 906
    cudaErrorCapturedEvent = 907
    cudaErrorStreamCaptureWrongThread = 908
    cudaErrorUnknown = 999


class Handle(int):
    """A handle of an object of CUDA's. As NVIDIA has deprecated it, `int()` does not convert one."""

    def __int__(self) -> int:
        raise DeprecationWarning("use cuda.bindings.utils.get_cuda_native_handle")


class Fault(Exception):
    """A call that fails with `status`; a sticky one breaks the context of its GPU."""

    def __init__(self, status: cudaError_t) -> None:
        super().__init__(status.name)
        self.status = status


_STAY = {
    cudaError_t.cudaErrorDevicesUnavailable,
    cudaError_t.cudaErrorUnknown,
    cudaError_t.cudaErrorECCUncorrectable,
    cudaError_t.cudaErrorIllegalAddress,
    cudaError_t.cudaErrorAssert,
    cudaError_t.cudaErrorLaunchFailure,
}

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
"""The modes of a capture."""

UNSAFE_IN_CAPTURE = {
    "cudaDeviceSynchronize",
    "cudaEventQuery",
    "cudaFree",
    "cudaFreeHost",
    "cudaHostAlloc",
    "cudaIpcOpenMemHandle",
    "cudaMalloc",
    "cudaMemPoolTrimTo",
    "cudaMemcpy",
}
"""Calls that no stream observes, and which CUDA therefore forbids during a capture, for the threads that its mode names."""


@dataclass(eq=False)
class Operation:
    """An operation queued on a stream; `after` are the events it waits for, as recorded when it was queued."""

    run: Callable[[], None] | None = None
    after: tuple[Mark, ...] = ()
    us: float = 1.0
    what: str = ""
    began_us: float = 0.0
    ended_us: float = 0.0


@dataclass(eq=False)
class Mark:
    """How many operations a stream had when an event was recorded."""

    stream: Stream
    number: int
    operation: Operation | None = None

    @property
    def is_done(self) -> bool:
        return self.stream.done >= self.number


@dataclass(eq=False)
class Capture:
    """A capture of a stream that goes on: what was recorded, by which thread, in which mode."""

    mode: int
    thread: int
    recorded: list[Operation] = field(default_factory=list)
    is_invalid: bool = False


@dataclass(eq=False)
class Stream:
    """A stream of GPU `gpu`. `told` operations were enqueued, of which `done` are done; the others are in `queue`.

    One that `is_blocking` is ordered with the default stream of its GPU, which `is_legacy`.
    """

    handle: int
    gpu: int
    is_blocking: bool = False
    is_legacy: bool = False
    queue: deque[Operation] = field(default_factory=deque)
    told: int = 0
    done: int = 0
    capture: Capture | None = None
    ended_us: float = 0.0
    is_open: bool = True
    reusable: list[tuple[int, int]] = field(default_factory=list)  # (address, size) of memory freed on it


@dataclass(eq=False)
class Event:
    gpu: int
    mark: Mark | None = None
    is_captured: bool = False


@dataclass(eq=False)
class Block:
    """Device memory. One that `is_mapped` belongs to another process."""

    gpu: int
    content: np.ndarray
    is_mapped: bool = False
    frees: int = 0  # frees that were enqueued
    is_freed: bool = False


@dataclass(eq=False)
class Graph:
    gpu: int
    operations: list[Operation]


class Device:
    """The fake GPUs. One lock protects every call, because threads of instances share them."""

    def __init__(self, memory_bytes: int = 1 << 30, devices: int = 1) -> None:
        self.memory_bytes = memory_bytes
        self.pooled: Counter[int] = Counter()  # bytes freed by their users, and kept by the pool of a GPU
        self.keeps_freed_memory: set[int] = set()
        self.reuses_memory = False
        self.devices = devices
        self.hurry: random.Random | None = None
        self.calls: Counter[str] = Counter()
        self.history: list[Operation] = []
        self.broken: dict[int, cudaError_t] = {}
        self.lock = threading.RLock()
        self.contexts: set[int] = set()
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, Event] = {}
        self.graphs: dict[int, Graph] = {}
        self.pinned: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.memory: dict[int, Block] = {}
        self.shared: dict[bytes, Block] = {}
        self.mappings: Counter[int] = Counter()
        self._handles_of_shared: dict[int, bytes] = {}
        self._thread = threading.local()
        self._legacy: dict[int, Stream] = {}
        self._running: list[int] = []  # the GPUs whose operations run now, the innermost last
        self._faults: dict[str, list[cudaError_t]] = {}
        self._handles = itertools.count(0x1000, 0x10)
        self._addresses = _FIRST_ADDRESS

    # Faults set by tests

    def fail(self, call: str, status: str, times: int = 1, after: int = 0) -> None:
        """Makes the next calls of this name fail, after some that succeed."""
        self._faults[call] = [cudaError_t.cudaSuccess] * after + [cudaError_t[status]] * times

    def break_down(self, status: str = "cudaErrorIllegalAddress", gpu: int = 0) -> None:
        """Makes every later call of the context of a GPU fail."""
        self.broken[gpu] = cudaError_t[status]

    # Calls

    def begin(self, call: str) -> None:
        """Called first by every operation. Raises Fault if the operation is to fail."""
        self.calls[call] += 1
        if self.hurry is not None and not self.broken:
            self._do_some(self.hurry)
        if call not in ("cudaSetDevice", "cudaGetDevice"):
            self.check_context(self.current)
            self.contexts.add(self.current)
        faults = self._faults.get(call)
        if faults:
            status = faults.pop(0)
            if status in _STAY:
                self.broken[self.current] = status
            if status:
                raise Fault(status)
        if call in UNSAFE_IN_CAPTURE:
            self._check_captures()

    @property
    def current(self) -> int:
        """The GPU of the calling thread: the first one, unless it has selected another."""
        return int(getattr(self._thread, "gpu", 0))

    def select(self, gpu: int) -> None:
        """Makes a GPU the current one of the calling thread, and creates its context."""
        if not 0 <= gpu < self.devices:
            raise Fault(cudaError_t.cudaErrorInvalidDevice)
        self.check_context(gpu)
        self._thread.gpu = gpu
        self.contexts.add(gpu)

    def check_context(self, gpu: int) -> None:
        """Raises Fault if a sticky error has broken the context of this GPU."""
        if gpu in self.broken:
            raise Fault(self.broken[gpu])

    def _check_captures(self) -> None:
        """Raises Fault, and invalidates the captures concerned, if this thread may not call what no stream observes."""
        own = threading.get_ident()
        forbids = [
            capture
            for stream in self._every_stream()
            if (capture := stream.capture) is not None
            and (capture.mode == GLOBAL or (capture.mode == THREAD_LOCAL and capture.thread == own))
        ]
        for capture in forbids:
            capture.is_invalid = True
        if forbids:
            raise Fault(cudaError_t.cudaErrorStreamCaptureUnsupported)

    def new_handle(self) -> Handle:
        return Handle(next(self._handles))

    def _every_stream(self) -> Iterable[Stream]:
        return [*self.streams.values(), *self._legacy.values()]

    def stream(self, handle: int) -> Stream:
        """The open stream with this handle. Raises Fault if there is none, or if its context is broken."""
        if handle in (0, LEGACY):
            gpu = self.current
            stream = self._legacy.setdefault(gpu, Stream(LEGACY, gpu, is_legacy=True))
        else:
            found = self.streams.get(handle)
            if found is None or not found.is_open:
                raise Fault(cudaError_t.cudaErrorInvalidResourceHandle)
            stream = found
        self.check_context(stream.gpu)
        return stream

    def event(self, handle: int) -> Event:
        event = self.events.get(handle)
        if event is None:
            raise Fault(cudaError_t.cudaErrorInvalidResourceHandle)
        self.check_context(event.gpu)
        return event

    def waited_for(self, handle: int) -> Event:
        """The event, for a call that looks at its state. Raises Fault for one that was recorded in a capture."""
        event = self.event(handle)
        if event.is_captured:
            raise Fault(cudaError_t.cudaErrorCapturedEvent)
        return event

    def tell(self, stream: Stream, operation: Operation) -> None:
        """Enqueues an operation, in order with the default stream where the stream's kind demands it."""
        if stream.capture is not None:
            if any(mark.stream is not stream for mark in operation.after):
                stream.capture.is_invalid = True
                raise Fault(cudaError_t.cudaErrorStreamCaptureIsolation)
            stream.capture.recorded.append(operation)
            return
        if stream.is_legacy:
            blocking = [s for s in self.streams.values() if s.is_blocking and s.gpu == stream.gpu]
            captured = [s.capture for s in blocking if s.capture is not None and s.capture.mode != RELAXED]
            for capture in captured:
                capture.is_invalid = True
            if captured:
                raise Fault(cudaError_t.cudaErrorStreamCaptureImplicit)
            operation.after += tuple(Mark(s, s.told) for s in blocking)
        elif stream.is_blocking and (legacy := self._legacy.get(stream.gpu)) is not None:
            operation.after += (Mark(legacy, legacy.told),)
        stream.queue.append(operation)
        stream.told += 1

    def finish(self, stream: Stream, number: int | None = None) -> None:
        """Runs the operations of the stream up to `number`, and those of other streams that they depend on."""
        if stream.capture is not None:
            stream.capture.is_invalid = True
            raise Fault(cudaError_t.cudaErrorStreamCaptureUnsupported)
        target = stream.told if number is None else number
        while stream.done < target:
            self._do_next(stream)

    def finish_all(self) -> None:
        """Waits for all streams that are not captured."""
        for stream in self._every_stream():
            if stream.capture is None:
                self.finish(stream)

    def _do_next(self, stream: Stream) -> None:
        operation = stream.queue.popleft()
        began_us = stream.ended_us
        for mark in operation.after:
            self.finish(mark.stream, mark.number)
            began_us = max(began_us, mark.stream.ended_us)
        operation.began_us, operation.ended_us = began_us, began_us + operation.us
        stream.ended_us = operation.ended_us
        self.history.append(operation)
        if operation.run is not None:
            self._running.append(stream.gpu)
            try:
                operation.run()
            except Fault as fault:
                if fault.status in _STAY:
                    self.broken[stream.gpu] = fault.status
                raise
            finally:
                self._running.pop()
        stream.done += 1

    def _do_some(self, randomness: random.Random) -> None:
        for _ in range(randomness.randrange(4)):
            ready = [
                stream
                for stream in self._every_stream()
                if stream.queue and all(mark.is_done for mark in stream.queue[0].after)
            ]
            if not ready:
                return
            self._do_next(randomness.choice(ready))

    # Memory

    @property
    def used_bytes(self) -> int:
        return sum(self.used_on(gpu) for gpu in range(self.devices))

    @property
    def pooled_bytes(self) -> int:
        return sum(self.pooled.values())

    def used_on(self, gpu: int) -> int:
        """Bytes of this process that are allocated on a GPU."""
        blocks = self.memory.values()
        return sum(len(b.content) for b in blocks if b.gpu == gpu and not b.is_freed and not b.is_mapped)

    def allocate(self, size: int, gpu: int) -> int:
        if self.used_on(gpu) + size > self.memory_bytes:
            raise Fault(cudaError_t.cudaErrorMemoryAllocation)
        self.pooled[gpu] = max(0, self.pooled[gpu] - size)
        return self._place(Block(gpu, np.full(size, FRESH, np.uint8)))

    def _place(self, block: Block) -> int:
        address = self._addresses
        self._addresses += -(-len(block.content) // 512) * 512 + 512
        self.memory[address] = block
        return address

    def allocate_in_order(self, size: int, stream: Stream) -> int:
        """As CUDA's pools do: memory freed on the stream may be allocated on it again at once, before it is idle."""
        if self.reuses_memory:
            for at, (address, freed) in enumerate(stream.reusable):
                if freed == size:
                    del stream.reusable[at]
                    self.memory[address].is_freed = False
                    self.pooled[stream.gpu] -= size
                    return address
        return self.allocate(size, stream.gpu)

    def trim(self, gpu: int, size: int) -> None:
        """Returns pooled memory of a GPU beyond `size` bytes."""
        self.pooled[gpu] = min(self.pooled[gpu], size)
        for stream in self.streams.values():
            if stream.gpu == gpu:
                stream.reusable.clear()

    def free_in_order(self, address: int, stream: Stream) -> None:
        """Frees memory after the work that the stream has. Raises Fault for an address that is not allocated."""
        block = self.memory.get(address)
        if block is None or block.is_freed or block.is_mapped or block.gpu != stream.gpu:
            raise Fault(cudaError_t.cudaErrorInvalidValue)
        block.frees += 1
        frees = block.frees
        is_reused = self.reuses_memory and stream.capture is None

        def free() -> None:
            block.content[:] = POISON
            if block.frees == frees and not (is_reused and not block.is_freed):
                self.release(address)

        self.tell(stream, Operation(free, what="free"))
        if is_reused:
            block.is_freed = True
            self.pooled[block.gpu] += len(block.content)
            stream.reusable.append((address, len(block.content)))

    def release(self, address: int) -> None:
        """Frees memory at once. What it held is gone, and every later access is an illegal one, until it is reused."""
        block = self.memory[address]
        block.content[:] = POISON
        if not block.is_freed:
            block.is_freed = True
            if block.gpu in self.keeps_freed_memory:
                self.pooled[block.gpu] += len(block.content)

    def bytes_at(self, address: int, size: int) -> np.ndarray:
        """The device memory at an address.

        Raises Fault for a range outside a single allocation, in freed memory, or on another GPU than the one whose kernel
        reads it (there is no peer access).
        """
        for base, block in self.memory.items():
            if base <= address and address + size <= base + len(block.content):
                is_foreign = bool(self._running) and self._running[-1] != block.gpu
                if is_foreign or (block.is_freed and not self.reuses_memory):
                    break
                return block.content[address - base : address - base + size]
        raise Fault(cudaError_t.cudaErrorIllegalAddress)

    def is_pinned(self, address: int, size: int) -> bool:
        return any(base <= address and address + size <= base + len(memory) for base, memory in self.pinned.items())

    def was_pinned(self, address: int, size: int) -> bool:
        """Whether a range of host memory was pinned, and has been freed."""
        return any(
            base < 0 and address < -base + len(memory) and -base < address + size
            for base, memory in self.pinned.items()
        )

    # Memory of other processes

    def share(self, content: bytes, gpu: int = 0) -> bytes:
        """Another process allocates memory with this content and exports it; returns its handle."""
        handle = len(self.shared).to_bytes(64, "little")
        self.shared[handle] = Block(gpu, np.frombuffer(bytearray(content), np.uint8), is_mapped=True)
        return handle

    def open_shared(self, handle: bytes) -> int:
        """Maps shared memory into the current context; the same address each time."""
        block = self.shared.get(handle)
        if block is None:
            raise Fault(cudaError_t.cudaErrorInvalidResourceHandle)
        if block.gpu != self.current:
            raise Fault(cudaError_t.cudaErrorMapBufferObjectFailed)  # there is no peer access
        found = [at for at, h in self._handles_of_shared.items() if h == handle]
        address = found[0] if found else self._place(block)
        self._handles_of_shared[address] = handle
        self.mappings[address] += 1
        return address

    def close_shared(self, address: int) -> None:
        """Closes one mapping. The queued work that uses it fails then."""
        block = self.memory.get(address)
        if block is None or not block.is_mapped:
            raise Fault(cudaError_t.cudaErrorInvalidValue)
        if block.gpu != self.current:
            raise Fault(cudaError_t.cudaErrorInvalidResourceHandle)
        self.mappings[address] -= 1
        if not self.mappings[address]:
            del self.memory[address], self.mappings[address], self._handles_of_shared[address]
