"""The values of charts and tables from two readings."""

from __future__ import annotations

from weir.cluster.counters.devices import DeviceLoad, devices_of
from weir.cluster.rates import QueueReading, Reading, VersionReading
from weir.console.collection.load import measure
from weir.schemas.wire.statistics import GpuReading, HostReading, WorkerCounters
from weir.telemetry.instruments import DurationHistogram


def version(succeeded: int, failed: int = 0, rows: int = 0, executions: int = 0) -> VersionReading:
    return VersionReading(succeeded, failed, rows, executions, DurationHistogram())


def test_rates_queues_and_devices_become_columns() -> None:
    before = Reading(10.0, {("a", 1): version(10, 0, 10, 10), ("b", 1): version(0)})
    after = Reading(
        12.0,
        {("a", 1): version(30, 4, 50, 20), ("b", 1): version(2, 0, 2, 2)},
        {"a": QueueReading({"live": 3, "event": 4}, 1.5, 2, 1, 1.0)},
    )
    load = measure(before, after, DeviceLoad(cpu_utilization=0.5))
    assert load.models["a"]["requests_per_s"] == 12
    assert load.models["a"]["failures_per_s"] == 2
    assert load.models["a"]["batch_size"] == 4
    assert load.models["a"]["queue_depth"] == 7
    assert load.models["a"]["utilization"] == 0.5
    assert load.models["b"]["queue_depth"] == 0
    assert load.models["b"]["utilization"] is None
    assert load.cluster["requests_per_s"] == 13
    assert (load.cluster["queue_depth"], load.cluster["queue_oldest_s"]) == (7, 1.5)
    assert (load.cluster["cpu_utilization"], load.cluster["gpu_utilization"]) == (0.5, None)


def test_without_a_gateway_rates_are_unknown_unless_durable_requests_run() -> None:
    before = Reading(10.0, {("a", 1): version(10), ("b", 1): version(0)})
    after = Reading(12.0, {("a", 1): version(10), ("b", 1): version(2, 0, 2, 2)}, {"a": QueueReading({"live": 3})})
    load = measure(before, after, DeviceLoad(), has_gateway=False)
    assert load.models["a"]["requests_per_s"] is load.models["a"]["failures_per_s"] is None
    assert load.models["a"]["queue_depth"] == 3, "schedulers report it"
    assert load.models["b"]["requests_per_s"] == load.cluster["requests_per_s"] == 1


def worker(name: str, host: HostReading | None, gpus: dict[str, GpuReading]) -> WorkerCounters:
    return WorkerCounters(worker=name, models=[], host=host, gpus=gpus)


def test_a_host_and_a_gpu_of_several_workers_count_once() -> None:
    host = HostReading(host="h", utilization=0.5, memory_total_bytes=10, memory_used_bytes=4)
    other = HostReading(host="i", utilization=0.1, memory_total_bytes=10, memory_used_bytes=1)
    gpu = GpuReading(utilization=0.8, memory_used_bytes=100)
    mute = GpuReading()
    workers = [worker("a", host, {"g": gpu}), worker("b", host, {"g": gpu, "m": mute}), worker("c", other, {})]
    assert devices_of(workers) == DeviceLoad(0.3, 5.0, 0.8, 100.0)
    assert devices_of([worker("d", None, {})]) == DeviceLoad()
