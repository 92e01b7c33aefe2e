"""Two batches on a simulated GPU: neither affects the memory of the other."""

from __future__ import annotations

import ctypes
import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes.cuda_device import (
    GPU,
    OUT,
    KernelRunner,
    config,
    doubling_instance,
    execution,
    fake_cuda_runtime,
    numbers,
    run,
    values,
)
from tests.support.fakes.cuda_device import request as request_of
from weir.schemas.core.errors import WeirError
from weir.schemas.core.tensors import Tensor
from weir.worker.cuda.device_instance import DeviceInstance


@pytest.fixture
def cuda() -> Iterator[Any]:
    with fake_cuda_runtime() as runtime:
        yield runtime


@given(data=st.data(), seed=st.integers(0, 2**32), own_stream=st.booleans(), pins=st.booleans(), reuses=st.booleans())
def test_two_batches_on_the_device_do_not_affect_each_other(
    data: st.DataObject, seed: int, own_stream: bool, pins: bool, reuses: bool
) -> None:
    """Each request gets its own output, in whatever order the GPU executes independent work."""
    batches = data.draw(st.lists(st.lists(st.integers(0, 3000), min_size=1, max_size=4), min_size=1, max_size=12))
    with fake_cuda_runtime() as runtime:
        instance = doubling_instance(
            runtime,
            optimization={
                "cuda": {"output_copy_stream": own_stream},
                "input_pinned_memory": {"enable": pins},
                "output_pinned_memory": {"enable": pins},
            },
        )
        runtime.DEVICE.hurry = random.Random(seed) if seed % 4 else None
        runtime.DEVICE.reuses_memory = reuses
        under_way: list[tuple[Any, list[int]]] = []

        def collect() -> None:
            pending, sizes = under_way.pop(0)
            answers = pending.results()
            for (number, _), size, result in zip(sizes, [size for _, size in sizes], answers, strict=True):
                array = result.outputs[0].to_numpy()
                assert array.shape == (1, size)
                assert (array == 2 * number + 1).all()

        count = 0
        for batch in batches:
            sizes = []
            requests = []
            for size in batch:
                count += 1
                sizes.append((count, size))
                requests.append(numbers(np.full((1, size), count)))
            if len(set(batch)) > 1:  # rows of one batch are alike
                requests, sizes = requests[:1], sizes[:1]
            under_way.append((instance.execute(requests, execution()), sizes))  # type: ignore[arg-type]
            if len(under_way) == 2:
                collect()
        while under_way:
            collect()
        instance.close()


@pytest.mark.parametrize("under_way", [1, 2])
def test_requests_that_run_alone_do_not_affect_batches_on_the_device(cuda: Any, under_way: int) -> None:
    instance = doubling_instance(cuda)
    pending = [instance.execute([numbers([value])], execution()) for value in range(under_way)]
    if under_way == 2:
        with pytest.raises(WeirError, match="m_0_0 runs 2 batches already"):
            instance.execute([numbers([9])], execution())
        assert values(pending.pop(0).results()) == [[[1]]]
    else:
        with pytest.raises(WeirError, match="does not fill its shape"):
            instance.execute([request_of(Tensor("IN", "FP32", [1, 5], b"1234"))], execution())
    for alone in range(5, 10):
        assert values(run(instance, numbers([alone]))) == [[[2 * alone + 1]]]
    assert values(pending[0].results()) == [[[2 * (under_way - 1) + 1]]]


def test_inputs_on_the_host_stay_until_the_device_has_read_them(cuda: Any) -> None:
    read: list[weakref.ref[np.ndarray]] = []

    class Reading(KernelRunner):
        def enqueue(self, inputs: Any) -> Any:
            read.append(weakref.ref(inputs["IN"]))
            address, count = inputs["IN"].ctypes.data, inputs["IN"].size
            # Nothing but the address is kept, as by a library in C.
            self._function = lambda arrays: [np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))]
            return super().enqueue({})

    instance = DeviceInstance(
        lambda stream: Reading(cuda, stream, lambda arrays: [], lambda inputs: [("FP32", (1, 1))], host_inputs=["IN"]),
        GPU,
        config(),
        OUT,
    )
    pending = [instance.execute([numbers([value])], execution()) for value in (3, 4)]
    assert [reference() is not None for reference in read] == [True, True]
    assert values(pending[0].results()) + values(pending[1].results()) == [[[3]], [[4]]]
    assert [reference() for reference in read] == [None, None]
