"""Clients' GPU memory on a real GPU: a process allocates and shares, this one reads and writes through `CudaRegions`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import IO

import pytest

from weir.bus.payloads.client_regions import RegionError
from weir.schemas.core.tensors import CudaRegionRef
from weir.worker.cuda.ipc_memory import IpcAllocation, pinned_array
from weir.worker.devices.cuda_shared_memory import CudaRegions, gpu_uuids

pytestmark = pytest.mark.gpu

SIZE = 5_000_000
GUARD = 4096

# Another process, as CUDA lets nobody open what it shares itself. It talks in lines: its handles first, then what it
# is asked, until its standard input ends. The region is the middle of three allocations.
_CLIENT = f"""
import ctypes, sys
import numpy as np
from cuda.bindings import runtime

def succeed(outcome):
    status, *values = outcome
    assert int(status) == 0, status
    return values[0] if values else None

succeed(runtime.cudaSetDevice(0))
neighbours = [int(succeed(runtime.cudaMalloc(size))) for size in ({GUARD}, {SIZE}, {GUARD}, 1000)]
for pointer, size in zip(neighbours, ({GUARD}, {SIZE}, {GUARD}, 1000)):
    succeed(runtime.cudaMemset(pointer, 0x5A, size))
to_device = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
to_host = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
content = (np.arange({SIZE}) % 251).astype(np.uint8)
succeed(runtime.cudaMemcpy(neighbours[1], content.ctypes.data, {SIZE}, to_device))
succeed(runtime.cudaDeviceSynchronize())
for pointer in (neighbours[1], neighbours[3]):
    handle = succeed(runtime.cudaIpcGetMemHandle(pointer))
    print(bytes((ctypes.c_char * 64).from_address(handle.getPtr())).hex(), flush=True)
for line in sys.stdin:
    which, offset, size = map(int, line.split())
    seen = np.empty(size, np.uint8)
    succeed(runtime.cudaMemcpy(seen.ctypes.data, neighbours[which] + offset, size, to_host))
    print(seen.tobytes().hex(), flush=True)
"""


class Client:
    """The process that shares memory: `handle` of a large allocation, `small` of one that shares a page with others."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.handle, self.small = (bytes.fromhex(self._line()) for _ in range(2))

    def seen(self, which: int, offset: int, size: int) -> bytes:
        """The content of one of the client's allocations (1 is the region)."""
        stdin: IO[str] = self.process.stdin  # type: ignore[assignment]
        stdin.write(f"{which} {offset} {size}\n")
        stdin.flush()
        return bytes.fromhex(self._line())

    def close(self) -> None:
        self.process.stdin.close()  # type: ignore[union-attr]
        self.process.wait(30)
        self.process.stdout.close()  # type: ignore[union-attr]

    def _line(self) -> str:
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        assert line, "the process that shares GPU memory has ended"
        return str(line.strip())


@pytest.fixture
def client() -> Iterator[Client]:
    started = Client()
    yield started
    started.close()


@pytest.fixture
def regions(client: Client) -> Iterator[CudaRegions]:
    opened = CudaRegions(IpcAllocation, (0,), pinned_array)
    yield opened
    # Before the client frees its memory, which its end does.
    for handle in (client.handle, client.small):
        opened.close(handle, 0)


def expected(offset: int, size: int) -> bytes:
    return bytes((offset + position) % 251 for position in range(size))


def read(regions: CudaRegions, ref: CudaRegionRef) -> bytes:
    buffer = bytearray(ref.size)
    regions.read(ref, memoryview(buffer))
    return bytes(buffer)


def test_the_gpu_is_found() -> None:
    uuids = gpu_uuids()
    assert uuids
    assert all(len(uuid) == len("GPU-00000000-0000-0000-0000-000000000000") for uuid in uuids)


def test_reading_and_writing(client: Client, regions: CudaRegions) -> None:
    regions.check(client.handle, 0, SIZE)
    for offset, size in ((0, 16), (1, 1), (1_000_003, 3_000_000), (SIZE - 5, 5), (0, SIZE), (7, 0)):
        assert read(regions, CudaRegionRef(client.handle, 0, offset, size)) == expected(offset, size)
    for offset, size in ((100, 40), (SIZE - 3, 3), (1 << 20, 1 << 20)):
        regions.write(CudaRegionRef(client.handle, 0, offset, size), b"\xee" * size)
        assert client.seen(1, offset - 8, size + 8) == expected(offset - 8, 8) + b"\xee" * size
    regions.write(CudaRegionRef(client.handle, 0, 0, 64), b"short")
    assert client.seen(1, 0, 64) == b"short" + expected(5, 59)
    for neighbour in (0, 2):
        assert client.seen(neighbour, 0, GUARD) == b"\x5a" * GUARD


def test_a_small_allocation_starts_at_the_client_s_address(client: Client, regions: CudaRegions) -> None:
    assert read(regions, CudaRegionRef(client.small, 0, 0, 1000)) == b"\x5a" * 1000
    regions.write(CudaRegionRef(client.small, 0, 10, 3), b"abc")
    assert client.seen(3, 0, 16) == b"\x5a" * 10 + b"abc" + b"\x5a" * 3


def test_nothing_outside_is_touched(client: Client, regions: CudaRegions) -> None:
    # CUDA rounds allocations up: to 2 MiB at most.
    limit = SIZE + (2 << 20)
    for offset, size in ((0, limit + 1), (limit, 1), (limit - 1, 2), (-1, 4), (1 << 62, 1)):
        ref = CudaRegionRef(client.handle, 0, offset, size)
        with pytest.raises(RegionError):
            regions.read(ref, memoryview(bytearray(min(size, 16))))
        with pytest.raises(RegionError):
            regions.write(ref, b"x")
    with pytest.raises(RegionError):
        regions.check(client.handle, 0, limit + 1)
    assert client.seen(1, 0, 64) == expected(0, 64)


def test_handles_that_can_not_be_opened(client: Client, regions: CudaRegions) -> None:
    for handle, device in ((bytes(64), 0), (b"\xff" * 64, 0), (client.handle, 99), (client.handle[:10], 0)):
        with pytest.raises(RegionError):
            regions.check(handle, device, 1)
    assert read(regions, CudaRegionRef(client.handle, 0, 0, 16)) == expected(0, 16), "an error of CUDA's does not stay"


def test_closed_memory_is_opened_again(client: Client, regions: CudaRegions) -> None:
    for _ in range(3):
        assert read(regions, CudaRegionRef(client.handle, 0, 9, 9)) == expected(9, 9)
        regions.close(client.handle, 0)
