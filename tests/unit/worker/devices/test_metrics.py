"""Metrics of hosts and of GPUs, read from a fake NVML."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from weir.schemas.wire.statistics import WorkerCounters
from weir.worker.devices.metrics import DevicePoller


class NVMLError(Exception):
    pass


class Nvml:
    """Two GPUs, the second of which does not report its power."""

    NVMLError = NVMLError

    def __init__(self, gpus: int = 2) -> None:
        self.gpus = gpus
        self.energy_mj = 5000
        self.is_open = False

    def nvmlInit(self) -> None:
        if not self.gpus:
            raise NVMLError("Driver Not Loaded")
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str | bytes:
        return b"GPU-1" if handle else "GPU-0"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=25, memory=50)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=1000, used=300)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return self._of_first(handle, 70_500)

    def nvmlDeviceGetPowerManagementLimit(self, handle: int) -> int:
        return self._of_first(handle, 700_000)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        return self._of_first(handle, self.energy_mj)

    def _of_first(self, handle: int, value: int) -> int:
        if handle:
            raise NVMLError("Not Supported")
        return value


def counters_of(poller: DevicePoller) -> WorkerCounters:
    """The readings, validated as a gateway does."""
    return msgspec.convert({"worker": "w", "models": [], "host": poller.host, "gpus": poller.gpus}, WorkerCounters)


def test_gpus() -> None:
    nvml = Nvml()
    poller = DevicePoller(has_cpu=False, nvml=nvml)
    poller.poll()
    nvml.energy_mj += 1500
    poller.poll()
    counters = counters_of(poller)
    assert counters.host is None
    first, second = counters.gpus["GPU-0"], counters.gpus["GPU-1"]
    assert (first.utilization, first.memory_total_bytes, first.memory_used_bytes) == (0.25, 1000, 300)
    assert (first.power_usage_w, first.power_limit_w, first.energy_j) == (70.5, 700.0, 1.5)
    assert (second.utilization, second.power_usage_w, second.energy_j) == (0.25, None, None)
    poller.close()
    assert not nvml.is_open


def test_a_host_without_a_gpu_is_not_an_error() -> None:
    for nvml in (None, Nvml(gpus=0)):
        poller = DevicePoller(has_cpu=True, nvml=nvml)
        poller.poll()
        counters = counters_of(poller)
        assert counters.gpus == {}
        assert counters.host is not None
        assert 0 <= counters.host.utilization <= 1
        assert 0 < counters.host.memory_used_bytes < counters.host.memory_total_bytes
        poller.close()
