"""The fake CUDA runtime under the names of `cuda.bindings.runtime`; `tests/support/fakes/README.md` describes the model."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np

from ._device import LEGACY, RELAXED, Capture, Device, Event, Fault, Graph, Mark, Operation, Stream, cudaError_t

DEVICE = Device()

cudaStreamDefault = 0
cudaStreamNonBlocking = 1
cudaStreamLegacy = LEGACY
cudaEventDefault = 0
cudaEventBlockingSync = 1
cudaHostAllocPortable = 1


class cudaMemcpyKind(IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class cudaMemPoolAttr(IntEnum):
    cudaMemPoolAttrReleaseThreshold = 4


class cudaStreamCaptureMode(IntEnum):
    cudaStreamCaptureModeGlobal = 0
    cudaStreamCaptureModeThreadLocal = 1
    cudaStreamCaptureModeRelaxed = 2


class cudaIpcMemHandle_t:
    """A handle of 64 bytes at `getPtr()`."""

    def __init__(self) -> None:
        self.bytes = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:
        return ctypes.addressof(self.bytes)


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
    device.select(ordinal)


@_call(1)
def cudaGetDevice(device: Device) -> int:
    return device.current


@_call()
def cudaDeviceSynchronize(device: Device) -> None:
    device.finish_all()


@_call(1)
def cudaStreamCreateWithFlags(device: Device, flags: int) -> int:
    handle = device.new_handle()
    device.streams[handle] = Stream(handle, device.current, is_blocking=flags != cudaStreamNonBlocking)
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
    recorded = device.event(event)
    if recorded.is_captured:  # it would make the stream part of the capture
        raise Fault(cudaError_t.cudaErrorStreamCaptureUnsupported)
    if recorded.mark is not None:
        device.tell(device.stream(handle), Operation(after=(recorded.mark,), us=0, what="wait"))


@_call(1)
def cudaEventCreateWithFlags(device: Device, flags: int) -> int:
    handle = device.new_handle()
    device.events[handle] = Event(device.current)
    return handle


@_call()
def cudaEventDestroy(device: Device, handle: int) -> None:
    device.event(handle)
    del device.events[handle]


@_call()
def cudaEventRecord(device: Device, event: int, handle: int) -> None:
    stream, recorded = device.stream(handle), device.event(event)
    if recorded.gpu != stream.gpu:
        raise Fault(cudaError_t.cudaErrorInvalidResourceHandle)
    operation = Operation(us=0, what="record")
    device.tell(stream, operation)
    recorded.is_captured = stream.capture is not None
    recorded.mark = Mark(stream, stream.told, operation)


@_call()
def cudaEventSynchronize(device: Device, event: int) -> None:
    mark = device.waited_for(event).mark
    if mark is not None:
        device.finish(mark.stream, mark.number)


@_call()
def cudaEventQuery(device: Device, event: int) -> cudaError_t:
    mark = device.waited_for(event).mark
    return cudaError_t.cudaSuccess if mark is None or mark.is_done else cudaError_t.cudaErrorNotReady


@_call(1)
def cudaEventElapsedTime(device: Device, start: int, end: int) -> float:
    events = device.waited_for(start), device.waited_for(end)
    marks = [event.mark for event in events]
    if marks[0] is None or marks[1] is None or events[0].gpu != events[1].gpu:
        raise Fault(cudaError_t.cudaErrorInvalidResourceHandle)
    if not all(mark.is_done for mark in marks if mark is not None):
        raise Fault(cudaError_t.cudaErrorNotReady)
    ends_us = [mark.operation.ended_us for mark in marks if mark is not None and mark.operation is not None]
    return float(ends_us[1] - ends_us[0]) / 1000


@_call(1)
def cudaDeviceGetDefaultMemPool(device: Device, ordinal: int) -> int:
    return 0x900 + ordinal


@_call()
def cudaMemPoolSetAttribute(device: Device, pool: int, attribute: cudaMemPoolAttr, value: Any) -> None:
    if type(value).__name__ != "cuuint64_t":
        raise TypeError("the real one takes no plain number")
    device.keeps_freed_memory.add(pool - 0x900)


@_call()
def cudaMemPoolTrimTo(device: Device, pool: int, size: int) -> None:
    device.trim(pool - 0x900, size)


@_call(2)
def cudaMemGetInfo(device: Device) -> tuple[int, int]:
    gpu = device.current
    return device.memory_bytes - device.used_on(gpu) - device.pooled[gpu], device.memory_bytes


@_call(1)
def cudaMalloc(device: Device, size: int) -> int:
    return device.allocate(size, device.current)


@_call()
def cudaFree(device: Device, pointer: int) -> None:
    if pointer not in device.memory or device.memory[pointer].is_freed:
        raise Fault(cudaError_t.cudaErrorInvalidValue)
    device.finish_all()
    device.release(pointer)


@_call(1)
def cudaMallocAsync(device: Device, size: int, handle: int) -> int:
    stream = device.stream(handle)
    if stream.capture is not None:
        # A graph's own memory, which this package never asks for.
        stream.capture.is_invalid = True
        raise Fault(cudaError_t.cudaErrorStreamCaptureUnsupported)
    return device.allocate_in_order(size, stream)


@_call()
def cudaFreeAsync(device: Device, pointer: int, handle: int) -> None:
    device.free_in_order(pointer, device.stream(handle))


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
    if pointer not in device.pinned:
        raise Fault(cudaError_t.cudaErrorInvalidValue)
    device.finish_all()
    ctypes.memset(pointer, 0xDD, len(device.pinned[pointer]))
    # Kept, for whoever still reads it: that is wrong data then, and no crash of the tests.
    device.pinned[-pointer] = device.pinned.pop(pointer)


def _copy(device: Device, to: int, source: int, size: int, kind: cudaMemcpyKind, stream: Stream) -> None:
    """Enqueues a copy; one from pageable memory reads it now."""
    if kind is cudaMemcpyKind.cudaMemcpyHostToDevice:
        content = None if device.is_pinned(source, size) else _host(device, source, size).copy()

        def copy_in() -> None:
            device.bytes_at(to, size)[:] = _host(device, source, size) if content is None else content

        device.tell(stream, Operation(copy_in, us=5 + size / 1e4, what="copy in"))
    elif kind is cudaMemcpyKind.cudaMemcpyDeviceToDevice:

        def copy() -> None:
            device.bytes_at(to, size)[:] = device.bytes_at(source, size)

        device.tell(stream, Operation(copy, us=1 + size / 1e6, what="copy within"))
    else:

        def copy_out() -> None:
            _host(device, to, size)[:] = device.bytes_at(source, size)

        device.tell(stream, Operation(copy_out, us=5 + size / 1e4, what="copy out"))


@_call()
def cudaMemcpyAsync(device: Device, to: int, source: int, size: int, kind: cudaMemcpyKind, handle: int) -> None:
    stream = device.stream(handle)
    _copy(device, to, source, size, kind, stream)
    if kind is cudaMemcpyKind.cudaMemcpyDeviceToHost and not device.is_pinned(to, size):
        device.finish(stream)


@_call()
def cudaMemcpy(device: Device, to: int, source: int, size: int, kind: cudaMemcpyKind) -> None:
    stream = device.stream(LEGACY)
    _copy(device, to, source, size, kind, stream)
    device.finish(stream)


@_call(1)
def cudaIpcOpenMemHandle(device: Device, handle: cudaIpcMemHandle_t, flags: int) -> int:
    if flags != 1:
        raise Fault(cudaError_t.cudaErrorInvalidValue)
    return device.open_shared(handle.bytes.raw)


@_call()
def cudaIpcCloseMemHandle(device: Device, pointer: int) -> None:
    device.close_shared(pointer)


@_call()
def cudaStreamBeginCapture(device: Device, handle: int, mode: cudaStreamCaptureMode) -> None:
    stream = device.stream(handle)
    if stream.is_legacy:
        raise Fault(cudaError_t.cudaErrorStreamCaptureImplicit)
    if stream.capture is not None:
        raise Fault(cudaError_t.cudaErrorInvalidValue)
    stream.capture = Capture(int(mode), threading.get_ident())


@_call(1)
def cudaStreamEndCapture(device: Device, handle: int) -> int:
    stream = device.stream(handle)
    capture = stream.capture
    if capture is None:
        raise Fault(cudaError_t.cudaErrorInvalidValue)
    if capture.mode != RELAXED and capture.thread != threading.get_ident():
        capture.is_invalid = True
        raise Fault(cudaError_t.cudaErrorStreamCaptureWrongThread)
    stream.capture = None
    if capture.is_invalid:
        raise Fault(cudaError_t.cudaErrorStreamCaptureInvalidated)
    graph = device.new_handle()
    device.graphs[graph] = Graph(stream.gpu, capture.recorded)
    return graph


@_call(1)
def cudaGraphInstantiate(device: Device, graph: int, flags: int) -> int:
    executable = device.new_handle()
    device.graphs[executable] = device.graphs[graph]
    return executable


@_call()
def cudaGraphLaunch(device: Device, executable: int, handle: int) -> None:
    stream, graph = device.stream(handle), device.graphs[executable]
    if graph.gpu != stream.gpu:
        raise Fault(cudaError_t.cudaErrorInvalidResourceHandle)
    for operation in graph.operations:
        device.tell(stream, Operation(operation.run, (), operation.us, operation.what))


@_call()
def cudaGraphDestroy(device: Device, graph: int) -> None:
    del device.graphs[graph]


@_call()
def cudaGraphExecDestroy(device: Device, executable: int) -> None:
    del device.graphs[executable]


@_call()
def launch(device: Device, handle: int, operation: Callable[[], None], us: float = 100.0) -> None:
    """A kernel. It may raise `Fault`. The current GPU of the thread must be that of the stream."""
    stream = device.stream(handle)
    if stream.gpu != device.current:
        raise Fault(cudaError_t.cudaErrorInvalidResourceHandle)
    device.tell(stream, Operation(operation, us=us, what="kernel"))


def array_at(pointer: int, datatype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Device memory as an array, for kernels."""
    numpy_type = np.dtype(datatype)
    return DEVICE.bytes_at(pointer, int(np.prod(shape)) * numpy_type.itemsize).view(numpy_type).reshape(shape)


def _host(device: Device, address: int, size: int) -> np.ndarray:
    if device.was_pinned(address, size) and not device.is_pinned(address, size):
        raise Fault(cudaError_t.cudaErrorIllegalAddress)
    return np.frombuffer((ctypes.c_ubyte * size).from_address(address), np.uint8)
