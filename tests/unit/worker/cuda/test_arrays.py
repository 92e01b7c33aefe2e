"""Device memory for other libraries: DLPack and `__cuda_array_interface__` in both directions, in the order of streams."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.support.fakes.cuda_device import fake_cuda_runtime
from weir.schemas.core.errors import WeirError
from weir.schemas.core.tensors import DATATYPES
from weir.worker.backend_api.interface import DeviceTensor
from weir.worker.cuda import dlpack
from weir.worker.cuda.arrays import DeviceArray, output_tensor
from weir.worker.cuda.stream import CudaStream

NUMERIC = [name for name in DATATYPES if name != "BYTES"]


@pytest.fixture
def cuda() -> Iterator[Any]:
    gc.collect()
    with fake_cuda_runtime() as runtime:
        yield runtime


class OnHost:
    """Host memory as an array of the standard: what `capsule_of` makes, read by libraries that check it."""

    def __init__(self, array: np.ndarray, datatype: str) -> None:
        pointer = int(array.__array_interface__["data"][0])
        self.tensor = DeviceTensor(datatype, array.shape, pointer, array)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU, 0

    def __dlpack__(self, **_options: object) -> object:
        return dlpack.capsule_of(self.tensor, dlpack.CPU, 0)


@pytest.mark.torch
@pytest.mark.parametrize("datatype", NUMERIC)
def test_other_libraries_read_our_capsules_and_we_theirs(datatype: str) -> None:
    torch = pytest.importorskip("torch")
    array = np.arange(24).reshape(2, 3, 4).astype(DATATYPES[datatype].numpy)
    before = len(dlpack._exported)
    theirs = torch.from_dlpack(OnHost(array, datatype))
    assert theirs.dtype == (torch.bfloat16 if datatype == "BF16" else torch.from_numpy(array).dtype)
    assert theirs.data_ptr() == array.__array_interface__["data"][0]
    tensor, kind, number = dlpack.tensor_of(theirs.__dlpack__())
    assert (kind, number) == (dlpack.CPU, 0)
    assert (tensor.datatype, tensor.shape, tensor.pointer) == (datatype, (2, 3, 4), theirs.data_ptr())
    if datatype != "BF16":
        np.testing.assert_array_equal(np.from_dlpack(OnHost(array, datatype)), array)
    del theirs
    content = (ctypes.c_char * array.nbytes).from_address(tensor.pointer)
    assert bytes(content) == array.tobytes(), "the consumed capsule keeps the memory"
    del tensor
    gc.collect()
    assert len(dlpack._exported) == before


def test_a_capsule_that_nothing_consumes_releases_its_memory() -> None:
    array = np.zeros(4, np.float32)
    before, count = len(dlpack._exported), sys.getrefcount(array)
    capsule = OnHost(array, "FP32").__dlpack__()
    assert len(dlpack._exported) == before + 1
    del capsule
    assert (len(dlpack._exported), sys.getrefcount(array)) == (before, count)


@pytest.mark.torch
def test_capsules_that_can_not_be_taken() -> None:
    torch = pytest.importorskip("torch")
    capsule = torch.zeros(2).__dlpack__()
    dlpack.tensor_of(capsule)
    with pytest.raises(WeirError, match="was consumed already"):
        dlpack.tensor_of(capsule)
    with pytest.raises(WeirError, match=r"of shape \[3, 2\] has strides \[1, 3\]: it must be contiguous"):
        dlpack.tensor_of(torch.zeros(2, 3).T.__dlpack__())
    with pytest.raises(WeirError, match="DLPack type 5 of 64 bits has no datatype"):
        dlpack.tensor_of(torch.zeros(2, dtype=torch.complex64).__dlpack__())
    for shape in ((), (0, 3), (1, 5)):
        assert dlpack.tensor_of(torch.zeros(shape).__dlpack__())[0].shape == shape


class TestOnGpu:
    def memory(self, stream: CudaStream, datatype: str = "FP32", shape: tuple[int, ...] = (2, 2)) -> DeviceArray:
        memory = stream.allocate(16)
        return DeviceArray(DeviceTensor(datatype, shape, memory.pointer, memory), stream)

    def test_an_array_says_where_it_lies(self, cuda: Any) -> None:
        stream = CudaStream(0)
        array = self.memory(stream)
        interface = array.__cuda_array_interface__
        assert interface == {
            "shape": (2, 2),
            "typestr": "<f4",
            "data": (array.pointer, False),
            "version": 3,
            "stream": None,
        }
        assert array.__dlpack_device__() == (dlpack.CUDA, 0)
        assert array.dtype == np.float32
        tensor, kind, number = dlpack.tensor_of(array.__dlpack__(stream=stream.handle))
        assert (tensor.pointer, kind, number) == (array.pointer, dlpack.CUDA, 0)

    @pytest.mark.parametrize("named", ["own", "other", "default", "none"])
    def test_a_library_s_stream_waits_for_the_content(self, cuda: Any, named: str) -> None:
        stream, other = CudaStream(0), CudaStream(0)
        array = self.memory(stream)
        written: list[str] = []
        cuda.launch(stream.handle, lambda: written.append("content"))
        theirs = {"own": stream.handle, "other": other.handle, "default": None, "none": -1}[named]
        array.__dlpack__(stream=theirs)
        reads_on = {"own": stream.handle, "other": other.handle, "default": 1, "none": other.handle}[named]
        cuda.launch(reads_on, lambda: written.append("read"))
        assert not cuda.cudaStreamSynchronize(reads_on)[0]
        assert written == (["read"] if named == "none" else ["content", "read"])

    def test_outputs_of_every_kind(self, cuda: Any) -> None:
        stream, theirs = CudaStream(0), CudaStream(0)
        array = self.memory(stream)
        assert output_tensor("Y", array, "FP32", stream) == array.tensor
        host = np.ones((2, 2), np.float32)
        assert output_tensor("Y", host, "FP32", stream) is host
        written: list[str] = []

        class Library:
            """Has its array written on its own stream."""

            def __init__(self, **interface: Any) -> None:
                self.__cuda_array_interface__ = {
                    **array.__cuda_array_interface__,
                    "stream": theirs.handle,
                    **interface,
                }

        cuda.launch(theirs.handle, lambda: written.append("content"))
        library = Library(strides=(8, 4))
        tensor = output_tensor("Y", library, "FP32", stream)
        assert isinstance(tensor, DeviceTensor)
        assert (tensor.pointer, tensor.owner) == (array.pointer, library)
        cuda.launch(stream.handle, lambda: written.append("read"))
        stream.synchronize()
        assert written == ["content", "read"]

        class Standard:
            def __dlpack_device__(self) -> tuple[int, int]:
                return array.__dlpack_device__()

            def __dlpack__(self, *, stream: int) -> object:
                written.append(f"for {stream}")
                return array.__dlpack__(stream=stream)

        tensor = output_tensor("Y", Standard(), "FP32", stream)
        assert isinstance(tensor, DeviceTensor)
        assert tensor.pointer == array.pointer
        assert written[-1] == f"for {stream.handle}"

    def test_outputs_that_are_errors(self, cuda: Any) -> None:
        stream = CudaStream(0)
        array = self.memory(stream)

        class Strided:
            __cuda_array_interface__: ClassVar[dict[str, Any]] = {**array.__cuda_array_interface__, "strides": (4, 8)}

        class Elsewhere:
            def __dlpack_device__(self) -> tuple[int, int]:
                return dlpack.CUDA, 1

            def __dlpack__(self, *, stream: int) -> object:
                return dlpack.capsule_of(array.tensor, dlpack.CUDA, 1)

        wrong: list[tuple[object, str]] = [
            ([1.0], "output 'Y' must be an array of NumPy, or one with __dlpack__ or"),
            (np.ones(2, np.int64), "output 'Y' is of type INT64, but the configuration specifies FP32"),
            (self.memory(stream, "INT32"), "output 'Y' is of type INT32, but the configuration specifies FP32"),
            (OnHost(np.ones(2, np.float32), "FP32"), "output 'Y' is not on a GPU"),
            (Strided(), "it must be contiguous"),
            (Elsewhere(), "output 'Y' is on GPU 1, but its instance on GPU 0"),
        ]
        for value, message in wrong:
            with pytest.raises(WeirError, match=message):
                output_tensor("Y", value, "FP32", stream)
