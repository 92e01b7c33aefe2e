"""Streams, events and memory of a GPU are freed with their last reference, in whichever thread that is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.fakes.cuda_device import fake_cuda_runtime
from weir.worker.cuda.stream import CudaEvent, CudaStream


@pytest.fixture
def cuda() -> Iterator[Any]:
    with fake_cuda_runtime() as runtime:
        runtime.reset(devices=2)
        yield runtime


def in_thread(act: Callable[[], None]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def test_what_is_freed_in_another_thread_creates_no_context_there(cuda: Any) -> None:
    """Such as the thread of the event loop, which has selected no GPU: CUDA's default is GPU 0."""
    kept: list[Any] = []

    def create() -> None:
        kept.append(CudaStream(1))
        kept.append(kept[0].allocate(64))
        kept.append(CudaEvent())

    def drop() -> None:
        kept.pop()

    in_thread(create)
    for freed in ("cudaEventDestroy", "cudaFreeAsync"):
        in_thread(drop)
        assert cuda.DEVICE.calls[freed] == 1
    in_thread(drop)
    assert cuda.DEVICE.contexts == {1}


def test_on_a_lost_gpu_nothing_is_freed(cuda: Any) -> None:
    kept: list[Any] = []
    in_thread(lambda: kept.extend([CudaStream(1), CudaEvent()]))
    cuda.DEVICE.break_down(gpu=1)
    in_thread(kept.clear)
    assert cuda.DEVICE.contexts == {1}
    assert not cuda.DEVICE.calls["cudaEventDestroy"]
