"""The GPUs of the host (`find_gpus`), the devices of a worker (`WorkerDevices`) and the memory of models (`GpuMemory`).

`find_gpus` looks for the driver's library first, then queries NVML, and only then CUDA: in this order nothing can crash. It
does not ask the backends' libraries: ONNX Runtime lists providers that can't run, and TensorRT without a driver ends the
process.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from weir.schemas.core.errors import ErrorCode, WeirError, invalid
from weir.worker.devices.metrics import find_nvml

_DRIVER = "libcuda.so.1"
_NAME_BYTES = 256
_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76  # CUdevice_attribute
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_HIDDEN = "CUDA shows no GPU to this process (CUDA_VISIBLE_DEVICES may hide them)"


class Gpu(NamedTuple):
    """One GPU, or a part of one (MIG). `ordinal` is CUDA's, as in `instance_group { gpus }`; `uuid` is in NVML's form."""

    ordinal: int
    uuid: str
    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]


class HostGpus(NamedTuple):
    """The GPUs in the order of their ordinals; `problem` is the reason if there are none."""

    gpus: tuple[Gpu, ...] = ()
    problem: str = ""


NO_CUDA_BINDINGS = "the cuda-bindings package is not installed: install weir-serve[cuda]"
"""Why no instance can run on a GPU without it, whatever its backend."""


DRIVERS = {12: 525, 13: 580}
"""The first branch of NVIDIA's driver for each major version of CUDA. Source: CUDA's minor version compatibility."""


def has_cuda_bindings() -> bool:
    """Whether the package through which instances use their GPU is installed. Imports no CUDA library."""
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


def cuda_obstacle() -> str:
    """Why no instance can run on a GPU of this machine, whatever its backend; "" for none. Imports no CUDA library."""
    if not has_cuda_bindings():
        return NO_CUDA_BINDINGS
    try:
        installed = importlib.metadata.version("cuda-bindings")
    except importlib.metadata.PackageNotFoundError:
        return ""
    supported, major = driver_cuda_version(), int(installed.partition(".")[0])
    if supported is None or supported[0] >= major:
        return ""
    return (
        f"the NVIDIA driver supports CUDA up to {'.'.join(map(str, supported))}, and cuda-bindings {installed} needs CUDA "
        f"{major}: update the driver to {driver_for(major)} or newer, or install the packages for CUDA {supported[0]}"
    )


def driver_for(cuda: int) -> str:
    """The first branch of NVIDIA's driver for a major version of CUDA: "R580"."""
    return f"R{DRIVERS[cuda]}" if cuda in DRIVERS else "a newer branch"


def driver_cuda_version(open_driver: Callable[[], Any] = lambda: ctypes.CDLL(_DRIVER)) -> tuple[int, int] | None:
    """The newest version of CUDA that the driver supports; None without a driver."""
    try:
        driver = open_driver()
    except OSError:
        return None
    number = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(number)):
        return None
    return number.value // 1000, number.value % 1000 // 10


class _CudaError(Exception):
    """A call of the CUDA driver failed."""


def find_gpus(
    open_driver: Callable[[], Any] = lambda: ctypes.CDLL(_DRIVER), find_nvml: Callable[[], Any | None] = find_nvml
) -> HostGpus:
    """The GPUs that are visible to this process (`CUDA_VISIBLE_DEVICES` applies).

    `open_driver` opens the driver's library or raises OSError; `find_nvml` returns the module `pynvml` or None. If there is
    a GPU, CUDA is initialized in this process, which takes about 0.1 s.
    """
    try:
        driver = open_driver()
    except OSError:
        return HostGpus(problem=f"no NVIDIA driver: {_DRIVER} was not found")
    problem = _nvml_problem(find_nvml())
    if problem:
        return HostGpus(problem=problem)
    try:
        return _query_cuda(driver)
    except _CudaError as error:
        return HostGpus(problem=str(error))


def _nvml_problem(nvml: Any | None) -> str:
    """Why there can't be a GPU; "" if there is one, or if NVML is not available."""
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
    return "" if count else "the NVIDIA driver reports no GPU"


def _query_cuda(driver: Any) -> HostGpus:
    status = driver.cuInit(0)
    if status == _NO_DEVICE:
        return HostGpus(problem=_HIDDEN)
    _check_driver(driver, status)
    count = ctypes.c_int()
    _check_driver(driver, driver.cuDeviceGetCount(ctypes.byref(count)))
    gpus = tuple(_describe(driver, ordinal) for ordinal in range(count.value))
    return HostGpus(gpus, "" if gpus else _HIDDEN)


def _describe(driver: Any, ordinal: int) -> Gpu:
    device = ctypes.c_int()
    name, memory = ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_size_t()
    _check_driver(driver, driver.cuDeviceGet(ctypes.byref(device), ordinal))
    _check_driver(driver, driver.cuDeviceGetName(name, _NAME_BYTES, device))
    _check_driver(driver, driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device))
    return Gpu(
        ordinal,
        _uuid(driver, device),
        name.value.decode(errors="replace"),
        memory.value,
        (
            _attribute(driver, _COMPUTE_CAPABILITY_MAJOR, device),
            _attribute(driver, _COMPUTE_CAPABILITY_MINOR, device),
        ),
    )


