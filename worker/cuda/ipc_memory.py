"""`IpcAllocation`: GPU memory of another process, opened by its CUDA interprocess handle."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from typing import Any

import numpy as np

from weir.bus.payloads.client_regions import RegionError
from weir.schemas.core.errors import WeirError
from weir.worker.backend_api.interface import DeviceLost
from weir.worker.cuda.pinned import HostBuffer
from weir.worker.cuda.runtime import check_cuda, cuda_runtime, selected_gpu
from weir.worker.cuda.stream import CudaStream

logger = logging.getLogger("weir.worker")

_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


class IpcAllocation:
    """A `weir.worker.devices.cuda_shared_memory.CudaAllocation` on GPU `device`. Raises RegionError, or DeviceLost.

    Copies run on streams of their own, so that they neither wait for the work of instances nor, as copies on CUDA's default
    stream do, for that of libraries which use it. For any thread: each selects the GPU for as long as it needs it.
    """

    def __init__(self, handle: bytes, device: int) -> None:
        self.pointer = 0
        self._device = device
        self._streams: list[CudaStream] = []
        try:
            self._runtime = runtime = cuda_runtime()
            from cuda.bindings import driver

            with selected_gpu(device):
                ipc_handle = runtime.cudaIpcMemHandle_t()
                # Not every release of the package has an attribute for the bytes.
                ctypes.memmove(ipc_handle.getPtr(), handle, len(handle))
                opened = runtime.cudaIpcOpenMemHandle(ipc_handle, _LAZY_PEER_ACCESS)
                self.pointer = int(check_cuda(opened, "opening a client's memory"))
                # The mapping may start before the allocation; the end of the allocation is the limit.
                status, base, size = driver.cuMemGetAddressRange(self.pointer)
                if int(status):
                    raise RegionError(f"CUDA error {getattr(status, 'name', status)} while measuring a client's memory")
            self.size = int(base) + int(size) - self.pointer
        except WeirError as error:
            raise RegionError(error.message) from error
        except RegionError:
            self.close()
            raise

    def read(self, offset: int, target: memoryview) -> None:
        """Copies from `offset` into host memory."""
        if len(target):
            kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
            self._copy(_host_address(target), self.pointer + offset, len(target), kind)

    def write(self, offset: int, content: bytes | memoryview) -> None:
        """Copies host memory to `offset`."""
        if len(content):
            kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
            self._copy(self.pointer + offset, _host_address(content), len(content), kind)

    def close(self) -> None:
        """Closes the allocation; logs a failure. On a GPU that is lost nothing can be closed."""
        with contextlib.suppress(WeirError, DeviceLost), selected_gpu(self._device):
            self._streams.clear()
            if self.pointer:
                (status,) = self._runtime.cudaIpcCloseMemHandle(self.pointer)
                if int(status):
                    logger.warning("closing CUDA shared memory: %s", getattr(status, "name", status))

    def _copy(self, to: int, source: int, size: int, kind: Any) -> None:
        try:
            with selected_gpu(self._device):
                # One stream for each copy at a time; `pop` and `append` are atomic.
                try:
                    stream = self._streams.pop()
                except IndexError:
                    stream = CudaStream(self._device)
                check_cuda(
                    self._runtime.cudaMemcpyAsync(to, source, size, kind, stream.handle), "copying a client's memory"
                )
                stream.synchronize()
                self._streams.append(stream)
        except WeirError as error:
            raise RegionError(error.message) from error


def pinned_array(size_bytes: int, device: int) -> np.ndarray:
    """Host memory for copies from GPU `device`, pinned if the process may pin so much."""
    with selected_gpu(device):
        return HostBuffer(size_bytes, wants_pinned=True).array


def _host_address(data: bytes | memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])
