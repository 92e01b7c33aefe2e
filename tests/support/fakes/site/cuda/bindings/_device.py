"""`Device`: the fake GPU with its memory, streams and errors; `tests/support/fakes/README.md` describes the model."""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

FRESH = 0xA5
"""What memory holds before anything is written to it."""

_FIRST_ADDRESS = 0x7000_0000_0000


class cudaError_t(IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35
    cudaErrorInvalidDevice = 101
    cudaErrorECCUncorrectable = 214
    cudaErrorInvalidResourceHandle = 400
    cudaErrorNotReady = 600
    cudaErrorIllegalAddress = 700
    cudaErrorLaunchOutOfResources = 701
    cudaErrorAssert = 710
    cudaErrorLaunchFailure = 719
    cudaErrorStreamCaptureUnsupported = 900
    cudaErrorStreamCaptureInvalidated = 901


class Fault(Exception):
    """A call that fails with `status`; a sticky one breaks the device."""

    def __init__(self, status: cudaError_t) -> None:
        super().__init__(status.name)
        self.status = status


_STAY = {
    cudaError_t.cudaErrorECCUncorrectable,
    cudaError_t.cudaErrorIllegalAddress,
    cudaError_t.cudaErrorAssert,
    cudaError_t.cudaErrorLaunchFailure,
}


@dataclass(eq=False)
class Operation:
    """An operation queued on a stream; `after` is the event it waits for, as recorded when it was queued."""

    run: Callable[[], None] | None = None
    after: Mark | None = None
    us: float = 1.0
    what: str = ""
    began_us: float = 0.0
    ended_us: float = 0.0


@dataclass(eq=False)
class Mark:
    """How many operations a stream had when an event was recorded."""

    stream: Stream
    number: int

    @property
    def is_done(self) -> bool:
        return self.stream.done >= self.number


@dataclass(eq=False)
class Stream:
    """`told` operations were enqueued, of which `done` are done; the others are in `queue`."""

    handle: int
    queue: deque[Operation] = field(default_factory=deque)
    told: int = 0
    done: int = 0
    recording: list[Operation] | None = None
    is_invalid: bool = False
    ended_us: float = 0.0
    is_open: bool = True


@dataclass(eq=False)
class Event:
    mark: Mark | None = None


class Device:
    """The fake GPU. One lock protects every call, because threads of instances share it."""

    def __init__(self, memory_bytes: int = 1 << 30, devices: int = 1) -> None:
        self.memory_bytes = memory_bytes
        self.pooled_bytes = 0  # freed by their users, and kept by the pool
        self.keeps_freed_memory = False
        self.devices = devices
        self.hurry: random.Random | None = None
        self.calls: Counter[str] = Counter()
        self.history: list[Operation] = []
        self.broken: cudaError_t | None = None
        self.lock = threading.RLock()
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, Event] = {}
        self.graphs: dict[int, list[Operation]] = {}
        self.pinned: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.memory: dict[int, np.ndarray] = {}
        self._faults: dict[str, list[cudaError_t]] = {}
        self._handles = itertools.count(0x1000, 0x10)
        self._addresses = _FIRST_ADDRESS

    # Faults set by tests

    def fail(self, call: str, status: str, times: int = 1, after: int = 0) -> None:
        """Makes the next calls of this name fail, after some that succeed."""
        self._faults[call] = [cudaError_t.cudaSuccess] * after + [cudaError_t[status]] * times

    def break_down(self, status: str = "cudaErrorIllegalAddress") -> None:
        """Makes every later call fail."""
        self.broken = cudaError_t[status]

    # Calls

    def begin(self, call: str) -> None:
        """Called first by every operation. Raises Fault if the operation is to fail."""
        self.calls[call] += 1
        if self.hurry is not None and self.broken is None:
            self._do_some(self.hurry)
        if self.broken is not None:
            raise Fault(self.broken)
        faults = self._faults.get(call)
        if faults:
            status = faults.pop(0)
            if status in _STAY:
                self.broken = status
            if status:
                raise Fault(status)

    def new_handle(self) -> int:
        return next(self._handles)

    def stream(self, handle: int) -> Stream:
        stream = self.streams.get(int(handle))
        if stream is None or not stream.is_open:
            raise Fault(cudaError_t.cudaErrorInvalidResourceHandle)
        return stream

    def tell(self, stream: Stream, operation: Operation) -> None:
        if stream.recording is not None:
            stream.recording.append(operation)
            return
        stream.queue.append(operation)
        stream.told += 1

    def finish(self, stream: Stream, number: int | None = None) -> None:
        """Runs the operations of the stream up to `number`, and those of other streams that they depend on."""
        if stream.recording is not None:
            stream.is_invalid = True
            raise Fault(cudaError_t.cudaErrorStreamCaptureUnsupported)
        target = stream.told if number is None else number
        while stream.done < target:
            self._do_next(stream)

    def _do_next(self, stream: Stream) -> None:
        operation = stream.queue.popleft()
        began_us = stream.ended_us
        if operation.after is not None:
            self.finish(operation.after.stream, operation.after.number)
            began_us = max(began_us, operation.after.stream.ended_us)
        operation.began_us, operation.ended_us = began_us, began_us + operation.us
        stream.ended_us = operation.ended_us
        self.history.append(operation)
        if operation.run is not None:
            try:
                operation.run()
            except Fault as fault:
                if fault.status in _STAY:
                    self.broken = fault.status
                raise
        stream.done += 1

    def _do_some(self, randomness: random.Random) -> None:
        for _ in range(randomness.randrange(4)):
            ready = [
                stream
                for stream in self.streams.values()
                if stream.queue and (stream.queue[0].after is None or stream.queue[0].after.is_done)
            ]
            if not ready:
                return
            self._do_next(randomness.choice(ready))

    # Memory

    @property
    def used_bytes(self) -> int:
        return sum(map(len, self.memory.values()))

    def allocate(self, size: int) -> int:
        if self.used_bytes + size > self.memory_bytes:
            raise Fault(cudaError_t.cudaErrorMemoryAllocation)
        self.pooled_bytes = max(0, self.pooled_bytes - size)
        address = self._addresses
        self._addresses += -(-size // 512) * 512 + 512
        self.memory[address] = np.full(size, FRESH, np.uint8)
        return address

    def bytes_at(self, address: int, size: int) -> np.ndarray:
        """The device memory at an address. Raises Fault for a range outside a single allocation."""
        for base, content in self.memory.items():
            if base <= address and address + size <= base + len(content):
                return content[address - base : address - base + size]
        raise Fault(cudaError_t.cudaErrorIllegalAddress)

    def is_pinned(self, address: int, size: int) -> bool:
        return any(base <= address and address + size <= base + len(memory) for base, memory in self.pinned.items())
