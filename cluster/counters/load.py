"""`LoadMeter`: the load of each model over an interval, from two readings of the counters of all processes.

Sans-IO: `read` extracts a `Reading` from `Statistics`, and the meter compares each reading with the one before. Counters
that became smaller, because a version was loaded again, count from zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cluster.counters.collection import Statistics
from cluster.counters.version_totals import VersionTotals
from schemas.wire.statistics import QueueCounters, WorkerCounters


@dataclass(slots=True)
class ModelReading:
    """The counters of one model: sums over its versions since they were loaded, and the state of its queues now.

    `requests` have ended (`failures` of them with an error), `rows` ran in `executions` batches. `depth` requests wait, the
    oldest for `oldest_s`. `utilization` is the share of the last seconds in which its instances were busy; None without
    instances.
    """

    requests: int = 0
    failures: int = 0
    rows: int = 0
    executions: int = 0
    depth: int = 0
    oldest_s: float = 0.0
    utilization: float | None = None


@dataclass(slots=True)
class Reading:
    """The counters of a cluster at `at_s` (any monotonic clock), by the identity of each model.

    Shares are means over hosts and GPUs, bytes are sums; None where nothing reports them.
    """

    at_s: float
    models: dict[str, ModelReading] = field(default_factory=dict)
    cpu_utilization: float | None = None
    memory_bytes: float | None = None
    gpu_utilization: float | None = None
    gpu_memory_bytes: float | None = None


def read(statistics: Statistics, at_s: float) -> Reading:
    """The reading of what `statistics` has collected last."""
    reading = Reading(at_s)
    for totals in statistics.versions().values():
        _add_version(reading.models.setdefault(totals.model, ModelReading()), totals)
    queues = [queue for scheduler in statistics.schedulers() for queue in scheduler.models]
    _add_queues(reading.models, queues)
    _add_devices(reading, statistics.live_workers())
    return reading


def _add_version(model: ModelReading, totals: VersionTotals) -> None:
    failures = totals.durations["fail"][0]
    model.requests += totals.durations["success"][0] + failures
    model.failures += failures
    model.rows += totals.inference_count
    model.executions += totals.execution_count


def _add_queues(models: Mapping[str, ModelReading], queues: Iterable[QueueCounters]) -> None:
    instances: Counter[str] = Counter()
    busy: Counter[str] = Counter()
    for queue in queues:
        model = models.get(queue.model)
        if model is None:
            continue
        model.depth += sum(lane.depth for lane in queue.lanes.values())
        model.oldest_s = max([model.oldest_s, *(lane.oldest_us / 1e6 for lane in queue.lanes.values())])
        if queue.load is not None and queue.load.instances:
            instances[queue.model] += queue.load.instances
            busy[queue.model] += queue.load.utilization * queue.load.instances  # type: ignore[assignment]
    for name, count in instances.items():
        models[name].utilization = busy[name] / count


def _add_devices(reading: Reading, workers: Iterable[WorkerCounters]) -> None:
    hosts = {worker.host.host: worker.host for worker in workers if worker.host is not None}
    gpus = {uuid: gpu for worker in workers for uuid, gpu in worker.gpus.items()}
    if hosts:
        reading.cpu_utilization = sum(host.utilization for host in hosts.values()) / len(hosts)
        reading.memory_bytes = float(sum(host.memory_used_bytes for host in hosts.values()))
    shares = [gpu.utilization for gpu in gpus.values() if gpu.utilization is not None]
    used = [gpu.memory_used_bytes for gpu in gpus.values() if gpu.memory_used_bytes is not None]
    reading.gpu_utilization = sum(shares) / len(shares) if shares else None
    reading.gpu_memory_bytes = float(sum(used)) if used else None


@dataclass(slots=True)
class ModelLoad:
    """The load of one model, or of all together, in the interval between two readings.

    `batch_size` is the mean number of rows of the batches that were executed; None if none was. `p50_ms` and `p99_ms` are
    quantiles of the durations of the requests that ended; None if none did, or if no process counts them.
    """

    requests_per_s: float
    failures_per_s: float
    batch_size: float | None
    queue_depth: int
    queue_oldest_s: float
    utilization: float | None
    p50_ms: float | None = None
    p99_ms: float | None = None


@dataclass(slots=True)
class ClusterLoad:
    """The load of all models together, of each one by its identity, and of the hosts and GPUs."""

    total: ModelLoad
    models: dict[str, ModelLoad]
    cpu_utilization: float | None
    memory_bytes: float | None
    gpu_utilization: float | None
    gpu_memory_bytes: float | None


class LoadMeter:
    """Compares each reading with the one before it."""

    def __init__(self) -> None:
        self._last: Reading | None = None

    def measure(self, reading: Reading) -> ClusterLoad | None:
        """The load since the reading before; None for the first one, and without time between them."""
        last, self._last = self._last, reading
        if last is None or reading.at_s <= last.at_s:
            return None
        elapsed_s = reading.at_s - last.at_s
        total, before = ModelReading(), ModelReading()
        models = {}
        for name, now in reading.models.items():
            then = _earlier(now, last.models.get(name))
            models[name] = _load(now, then, elapsed_s)
            _sum_up(total, now)
            _sum_up(before, then)
        used = [model.utilization for model in reading.models.values() if model.utilization is not None]
        total.utilization = sum(used) / len(used) if used else None
        return ClusterLoad(
            total=_load(total, before, elapsed_s),
            models=models,
            cpu_utilization=reading.cpu_utilization,
            memory_bytes=reading.memory_bytes,
            gpu_utilization=reading.gpu_utilization,
            gpu_memory_bytes=reading.gpu_memory_bytes,
        )


def _earlier(now: ModelReading, then: ModelReading | None) -> ModelReading:
    """The earlier reading of a model; zeros if it was not served then, or was loaded again since."""
    is_same_life = then is not None and then.requests <= now.requests and then.executions <= now.executions
    return then if then is not None and is_same_life else ModelReading()


def _sum_up(total: ModelReading, model: ModelReading) -> None:
    total.requests += model.requests
    total.failures += model.failures
    total.rows += model.rows
    total.executions += model.executions
    total.depth += model.depth
    total.oldest_s = max(total.oldest_s, model.oldest_s)


def _load(now: ModelReading, then: ModelReading, elapsed_s: float) -> ModelLoad:
    executions = now.executions - then.executions
    return ModelLoad(
        requests_per_s=(now.requests - then.requests) / elapsed_s,
        failures_per_s=max(0, now.failures - then.failures) / elapsed_s,
        batch_size=(now.rows - then.rows) / executions if executions else None,
        queue_depth=now.depth,
        queue_oldest_s=now.oldest_s,
        utilization=now.utilization,
    )
