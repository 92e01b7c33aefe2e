"""Which GPUs this host has that CUDA can use, and why there are none.

Looked for in an order in which nothing can crash: the driver's library, NVML, and only then CUDA. No library of a backend
is asked: ONNX Runtime names providers that can't run, and TensorRT without a driver ends the process.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from worker.device_metrics import find_nvml

_DRIVER = "libcuda.so.1"
_NAME_BYTES = 256
_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76  # CUdevice_attribute
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_HIDDEN = "CUDA shows no GPU to this process (CUDA_VISIBLE_DEVICES may hide them)"


class Gpu(NamedTuple):
    """One GPU. `ordinal` is CUDA's, as in `instance_group { gpus }`, `uuid` as NVML and metrics have it ("GPU-...")."""

    ordinal: int
    uuid: str
    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]


class HostGpus(NamedTuple):
    """The GPUs in the order of their ordinals; `problem` says why there are none."""

    gpus: tuple[Gpu, ...] = ()
    problem: str = ""


class _CudaError(Exception):
    pass


def find_gpus(
    open_driver: Callable[[], Any] = lambda: ctypes.CDLL(_DRIVER), find_nvml: Callable[[], Any | None] = find_nvml
) -> HostGpus:
    """The GPUs that CUDA shows this process (`CUDA_VISIBLE_DEVICES` counts).

    `open_driver` opens the driver's library, or raises OSError; `find_nvml` is the module `pynvml`, None for none. CUDA is
    started in this process, which takes some 0.1 s, where there is a GPU.
    """
    try:
        driver = open_driver()
    except OSError:
        return HostGpus(problem=f"no NVIDIA driver: {_DRIVER} was not found")
    problem = _nvml_problem(find_nvml())
    if problem:
        return HostGpus(problem=problem)
    try:
        return _ask_cuda(driver)
    except _CudaError as error:
        return HostGpus(problem=str(error))


def _nvml_problem(nvml: Any | None) -> str:
    """Why there can't be a GPU; "" where there is one, or NVML can't tell."""
    if nvml is None:
        return ""
    try:
        nvml.nvmlInit()
        try:
            count = nvml.nvmlDeviceGetCount()
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        # Containers may have CUDA's library without NVML's.
        is_missing = getattr(error, "value", None) == nvml.NVML_ERROR_LIBRARY_NOT_FOUND
        return "" if is_missing else f"the NVIDIA driver does not work: {error}"
    return "" if count else "the NVIDIA driver knows no GPU"


def _ask_cuda(driver: Any) -> HostGpus:
    status = driver.cuInit(0)
    if status == _NO_DEVICE:
        return HostGpus(problem=_HIDDEN)
    _succeed(driver, status)
    count = ctypes.c_int()
    _succeed(driver, driver.cuDeviceGetCount(ctypes.byref(count)))
    gpus = tuple(_describe(driver, ordinal) for ordinal in range(count.value))
    return HostGpus(gpus, "" if gpus else _HIDDEN)


def _describe(driver: Any, ordinal: int) -> Gpu:
    device, identity = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    name, memory = ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_size_t()
    _succeed(driver, driver.cuDeviceGet(ctypes.byref(device), ordinal))
    _succeed(driver, driver.cuDeviceGetUuid(ctypes.byref(identity), device))
    _succeed(driver, driver.cuDeviceGetName(name, _NAME_BYTES, device))
    _succeed(driver, driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device))
    return Gpu(
        ordinal,
        f"GPU-{uuid.UUID(bytes=bytes(identity))}",
        name.value.decode(errors="replace"),
        memory.value,
        (
            _attribute(driver, _COMPUTE_CAPABILITY_MAJOR, device),
            _attribute(driver, _COMPUTE_CAPABILITY_MINOR, device),
        ),
    )


def _attribute(driver: Any, attribute: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    _succeed(driver, driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device))
    return value.value


def _succeed(driver: Any, status: int) -> None:
    if status:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(name))
        raise _CudaError(f"CUDA can't be used: {name.value.decode() if name.value else f'error {status}'}")
