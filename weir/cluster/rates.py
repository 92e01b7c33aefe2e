"""`ClusterRates`: rates and quantiles of models between two readings of the counters of a cluster. Sans-IO.

`ModelReading` is what the counters of one model were at one time; `readings_of` takes it from `weir.cluster.counters`.
`rates_between` compares two of them: requests a second, latency quantiles of the requests that ended between them, and the
mean batch size. Values without any event in between are None, not 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from weir.cluster.counters.version_totals import VersionTotals
from weir.schemas.wire.statistics import SchedulerCounters
from weir.telemetry.instruments import DurationHistogram

Key = tuple[str, int]
"""A model's identity and a version."""


@dataclass(slots=True)
class QueueReading:
    """The queues of one model now: requests by lane, age of the oldest in seconds, instances and how busy they are.

    `utilization` is the share of the last seconds in which the instances were busy; None without instances.
    """

    depth: dict[str, int] = field(default_factory=dict)
    oldest_s: float = 0.0
    instances: int = 0
    busy: int = 0
    busy_share: float = 0.0

    @property
    def waiting(self) -> int:
        """Requests in all lanes."""
        return sum(self.depth.values())

    @property
    def utilization(self) -> float | None:
        """The share of the last seconds in which the instances were busy, 0 to 1; None without instances."""
        return self.busy_share / self.instances if self.instances else None


@dataclass(frozen=True, slots=True)
class VersionReading:
    """The counters of one version since they began; `rows` are those of all `executions`."""

    succeeded: int
    failed: int
    rows: int
    executions: int
    latency: DurationHistogram

    @classmethod
    def of(cls, totals: VersionTotals) -> VersionReading:
        """What `totals` has now; later changes of `totals` do not change it."""
        succeeded, failed = totals.durations["success"][0], totals.durations["fail"][0]
        latency = DurationHistogram(totals.latency.buckets())
        rows = sum(size * values[0] for size, values in totals.batches.items())
        return cls(succeeded, failed, rows, totals.execution_count, latency)


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters of a cluster at `at_s`, the monotonic time: by version, and the queues by model."""

    at_s: float
    versions: Mapping[Key, VersionReading] = field(default_factory=dict)
    queues: Mapping[str, QueueReading] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rates:
    """What happened between two readings. `p50_ms`, `p99_ms` and `batch_size` are None without a request in between.

    `batch_size` is the mean number of rows of an execution.
    """

    requests_per_s: float = 0.0
    failures_per_s: float = 0.0
    p50_ms: float | None = None
    p99_ms: float | None = None
    batch_size: float | None = None


NO_RATES = Rates()


def reading_of(
    at_s: float, totals: Mapping[Key, VersionTotals], schedulers: Iterable[SchedulerCounters] = ()
) -> Reading:
    """The reading of `Statistics.versions()` and `Statistics.schedulers()` at `at_s`."""
    versions = {key: VersionReading.of(of_version) for key, of_version in totals.items()}
    return Reading(at_s, versions, queues_of(schedulers))


def queues_of(schedulers: Iterable[SchedulerCounters]) -> dict[str, QueueReading]:
    """The queues of each model, summed over partitions."""
    queues: dict[str, QueueReading] = {}
    for scheduler in schedulers:
        for row in scheduler.models:
            if row.load is None and not row.lanes:
                continue  # counters of a queue that was handed over
            queue = queues.setdefault(row.model, QueueReading())
            for name, lane in row.lanes.items():
                queue.depth[name] = queue.depth.get(name, 0) + lane.depth
                queue.oldest_s = max(queue.oldest_s, lane.oldest_us / 1e6)
            queue.busy += sum(version.busy for version in row.versions)
            if row.load is not None:
                queue.instances += row.load.instances
                queue.busy_share += row.load.utilization * row.load.instances
    return queues


def rates_by_version(before: Reading, after: Reading) -> dict[Key, Rates]:
    """The rates of each version in `after`. A version that `before` lacks began with counters of 0."""
    return {key: _rates(before, after, (key,)) for key in after.versions}


def rates_by_model(before: Reading, after: Reading) -> dict[str, Rates]:
    """The rates of each model in `after`, over all of its versions."""
    keys: dict[str, list[Key]] = {}
    for key in after.versions:
        keys.setdefault(key[0], []).append(key)
    return {model: _rates(before, after, of_model) for model, of_model in keys.items()}


def total_rates(before: Reading, after: Reading) -> Rates:
    """The rates of all models together."""
    return _rates(before, after, after.versions)


def _rates(before: Reading, after: Reading, keys: Iterable[Key]) -> Rates:
    elapsed_s = after.at_s - before.at_s
    if elapsed_s <= 0:
        return NO_RATES
    succeeded = failed = rows = executions = 0
    latency = DurationHistogram()
    for key in keys:
        now, earlier = after.versions[key], before.versions.get(key, _NOTHING)
        if now.succeeded < earlier.succeeded or now.executions < earlier.executions:
            earlier = _NOTHING  # it was unloaded and loaded again, so its counters began at 0
        succeeded += now.succeeded - earlier.succeeded
        failed += max(0, now.failed - earlier.failed)
        rows += max(0, now.rows - earlier.rows)
        executions += now.executions - earlier.executions
        if now.succeeded != earlier.succeeded:
            latency.add_buckets(now.latency.since(earlier.latency).buckets())
    p50_us, p99_us = latency.quantile_us(0.5), latency.quantile_us(0.99)
    return Rates(
        requests_per_s=(succeeded + failed) / elapsed_s,
        failures_per_s=failed / elapsed_s,
        p50_ms=None if p50_us is None else p50_us / 1000,
        p99_ms=None if p99_us is None else p99_us / 1000,
        batch_size=rows / executions if executions else None,
    )


_NOTHING = VersionReading(0, 0, 0, 0, DurationHistogram())
