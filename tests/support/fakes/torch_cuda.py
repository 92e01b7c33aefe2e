"""A fake GPU, as far as a `DeviceRunner` of PyTorch uses one.

Its memory is that of the host. `FakeTorch` is the installed torch except for devices: streams and devices are only
recorded, and a tensor over "device" memory is one over host memory that reports to be on a GPU, as does everything
computed from it. It can't model asynchronous execution, or CUDA's checks of pointers.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np

from weir.schemas.core.tensors import DATATYPES
from weir.worker.backend_api.interface import DeviceTensor


class FakeCuda:
    """Records in `entered` which contexts were entered and left; with `is_lost` it fails as after a sticky error."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.emptied = 0
        self.is_lost = False

    def ExternalStream(self, handle: int, device: str) -> str:
        return f"stream {handle} of {device}"

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.entered.append(stream)
        yield
        self.entered.remove(stream)

    @contextlib.contextmanager
    def device(self, number: int) -> Iterator[None]:
        self.entered.append(f"device {number}")
        yield
        self.entered.remove(f"device {number}")

    def empty_cache(self) -> None:
        self.emptied += 1

    def synchronize(self) -> None:
        if self.is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


class FakeTorch:
    """The installed torch, on a fake GPU."""

    def __init__(self, torch: Any) -> None:
        class OnDevice(torch.Tensor):  # type: ignore[misc]
            is_cuda = True

        self._torch = torch
        self._on_device = OnDevice
        self.cuda = FakeCuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def as_tensor(self, memory: Any, device: str) -> Any:
        assert device.startswith("cuda:")
        told = memory.__cuda_array_interface__
        dtype = np.dtype(told["typestr"])
        size = int(np.prod(told["shape"])) * dtype.itemsize
        content = (ctypes.c_char * size).from_address(told["data"][0])
        array = np.frombuffer(content, dtype).reshape(told["shape"])
        return self._torch.from_numpy(array).as_subclass(self._on_device)


def on_device(array: np.ndarray, datatype: str) -> DeviceTensor:
    """The array as a tensor on the device."""
    return DeviceTensor(datatype, array.shape, array.__array_interface__["data"][0], array)


def from_device(tensor: DeviceTensor) -> np.ndarray:
    """The content of a tensor on the device."""
    dtype = DATATYPES[tensor.datatype].numpy
    size = int(np.prod(tensor.shape)) * dtype.itemsize
    content = (ctypes.c_char * size).from_address(tensor.pointer)
    return np.frombuffer(content, dtype).reshape(tensor.shape).copy()
