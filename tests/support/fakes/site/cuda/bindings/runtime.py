"""The fake CUDA runtime under the names of `cuda.bindings.runtime`; `tests/support/fakes/README.md` describes the model."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np

from ._device import Device, Event, Fault, Mark, Operation, Stream, cudaError_t

DEVICE = Device()

cudaStreamNonBlocking = 1
cudaEventDefault = 0
cudaEventBlockingSync = 1
cudaHostAllocPortable = 1


class cudaMemcpyKind(IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2


class cudaMemPoolAttr(IntEnum):
    cudaMemPoolAttrReleaseThreshold = 4


class cudaStreamCaptureMode(IntEnum):
    cudaStreamCaptureModeRelaxed = 2


def reset(**device: Any) -> Device:
    """A new device."""
    global DEVICE
    DEVICE = Device(**device)
    return DEVICE


def _call(values: int = 0) -> Callable[[Callable[..., Any]], Callable[..., tuple[Any, ...]]]:
    """A function of CUDA's, which returns a status and so many values."""

    def wrap(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        @functools.wraps(function)
        def called(*arguments: Any) -> tuple[Any, ...]:
            device = DEVICE
            with device.lock:
                try:
                    device.begin(function.__name__)
                    outcome = function(device, *arguments)
                except Fault as fault:
                    return (fault.status, *[None] * values)
            if isinstance(outcome, cudaError_t):
                return (outcome,)
            return (cudaError_t.cudaSuccess, *(outcome if values > 1 else [outcome] * values))

        return called

    return wrap


@_call()
def cudaSetDevice(device: Device, ordinal: int) -> None:
    if not 0 <= ordinal < device.devices:
        raise Fault(cudaError_t.cudaErrorInvalidDevice)


@_call(1)
def cudaStreamCreateWithFlags(device: Device, flags: int) -> int:
    handle = device.new_handle()
    device.streams[handle] = Stream(handle)
    return handle


@_call()
def cudaStreamDestroy(device: Device, handle: int) -> None:
    device.stream(handle).is_open = False


@_call()
def cudaStreamSynchronize(device: Device, handle: int) -> None:
    device.finish(device.stream(handle))


@_call()
def cudaStreamQuery(device: Device, handle: int) -> cudaError_t:
    return cudaError_t.cudaErrorNotReady if device.stream(handle).queue else cudaError_t.cudaSuccess


@_call()
def cudaStreamWaitEvent(device: Device, handle: int, event: int, flags: int) -> None:
    mark = device.events[event].mark
    if mark is not None:
        device.tell(device.stream(handle), Operation(after=mark, us=0, what="wait"))


@_call(1)
def cudaEventCreateWithFlags(device: Device, flags: int) -> int:
    handle = device.new_handle()
    device.events[handle] = Event()
    return handle


@_call()
def cudaEventDestroy(device: Device, handle: int) -> None:
    del device.events[handle]


@_call()
def cudaEventRecord(device: Device, event: int, handle: int) -> None:
    stream = device.stream(handle)
    operation = Operation(us=0, what="record")
    device.tell(stream, operation)
    mark = device.events[event].mark = Mark(stream, stream.told)
    mark.operation = operation  # type: ignore[attr-defined]  # for its time


@_call()
def cudaEventSynchronize(device: Device, event: int) -> None:
    mark = device.events[event].mark
    if mark is not None:
        device.finish(mark.stream, mark.number)


@_call(1)
def cudaEventElapsedTime(device: Device, start: int, end: int) -> float:
    marks = device.events[start].mark, device.events[end].mark
    if marks[0] is None or marks[1] is None:
        raise Fault(cudaError_t.cudaErrorInvalidResourceHandle)
    if not all(mark.is_done for mark in marks if mark is not None):
        raise Fault(cudaError_t.cudaErrorNotReady)
    return float(marks[1].operation.ended_us - marks[0].operation.ended_us) / 1000  # type: ignore[attr-defined]


@_call(1)
def cudaDeviceGetDefaultMemPool(device: Device, ordinal: int) -> int:
    return 0x999


@_call()
def cudaMemPoolSetAttribute(device: Device, pool: int, attribute: cudaMemPoolAttr, value: Any) -> None:
    if type(value).__name__ != "cuuint64_t":
        raise TypeError("the real one takes no plain number")
    device.keeps_freed_memory = True


@_call()
def cudaMemPoolTrimTo(device: Device, pool: int, size: int) -> None:
    device.pooled_bytes = min(device.pooled_bytes, size)


@_call(2)
def cudaMemGetInfo(device: Device) -> tuple[int, int]:
    return device.memory_bytes - device.used_bytes - device.pooled_bytes, device.memory_bytes


@_call(1)
def cudaMallocAsync(device: Device, size: int, handle: int) -> int:
    stream = device.stream(handle)
    if stream.recording is not None:
        # A graph's own memory, which this package never asks for.
        stream.is_invalid = True
        raise Fault(cudaError_t.cudaErrorStreamCaptureUnsupported)
    return device.allocate(size)


@_call()
def cudaFreeAsync(device: Device, pointer: int, handle: int) -> None:
    def free() -> None:
        size = len(device.memory.pop(pointer))
        if device.keeps_freed_memory:
            device.pooled_bytes += size

    device.tell(device.stream(handle), Operation(free, what="free"))


@_call()
def cudaMemsetAsync(device: Device, pointer: int, value: int, size: int, handle: int) -> None:
    def clear() -> None:
        device.bytes_at(pointer, size)[:] = value

    device.tell(device.stream(handle), Operation(clear, what="clear"))


@_call(1)
def cudaHostAlloc(device: Device, size: int, flags: int) -> int:
    memory = ctypes.create_string_buffer(b"\xa5" * size, size)
    device.pinned[ctypes.addressof(memory)] = memory
    return ctypes.addressof(memory)


@_call()
def cudaFreeHost(device: Device, pointer: int) -> None:
    for stream in device.streams.values():
        device.finish(stream)
    ctypes.memset(pointer, 0x5A, len(device.pinned[pointer]))
    # Kept, for whoever still reads it: that is wrong data then, and no crash of the tests.
    device.pinned[-pointer] = device.pinned.pop(pointer)


@_call()
def cudaMemcpyAsync(device: Device, to: int, source: int, size: int, kind: cudaMemcpyKind, handle: int) -> None:
    stream = device.stream(handle)
    if kind is cudaMemcpyKind.cudaMemcpyHostToDevice:
        content = None if device.is_pinned(source, size) else _host(source, size).copy()

        def copy_in() -> None:
            device.bytes_at(to, size)[:] = _host(source, size) if content is None else content

        device.tell(stream, Operation(copy_in, us=5 + size / 1e4, what="copy in"))
        return

    def copy_out() -> None:
        _host(to, size)[:] = device.bytes_at(source, size)

    device.tell(stream, Operation(copy_out, us=5 + size / 1e4, what="copy out"))
    if not device.is_pinned(to, size):
        device.finish(stream)


@_call()
def cudaStreamBeginCapture(device: Device, handle: int, mode: cudaStreamCaptureMode) -> None:
    stream = device.stream(handle)
    stream.recording, stream.is_invalid = [], False


@_call(1)
def cudaStreamEndCapture(device: Device, handle: int) -> int:
    stream = device.stream(handle)
    recorded, stream.recording = stream.recording, None
    if recorded is None or stream.is_invalid:
        raise Fault(cudaError_t.cudaErrorStreamCaptureInvalidated)
    graph = device.new_handle()
    device.graphs[graph] = recorded
    return graph


@_call(1)
def cudaGraphInstantiate(device: Device, graph: int, flags: int) -> int:
    executable = device.new_handle()
    device.graphs[executable] = device.graphs[graph]
    return executable


@_call()
def cudaGraphLaunch(device: Device, executable: int, handle: int) -> None:
    for operation in device.graphs[executable]:
        device.tell(device.stream(handle), Operation(operation.run, operation.after, operation.us, operation.what))


@_call()
def cudaGraphDestroy(device: Device, graph: int) -> None:
    del device.graphs[graph]


@_call()
def cudaGraphExecDestroy(device: Device, executable: int) -> None:
    del device.graphs[executable]


@_call()
def launch(device: Device, handle: int, operation: Callable[[], None], us: float = 100.0) -> None:
    """A kernel. It may raise `Fault`."""
    device.tell(device.stream(handle), Operation(operation, us=us, what="kernel"))


def array_at(pointer: int, datatype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Device memory as an array, for kernels."""
    numpy_type = np.dtype(datatype)
    return DEVICE.bytes_at(pointer, int(np.prod(shape)) * numpy_type.itemsize).view(numpy_type).reshape(shape)


def _host(address: int, size: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_ubyte * size).from_address(address), np.uint8)