def _uuid(driver: Any, device: ctypes.c_int) -> str:
    """The device's UUID in the form of NVML: "GPU-…", or "MIG-…" for a part of a GPU, which differs from its GPU's own."""
    whole, own = (ctypes.c_ubyte * 16)(), (ctypes.c_ubyte * 16)()
    _check_driver(driver, driver.cuDeviceGetUuid(ctypes.byref(whole), device))
    try:
        get_own = driver.cuDeviceGetUuid_v2
    except AttributeError:  # a driver before CUDA 11.4
        return f"GPU-{uuid.UUID(bytes=bytes(whole))}"
    _check_driver(driver, get_own(ctypes.byref(own), device))
    return f"{'GPU' if bytes(own) == bytes(whole) else 'MIG'}-{uuid.UUID(bytes=bytes(own))}"


def _attribute(driver: Any, attribute: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    _check_driver(driver, driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device))
    return value.value


def _check_driver(driver: Any, status: int) -> None:
    if status:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(name))
        raise _CudaError(f"CUDA can't be used: {name.value.decode() if name.value else f'error {status}'}")


class WorkerDevices(NamedTuple):
    """The devices on which a worker runs instances.

    Configurations are completed and checked with `host_gpus`, the ordinals of all GPUs of the host, so that all workers of
    a host get the same result. The worker runs instances on `own_gpus` and, with `has_cpu`, instances without a GPU.
    """

    host_gpus: tuple[int, ...] = ()
    own_gpus: tuple[int, ...] = ()
    has_cpu: bool = True

    @classmethod
    def of(cls, host_gpus: Sequence[int], gpu: int | None, has_cpu: bool = True) -> WorkerDevices:
        """The devices of a worker with the option `--gpu` (None: all GPUs). Raises WeirError if there is no such GPU."""
        if gpu is not None and gpu not in host_gpus:
            available = f"this host has GPUs {', '.join(map(str, host_gpus))}" if host_gpus else "this host has none"
            raise invalid(f"there is no GPU {gpu}: {available}")
        return cls(tuple(host_gpus), tuple(host_gpus) if gpu is None else (gpu,), has_cpu)


CPU_ONLY = WorkerDevices()
"""The devices of a worker that uses no GPU."""


ReadMemory = Callable[[int], tuple[int, int]]
"""Returns (free bytes, total bytes) of a GPU."""


class GpuMemory:
    """Measures how much GPU memory each model allocates, and enforces limits.

    Libraries do not report their allocations, so the free memory is compared before and after a load, and loads that use a
    GPU run one at a time. Source: `memory_usage` of Triton's statistics, and its `--model-load-gpu-limit`: `limits` are the
    fractions of memory in use, by GPU, beyond which no model is loaded. Without the package cuda-bindings nothing is
    measured, and a limit can't be enforced: only Python models run on GPUs then, by libraries of their own.
    """

    def __init__(self, limits: Mapping[int, float] | None = None, read: ReadMemory | None = None) -> None:
        self._limits = limits or {}
        self._read = read or (_read_memory if has_cuda_bindings() else None)
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def loading(self, model: str, gpus: Sequence[int]) -> Iterator[dict[int, int]]:
        """Surrounds a load on these GPUs; at its end the dictionary has the bytes that it allocated on each.

        Raises WeirError (UNAVAILABLE) if the limit of a GPU is reached, or can't be checked.
        """
        allocated: dict[int, int] = {}
        limited = [gpu for gpu in gpus if gpu in self._limits]
        if limited and self._read is None:
            raise WeirError(
                ErrorCode.UNAVAILABLE,
                f"can not create model '{model}': the memory limit of GPU {limited[0]} can't be checked: "
                f"{NO_CUDA_BINDINGS}",
            )
        if not gpus or self._read is None:
            yield allocated
            return
        with self._lock:
            before = {gpu: self._read(gpu) for gpu in gpus}
            for gpu, (free, total) in before.items():
                if total - free > self._limits.get(gpu, 1.0) * total:
                    raise WeirError(
                        ErrorCode.UNAVAILABLE,
                        f"can not create model '{model}': memory limit set for GPU {gpu} has exceeded, model loading is "
                        "rejected.",
                    )
            yield allocated
            # Other processes may have freed more than this load allocated.
            allocated |= {gpu: max(0, free - self._read(gpu)[0]) for gpu, (free, _) in before.items()}


def gpu_limits(pairs: Sequence[str]) -> dict[int, float]:
    """The limits by GPU, from values of `--model-load-gpu-limit` (`DEVICE:FRACTION`)."""
    return {int(device): float(fraction) for device, _, fraction in (pair.partition(":") for pair in pairs)}


def _read_memory(gpu: int) -> tuple[int, int]:
    from cuda.bindings import runtime

    chosen, *_ = runtime.cudaSetDevice(gpu)
    status, free, total = (chosen, 0, 0) if int(chosen) else runtime.cudaMemGetInfo()
    if int(status):
        reason = cuda_obstacle() or getattr(status, "name", status)
        raise WeirError(ErrorCode.UNAVAILABLE, f"GPU {gpu} can't be used: {reason}")
    return int(free), int(total)
