"""Clients' GPU memory on a simulated GPU: opening, checks of bounds, and closing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.bus.naming.identity import new_id
from weir.bus.payloads.client_regions import RegionError
from weir.schemas.core.errors import WeirError
from weir.schemas.core.requests import InferRequest, RequestedOutput
from weir.schemas.core.tensors import CudaRegionRef, Tensor
from weir.worker.backend_api.interface import Result
from weir.worker.cuda.ipc_memory import IpcAllocation
from weir.worker.devices.cuda_shared_memory import MAX_OPEN_ALLOCATIONS, CudaRegions, gpu_uuids
from weir.worker.execution.shared_memory import SharedMemoryAccess, SharedMemoryIO

SIZE = 256


class Allocation:
    """An allocation in ordinary memory, which fails for an access outside of it."""

    def __init__(self) -> None:
        self.size = SIZE
        self.content = bytearray(range(256))
        self.is_open = True

    def read(self, offset: int, target: memoryview) -> None:
        assert self.is_open
        assert 0 <= offset <= offset + len(target) <= SIZE
        target[:] = self.content[offset : offset + len(target)]

    def write(self, offset: int, content: bytes | memoryview) -> None:
        assert self.is_open
        assert 0 <= offset <= offset + len(content) <= SIZE
        self.content[offset : offset + len(content)] = content

    def close(self) -> None:
        assert self.is_open
        self.is_open = False


class Gpu:
    """Opens allocations by handle; `missing` ones can't be."""

    def __init__(self) -> None:
        self.opened: list[tuple[bytes, int]] = []
        self.allocations: dict[bytes, Allocation] = {}
        self.missing: set[bytes] = set()

    def __call__(self, handle: bytes, device: int) -> Allocation:
        if handle in self.missing:
            raise RegionError("CUDA: cudaErrorInvalidResourceHandle")
        self.opened.append((handle, device))
        self.allocations[handle] = Allocation()
        return self.allocations[handle]


def handle(number: int = 1) -> bytes:
    return number.to_bytes(64, "little")


numbers = st.integers(-2, SIZE + 2)


@given(offset=numbers, size=numbers, length=st.integers(0, SIZE + 2))
def test_nothing_outside_of_an_allocation_is_touched(offset: int, size: int, length: int) -> None:
    gpu = Gpu()
    regions = CudaRegions(gpu)
    ref = CudaRegionRef(handle(), 0, offset, size)
    buffer = bytearray(length)
    if offset >= 0 and length <= size and offset + size <= SIZE:
        regions.read(ref, memoryview(buffer))
        assert buffer == bytes(range(256))[offset : offset + length]
        regions.write(ref, b"\xee" * length)
        expected = bytearray(range(256))
        expected[offset : offset + length] = b"\xee" * length
        assert gpu.allocations[handle()].content == expected
    else:
        with pytest.raises(RegionError):
            regions.read(ref, memoryview(buffer))
        with pytest.raises(RegionError):
            regions.write(ref, buffer)


def test_an_allocation_is_opened_once_until_it_is_closed() -> None:
    gpu = Gpu()
    regions = CudaRegions(gpu)
    regions.check(handle(), 0, SIZE)
    for _ in range(3):
        regions.read(CudaRegionRef(handle(), 0, 0, 4), memoryview(bytearray(4)))
    assert gpu.opened == [(handle(), 0)]
    regions.close(handle(), 0)
    assert not gpu.allocations[handle()].is_open
    regions.close(handle(), 0)
    regions.read(CudaRegionRef(handle(), 0, 0, 4), memoryview(bytearray(4)))
    assert len(gpu.opened) == 2


def test_the_least_recently_used_allocation_is_closed() -> None:
    gpu = Gpu()
    regions = CudaRegions(gpu)
    for number in range(MAX_OPEN_ALLOCATIONS):
        regions.check(handle(number), 0, 1)
    regions.check(handle(0), 0, 1)
    regions.check(handle(MAX_OPEN_ALLOCATIONS), 0, 1)
    assert [number for number in range(MAX_OPEN_ALLOCATIONS) if not gpu.allocations[handle(number)].is_open] == [1]


def test_handles_that_can_not_be_opened() -> None:
    gpu = Gpu()
    gpu.missing = {handle(2)}
    regions = CudaRegions(gpu)
    for wrong in ((handle(2), 0, 1), (b"short", 0, 1), (handle(), -1, 1), (handle(), 0, SIZE + 1), (handle(), 0, 0)):
        with pytest.raises(RegionError):
            regions.check(*wrong)


def test_an_instance_reads_and_writes_it() -> None:
    gpu = Gpu()
    memory = SharedMemoryIO(SharedMemoryAccess(True, CudaRegions(gpu)))
    request = InferRequest("m", inputs=[Tensor("IN", "UINT8", [4], CudaRegionRef(handle(), 0, 8, 4))])
    request.outputs = [RequestedOutput("OUT")]
    request.outputs[0].region = CudaRegionRef(handle(), 0, 16, 8)
    memory.fetch(request, new_id("gateway"))
    assert bytes(request.inputs[0].data) == bytes([8, 9, 10, 11])  # type: ignore[arg-type]
    result = Result([Tensor("OUT", "UINT8", [2], b"xy")])
    memory.deliver(request, result)
    assert result.error is None
    assert gpu.allocations[handle()].content[15:19] == b"\x0fxy\x12"


def test_a_worker_without_a_gpu_rejects_cuda_regions() -> None:
    memory = SharedMemoryIO(SharedMemoryAccess(True))
    request = InferRequest("m", inputs=[Tensor("IN", "UINT8", [4], CudaRegionRef(handle(), 0, 8, 4))])
    with pytest.raises(WeirError, match="failed to read input 'IN': the worker has no GPU"):
        memory.fetch(request, new_id("gateway"))
    if not gpu_uuids():
        with pytest.raises(RegionError):
            IpcAllocation(handle(), 0)
