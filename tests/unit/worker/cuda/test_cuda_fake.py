"""The fake CUDA runtime is as strict as hardware: each mistake shows as an error or as wrong data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.fakes.cuda_device import GPU, OUT, KernelRunner, config, fake_cuda_runtime, numbers, run, values
from weir.worker.backend_api.interface import DeviceLost
from weir.worker.cuda.device_instance import DeviceInstance

FRESH, POISON = 0xA5, 0xDD


@pytest.fixture
def cuda() -> Iterator[Any]:
    with fake_cuda_runtime() as runtime:
        runtime.reset(devices=2)
        runtime.cudaSetDevice(0)
        yield runtime


def ok(outcome: tuple[Any, ...]) -> Any:
    assert not outcome[0], outcome[0].name
    return outcome[1] if len(outcome) == 2 else None


def name(outcome: tuple[Any, ...]) -> str:
    return str(outcome[0].name)


def in_thread(act: Callable[[], Any]) -> Any:
    outcomes: list[Any] = []
    thread = threading.Thread(target=lambda: outcomes.append(act()))
    thread.start()
    thread.join()
    return outcomes[0]


def fill(cuda: Any, stream: int, pointer: int, value: int) -> None:
    def kernel() -> None:
        cuda.array_at(pointer, np.uint8, (16,))[:] = value

    ok(cuda.launch(stream, kernel))


def content(cuda: Any, pointer: int) -> int:
    """The first byte of device memory, without waiting for anything."""
    return int(cuda.array_at(pointer, np.uint8, (16,))[0])


# The default stream


def test_the_default_stream_is_ordered_with_blocking_streams_only(cuda: Any) -> None:
    blocking, other = (ok(cuda.cudaStreamCreateWithFlags(flags)) for flags in (0, cuda.cudaStreamNonBlocking))
    first, second = (ok(cuda.cudaMalloc(16)) for _ in range(2))
    fill(cuda, blocking, first, 1)
    fill(cuda, other, second, 2)
    fill(cuda, 0, first, 3)
    ok(cuda.cudaStreamSynchronize(0))
    # What was on the blocking stream ran before; the other stream has not even begun.
    assert (content(cuda, first), content(cuda, second)) == (3, FRESH)
    fill(cuda, 0, first, 4)
    fill(cuda, blocking, second, 5)
    ok(cuda.cudaStreamSynchronize(blocking))
    assert (content(cuda, first), content(cuda, second)) == (4, 5)
    fill(cuda, cuda.cudaStreamLegacy, first, 6)
    fill(cuda, other, second, 7)
    ok(cuda.cudaStreamSynchronize(other))
    assert (content(cuda, first), content(cuda, second)) == (4, 7)


def test_a_model_on_the_default_stream_computes_too_late(cuda: Any) -> None:
    class Misled(KernelRunner):
        def enqueue(self, inputs: Any) -> Any:
            handle, self._stream.handle = self._stream.handle, 0
            try:
                return super().enqueue(inputs)
            finally:
                self._stream.handle = handle

    def opened(stream: Any) -> KernelRunner:
        memory = stream.allocate

        class OnDefault:
            device_id, handle = stream.device_id, stream.handle

            def allocate(self, size_bytes: int) -> Any:
                return memory(size_bytes)

        return Misled(cuda, OnDefault(), lambda a: [a["IN"] * 2], lambda i: [("FP32", tuple(i["IN"].shape))])  # type: ignore[arg-type]

    instance = DeviceInstance(opened, GPU, config(), OUT)
    assert values(run(instance, numbers([1]))) != [[[2]]]


# Captures


def capture(cuda: Any, mode: str) -> int:
    stream = ok(cuda.cudaStreamCreateWithFlags(cuda.cudaStreamNonBlocking))
    ok(cuda.cudaStreamBeginCapture(stream, cuda.cudaStreamCaptureMode[f"cudaStreamCaptureMode{mode}"]))
    return stream


@pytest.mark.parametrize(
    ("mode", "own_thread", "other_thread"),
    [("Global", False, False), ("ThreadLocal", False, True), ("Relaxed", True, True)],
)
def test_allocations_during_a_capture(cuda: Any, mode: str, own_thread: bool, other_thread: bool) -> None:
    for is_other, allowed in ((False, own_thread), (True, other_thread)):
        stream = capture(cuda, mode)

        def allocate() -> str:
            return name(cuda.cudaHostAlloc(64, 0))

        outcome = in_thread(allocate) if is_other else allocate()
        assert outcome == ("cudaSuccess" if allowed else "cudaErrorStreamCaptureUnsupported")
        ended = name(cuda.cudaStreamEndCapture(stream))
        assert ended == ("cudaSuccess" if allowed else "cudaErrorStreamCaptureInvalidated")


def test_a_capture_ends_in_the_thread_in_which_it_began(cuda: Any) -> None:
    stream = capture(cuda, "ThreadLocal")
    assert in_thread(lambda: name(cuda.cudaStreamEndCapture(stream))) == "cudaErrorStreamCaptureWrongThread"
    relaxed = capture(cuda, "Relaxed")
    assert in_thread(lambda: name(cuda.cudaStreamEndCapture(relaxed))) == "cudaSuccess"


def test_a_capture_is_isolated(cuda: Any) -> None:
    event = ok(cuda.cudaEventCreateWithFlags(0))
    outside = ok(cuda.cudaStreamCreateWithFlags(cuda.cudaStreamNonBlocking))
    ok(cuda.cudaEventRecord(event, outside))
    stream = capture(cuda, "Relaxed")
    assert name(cuda.cudaStreamWaitEvent(stream, event, 0)) == "cudaErrorStreamCaptureIsolation"
    assert name(cuda.cudaStreamEndCapture(stream)) == "cudaErrorStreamCaptureInvalidated"
    stream = capture(cuda, "Relaxed")
    ok(cuda.cudaEventRecord(event, stream))
    assert name(cuda.cudaEventSynchronize(event)) == "cudaErrorCapturedEvent"
    assert name(cuda.cudaStreamSynchronize(stream)) == "cudaErrorStreamCaptureUnsupported"
    blocking = ok(cuda.cudaStreamCreateWithFlags(cuda.cudaStreamDefault))
    ok(cuda.cudaStreamBeginCapture(blocking, cuda.cudaStreamCaptureMode.cudaStreamCaptureModeGlobal))
    assert name(cuda.launch(0, lambda: None)) == "cudaErrorStreamCaptureImplicit"


# Memory


def test_freed_memory_is_poisoned_and_its_use_an_error(cuda: Any) -> None:
    pointer = ok(cuda.cudaMalloc(16))
    held = cuda.array_at(pointer, np.uint8, (16,))
    ok(cuda.cudaFree(pointer))
    assert set(held.tolist()) == {POISON}
    assert name(cuda.cudaFree(pointer)) == "cudaErrorInvalidValue"
    stream = ok(cuda.cudaStreamCreateWithFlags(cuda.cudaStreamNonBlocking))
    fill(cuda, stream, pointer, 1)
    assert name(cuda.cudaStreamSynchronize(stream)) == "cudaErrorIllegalAddress"


def test_a_copy_from_freed_pinned_memory_is_an_error(cuda: Any) -> None:
    host, pointer = ok(cuda.cudaHostAlloc(64, 0)), ok(cuda.cudaMalloc(64))
    stream = ok(cuda.cudaStreamCreateWithFlags(cuda.cudaStreamNonBlocking))
    ok(cuda.cudaFreeHost(host))
    kind = cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
    assert name(cuda.cudaMemcpyAsync(pointer, host, 64, kind, stream)) == "cudaErrorIllegalAddress"


def test_a_pool_gives_freed_memory_to_the_next_allocation_of_the_stream(cuda: Any) -> None:
    cuda.DEVICE.reuses_memory = True
    stream, other = (ok(cuda.cudaStreamCreateWithFlags(cuda.cudaStreamNonBlocking)) for _ in range(2))
    pointer = ok(cuda.cudaMallocAsync(16, stream))
    fill(cuda, stream, pointer, 1)
    ok(cuda.cudaFreeAsync(pointer, stream))
    assert ok(cuda.cudaMallocAsync(16, other)) != pointer
    assert ok(cuda.cudaMallocAsync(16, stream)) == pointer
    # Written by a stream that is not ordered after the free: what was written is lost.
    fill(cuda, other, pointer, 2)
    ok(cuda.cudaStreamSynchronize(other))
    ok(cuda.cudaStreamSynchronize(stream))
    assert content(cuda, pointer) == POISON


# Contexts


def test_handles_belong_to_a_context(cuda: Any) -> None:
    stream, event = ok(cuda.cudaStreamCreateWithFlags(1)), ok(cuda.cudaEventCreateWithFlags(0))
    ok(cuda.cudaSetDevice(1))
    assert name(cuda.launch(stream, lambda: None)) == "cudaErrorInvalidResourceHandle"
    theirs = ok(cuda.cudaStreamCreateWithFlags(1))
    assert name(cuda.cudaEventRecord(event, theirs)) == "cudaErrorInvalidResourceHandle"
    # Ordering streams of two GPUs is allowed.
    ok(cuda.cudaEventRecord(event, stream))
    ok(cuda.cudaStreamWaitEvent(theirs, event, 0))
    pointer = ok(cuda.cudaMallocAsync(16, stream))
    assert name(cuda.cudaFreeAsync(pointer, theirs)) == "cudaErrorInvalidValue"
    fill(cuda, theirs, pointer, 1)
    assert name(cuda.cudaStreamSynchronize(theirs)) == "cudaErrorIllegalAddress"


def test_a_thread_that_selects_no_gpu_creates_a_context_on_the_first(cuda: Any) -> None:
    cuda.reset(devices=2)
    ok(cuda.cudaGetDevice())
    assert cuda.DEVICE.contexts == set()
    in_thread(lambda: ok(cuda.cudaSetDevice(1)))
    assert cuda.DEVICE.contexts == {1}
    in_thread(lambda: ok(cuda.cudaHostAlloc(64, 0)))
    assert cuda.DEVICE.contexts == {0, 1}


# Errors


def test_an_illegal_access_breaks_its_context_for_good(cuda: Any) -> None:
    stream = ok(cuda.cudaStreamCreateWithFlags(1))
    fill(cuda, stream, 12, 1)
    ok(cuda.cudaStreamCreateWithFlags(1))  # nothing is known of it yet
    assert name(cuda.cudaStreamSynchronize(stream)) == "cudaErrorIllegalAddress"
    for call, arguments in (
        ("cudaMalloc", (16,)),
        ("cudaHostAlloc", (16, 0)),
        ("cudaStreamQuery", (stream,)),
        ("cudaEventCreateWithFlags", (0,)),
        ("cudaMemGetInfo", ()),
        ("cudaSetDevice", (0,)),
        ("cudaStreamDestroy", (stream,)),
    ):
        assert name(getattr(cuda, call)(*arguments)) == "cudaErrorIllegalAddress"
    # The context of the other GPU goes on, but not with handles of the broken one.
    ok(cuda.cudaSetDevice(1))
    ok(cuda.cudaMalloc(16))
    assert name(cuda.cudaStreamQuery(stream)) == "cudaErrorIllegalAddress"


def test_instances_on_two_gpus_have_their_own_contexts(cuda: Any) -> None:
    def doubled(stream: Any) -> KernelRunner:
        return KernelRunner(cuda, stream, lambda a: [a["IN"] * 2], lambda i: [("FP32", tuple(i["IN"].shape))])

    def serve(gpu: int) -> list[Any]:
        instance = DeviceInstance(doubled, GPU.__class__("KIND_GPU", gpu, f"m_{gpu}"), config(), OUT)
        outcome = values(run(instance, numbers([gpu])))
        instance.close()
        return outcome

    assert [in_thread(lambda gpu=gpu: serve(gpu)) for gpu in (0, 1)] == [[[[0]]], [[[2]]]]
    cuda.DEVICE.break_down(gpu=0)
    assert in_thread(lambda: serve(1)) == [[[2]]]

    def lost() -> str:
        try:
            serve(0)
        except DeviceLost as error:
            return str(error)
        return ""

    assert "cudaErrorIllegalAddress" in in_thread(lost)
