"""`devices_of`: how busy the hosts and GPUs of a cluster are, over all its workers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weir.schemas.wire.statistics import WorkerCounters


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """The load of all hosts and GPUs: shares (0 to 1) are means, bytes are sums; None where nothing reports them."""

    cpu_utilization: float | None = None
    memory_bytes: float | None = None
    gpu_utilization: float | None = None
    gpu_memory_bytes: float | None = None


def devices_of(workers: Iterable[WorkerCounters]) -> DeviceLoad:
    """The load that `workers` report. A host or GPU that several workers report counts once."""
    workers = list(workers)
    hosts = {worker.host.host: worker.host for worker in workers if worker.host is not None}
    gpus = {uuid: gpu for worker in workers for uuid, gpu in worker.gpus.items()}
    return DeviceLoad(
        cpu_utilization=_mean([host.utilization for host in hosts.values()]),
        memory_bytes=_sum([host.memory_used_bytes for host in hosts.values()]),
        gpu_utilization=_mean([gpu.utilization for gpu in gpus.values() if gpu.utilization is not None]),
        gpu_memory_bytes=_sum([gpu.memory_used_bytes for gpu in gpus.values() if gpu.memory_used_bytes is not None]),
    )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _sum(values: list[int]) -> float | None:
    return float(sum(values)) if values else None
