"""`DevicePoller`: reads the metrics of the host and its GPUs at intervals.

Source: Triton's metrics `nv_cpu_*`, `nv_gpu_*` and `nv_energy_consumption`, and NVML. A value that a GPU does not report is
omitted. A host without a GPU or a driver is not an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from weir.runtime.containment import contained
from weir.runtime.processes.usage import process_usage
from weir.runtime.ticks import next_tick

logger = logging.getLogger("weir.worker")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class DevicePoller:
    """The last readings as `host`, `gpus` and `process`, in the forms of `weir.schemas.wire.statistics`.

    `nvml` is the module `pynvml`, or None for no GPU metrics. Reading blocks, so it runs in a thread.
    """

    def __init__(self, has_cpu: bool, nvml: Any | None) -> None:
        self.host: dict[str, Any] | None = None
        self.gpus: dict[str, dict[str, Any]] = {}
        self.process: dict[str, float] | None = None
        self._has_cpu = has_cpu
        self._nvml = nvml
        self._handles: dict[str, Any] = {}
        self._energy_at_start_mj: dict[str, int] = {}
        self._host_name = _host_name()
        if nvml is not None:
            self._find_gpus(nvml)

    async def run(self, interval_ms: int) -> None:
        """Polls until it is cancelled."""
        while True:
            await asyncio.to_thread(self._poll)
            await next_tick(interval_ms / 1000)

    @contained()
    def _poll(self) -> None:
        self.poll()

    def poll(self) -> None:
        """Reads everything once. The CPU utilization is that since the last poll."""
        if self._has_cpu:
            memory = psutil.virtual_memory()
            self.host = {
                "host": self._host_name,
                "utilization": psutil.cpu_percent(None) / 100,
                "memory_total_bytes": memory.total,
                # As in Triton: what is neither free nor reclaimable at once.
                "memory_used_bytes": memory.total - memory.available,
            }
            self.process = process_usage(with_children=True)
        self.gpus = {uuid: self._read(uuid, handle) for uuid, handle in self._handles.items()}

    def close(self) -> None:
        """Shuts NVML down."""
        if self._nvml is not None and self._handles:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
        self._handles.clear()

    def _find_gpus(self, nvml: Any) -> None:
        try:
            nvml.nvmlInit()
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = nvml.nvmlDeviceGetUUID(handle)
                self._handles[uuid.decode() if isinstance(uuid, bytes) else uuid] = handle
        except nvml.NVMLError as error:
            logger.info("no GPU metrics: %s", error)

    def _read(self, uuid: str, handle: Any) -> dict[str, Any]:
        nvml = self._nvml
        reading: dict[str, Any] = {}

        def read(name: str, query: Callable[[], Any]) -> None:
            with contextlib.suppress(nvml.NVMLError):  # type: ignore[union-attr]
                reading[name] = query()

        assert nvml is not None  # noqa: S101 - there are handles
        read("utilization", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        read("memory_total_bytes", lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total))
        read("memory_used_bytes", lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used))
        read("power_usage_w", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
        read("power_limit_w", lambda: nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000)
        read("energy_j", partial(self._energy_j, uuid, handle))
        return reading

    def _energy_j(self, uuid: str, handle: Any) -> float:
        # NVML counts since the driver was loaded, Triton since the server started.
        energy_mj = self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle)  # type: ignore[union-attr]
        return float(max(0, energy_mj - self._energy_at_start_mj.setdefault(uuid, energy_mj))) / 1000


def find_nvml() -> Any | None:
    """The module `pynvml`; None if it is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _host_name() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()
