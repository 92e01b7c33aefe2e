"""Triton's metrics of hosts and GPUs, as workers read them.

With workers on several hosts, memory is the sum and utilization the mean; GPUs have their UUIDs as labels. Pinned memory is
the sum over workers, each of which has its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gateway.metrics.text import NO_LABELS, Family, Sample, counter, gauge
from schemas.statistics import GpuReading, HostReading, WorkerCounters

_GPU_GAUGES = {
    "nv_gpu_utilization": ("GPU utilization rate [0.0 - 1.0)", "utilization"),
    "nv_gpu_memory_total_bytes": ("GPU total memory, in bytes", "memory_total_bytes"),
    "nv_gpu_memory_used_bytes": ("GPU used memory, in bytes", "memory_used_bytes"),
    "nv_gpu_power_usage": ("GPU power usage in watts", "power_usage_w"),
    "nv_gpu_power_limit": ("GPU power management limit in watts", "power_limit_w"),
}
_ENERGY = ("nv_energy_consumption", "GPU energy consumption in joules since the Triton Server started")


def device_families(workers: Iterable[WorkerCounters]) -> Iterator[Family]:
    """The families, with series for what live workers tell."""
    hosts: dict[str, HostReading] = {}
    gpus: dict[str, GpuReading] = {}
    pinned_total_bytes = pinned_used_bytes = 0
    for worker in workers:
        pinned_total_bytes += worker.pinned_total_bytes
        pinned_used_bytes += worker.pinned_used_bytes
        if worker.host is not None:
            hosts[worker.host.host] = worker.host
        for uuid, reading in worker.gpus.items():
            # Several workers may see the same one: who has looked at it for longest has seen most of its energy.
            known = gpus.get(uuid)
            if known is None or (known.energy_j or 0) < (reading.energy_j or 0):
                gpus[uuid] = reading
    yield from _host_families(list(hosts.values()))
    for name, (help, field) in _GPU_GAUGES.items():
        yield gauge(name, help, _of_gpus(gpus, field))
    yield counter(*_ENERGY, _of_gpus(gpus, "energy_j"))
    for name, help, value in (
        ("nv_pinned_memory_pool_total_bytes", "Pinned memory pool total memory size, in bytes", pinned_total_bytes),
        ("nv_pinned_memory_pool_used_bytes", "Pinned memory pool used memory size, in bytes", pinned_used_bytes),
    ):
        yield gauge(name, help, [Sample(NO_LABELS, value)])


def _of_gpus(gpus: Mapping[str, GpuReading], field: str) -> Iterator[Sample]:
    for uuid, reading in sorted(gpus.items()):
        value = getattr(reading, field)
        if value is not None:
            yield Sample({"gpu_uuid": uuid}, value)


def _host_families(hosts: list[HostReading]) -> Iterator[Family]:
    told = bool(hosts)
    utilization = sum(host.utilization for host in hosts) / max(1, len(hosts))
    total_bytes = sum(host.memory_total_bytes for host in hosts)
    used_bytes = sum(host.memory_used_bytes for host in hosts)
    for name, help, value in (
        ("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", utilization),
        ("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", total_bytes),
        ("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", used_bytes),
    ):
        yield gauge(name, help, [Sample(NO_LABELS, value)] if told else [])
