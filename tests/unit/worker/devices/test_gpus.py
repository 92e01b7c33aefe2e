"""`find_gpus` with fake drivers and NVMLs: descriptions of GPUs, and reasons why there are none."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import uuid
from typing import Any

import pytest

from weir.worker.devices.gpus import Gpu, HostGpus, find_gpus

UUIDS = [uuid.UUID(int=number) for number in (1, 2)]
NOT_INITIALIZED, NO_DEVICE = 3, 100


class Driver:
    """The functions of the driver's library that are called; each returns a CUresult and writes to its pointers."""

    def __init__(self, count: int = 2, init: int = 0, fails: str = "") -> None:
        self._count = count
        self._init = init
        self._fails = fails
        self.asked: list[str] = []
        self.parts: list[uuid.UUID] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu") and name != "cuGetErrorName":
            self.asked.append(name)
            if name == self._fails:
                return lambda *arguments: NOT_INITIALIZED
        return super().__getattribute__(name)

    def cuInit(self, flags: int) -> int:
        return self._init

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self._count
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return 0

    def cuDeviceGetUuid(self, identity: Any, device: ctypes.c_int) -> int:
        ctypes.memmove(identity._obj, UUIDS[device.value].bytes, 16)
        return 0

    def cuDeviceGetUuid_v2(self, identity: Any, device: ctypes.c_int) -> int:
        ctypes.memmove(identity._obj, (self.parts or UUIDS)[device.value].bytes, 16)
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: ctypes.c_int) -> int:
        name.value = b"Testing GPU"
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, device: ctypes.c_int) -> int:
        memory._obj.value = 80 << 30
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: ctypes.c_int) -> int:
        value._obj.value = {75: 9, 76: 1}[attribute]
        return 0

    def cuGetErrorName(self, status: int, name: Any) -> int:
        name._obj.value = {NOT_INITIALIZED: b"CUDA_ERROR_NOT_INITIALIZED"}.get(status)
        return 0


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class Nvml:
    NVMLError = NvmlError
    NVML_ERROR_LIBRARY_NOT_FOUND = 12

    def __init__(self, count: int = 2, error: int = 0) -> None:
        self._count = count
        self._error = error
        self.is_open = False

    def nvmlInit(self) -> None:
        if self._error:
            raise NvmlError(self._error)
        self.is_open = True

    def nvmlDeviceGetCount(self) -> int:
        return self._count

    def nvmlShutdown(self) -> None:
        self.is_open = False


def test_every_gpu_is_described_in_cuda_s_order() -> None:
    nvml = Nvml()
    found = find_gpus(Driver, lambda: nvml)
    assert found == HostGpus(
        tuple(Gpu(ordinal, f"GPU-{UUIDS[ordinal]}", "Testing GPU", 80 << 30, (9, 1)) for ordinal in (0, 1))
    )
    assert not nvml.is_open


def test_without_a_driver_no_other_library_is_called() -> None:
    def missing() -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    def not_asked() -> Any:
        raise AssertionError("NVML is asked after the driver")

    assert find_gpus(missing, not_asked) == HostGpus(problem="no NVIDIA driver: libcuda.so.1 was not found")


def test_a_part_of_a_gpu_has_the_uuid_of_the_part() -> None:
    driver = Driver(count=1)
    driver.parts = [uuid.UUID(int=77)]
    assert find_gpus(lambda: driver, lambda: None).gpus[0].uuid == f"MIG-{uuid.UUID(int=77)}"


def test_an_old_driver_has_uuids_of_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Driver, "cuDeviceGetUuid_v2")
    assert find_gpus(lambda: Driver(count=1), lambda: None).gpus[0].uuid == f"GPU-{UUIDS[0]}"


@pytest.mark.parametrize(
    ("nvml", "problem"),
    [
        (Nvml(error=9), "the NVIDIA driver does not work: NVML error 9"),
        (Nvml(count=0), "the NVIDIA driver reports no GPU"),
    ],
)
def test_nvml_is_consulted_before_cuda_is_initialized(nvml: Nvml, problem: str) -> None:
    driver = Driver()
    assert find_gpus(lambda: driver, lambda: nvml) == HostGpus(problem=problem)
    assert driver.asked == []


@pytest.mark.parametrize("nvml", [None, Nvml(error=Nvml.NVML_ERROR_LIBRARY_NOT_FOUND)])
def test_cuda_alone_is_enough(nvml: Nvml | None) -> None:
    assert len(find_gpus(Driver, lambda: nvml).gpus) == 2


@pytest.mark.parametrize(
    ("driver", "problem"),
    [
        (Driver(init=NO_DEVICE), "CUDA shows no GPU to this process (CUDA_VISIBLE_DEVICES may hide them)"),
        (Driver(count=0), "CUDA shows no GPU to this process (CUDA_VISIBLE_DEVICES may hide them)"),
        (Driver(init=NOT_INITIALIZED), "CUDA can't be used: CUDA_ERROR_NOT_INITIALIZED"),
        (Driver(init=803), "CUDA can't be used: error 803"),
        (Driver(fails="cuDeviceGetUuid"), "CUDA can't be used: CUDA_ERROR_NOT_INITIALIZED"),
    ],
)
def test_reasons_why_cuda_shows_no_gpu(driver: Driver, problem: str) -> None:
    assert find_gpus(lambda: driver, Nvml) == HostGpus(problem=problem)


def test_this_host_is_searched_without_a_backend_s_library() -> None:
    code = (
        "import sys; from weir.worker.devices.gpus import find_gpus; found = find_gpus();"
        "assert bool(found.gpus) != bool(found.problem)"
        "; print([name for name in ('torch', 'onnxruntime', 'tensorrt') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.gpu
def test_the_gpus_are_those_that_nvml_knows() -> None:
    found = find_gpus()
    if not found.gpus:
        pytest.skip(found.problem)
    import pynvml

    pynvml.nvmlInit()
    try:
        for gpu in found.gpus:
            handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
            assert pynvml.nvmlDeviceGetName(handle) == gpu.name
            assert tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)) == gpu.compute_capability
    finally:
        pynvml.nvmlShutdown()


def test_the_names_are_those_of_pynvml() -> None:
    pynvml = pytest.importorskip("pynvml")
    names = ("NVMLError", "NVML_ERROR_LIBRARY_NOT_FOUND", "nvmlInit", "nvmlDeviceGetCount", "nvmlShutdown")
    assert [name for name in names if not hasattr(pynvml, name)] == []
