"""Rates and quantiles between two readings of counters."""

from __future__ import annotations

import pytest

from weir.cluster.counters.version_totals import VersionTotals
from weir.cluster.rates import Reading, queues_of, rates_by_model, rates_by_version, reading_of, total_rates
from weir.schemas.wire.statistics import (
    LaneCounters,
    LoadCounters,
    QueueCounters,
    QueuedVersionCounters,
    SchedulerCounters,
    VersionCounters,
)
from weir.telemetry.instruments import DurationHistogram

MS = 1_000_000


def totals(model: str, version: int, durations_ms: list[int], failed: int = 0, executions: int = 1) -> VersionTotals:
    """The totals of a version that has answered requests of one row with these durations, in equal batches."""
    latency = DurationHistogram()
    latency.add_all(duration * MS for duration in durations_ms)
    rows = len(durations_ms)
    summed = VersionTotals(model, version)
    summed.add(
        VersionCounters(
            model=model,
            version=version,
            success=[rows, 0],
            fail=[failed, 0],
            queue=[0, 0],
            compute_input=[0, 0],
            compute_infer=[0, 0],
            compute_output=[0, 0],
            inference_count=rows,
            execution_count=executions,
            last_inference_ms=0,
            failures={},
            batches={rows // executions: [executions, 0, 0, 0]},
            latency=latency.buckets(),
        )
    )
    return summed


def reading(at_s: float, *of_versions: VersionTotals) -> Reading:
    return reading_of(at_s, {(each.model, each.version): each for each in of_versions})


def test_rates_are_of_the_requests_between_the_readings() -> None:
    before = reading(10, totals("a", 1, [1000] * 50), totals("b", 1, []))
    after = reading(12, totals("a", 1, [1000] * 50 + [10] * 98 + [100] * 2, 20, 30), totals("b", 1, []))
    a, b = rates_by_model(before, after)["a"], rates_by_model(before, after)["b"]
    assert (a.requests_per_s, a.failures_per_s) == (60, 10)
    assert a.p50_ms == pytest.approx(10, rel=0.07)
    assert a.p99_ms == pytest.approx(100, rel=0.07)
    assert (b.requests_per_s, b.p50_ms, b.p99_ms, b.batch_size) == (0, None, None, None)
    assert total_rates(before, after) == a


def test_the_batch_size_is_the_mean_of_the_executions() -> None:
    before = reading(0, totals("a", 1, [1] * 8, executions=1))
    after_totals = totals("a", 1, [1] * 8, executions=1)
    after_totals.add(
        VersionCounters(
            model="a", version=1, success=[6, 0], fail=[0, 0], queue=[0, 0], compute_input=[0, 0], compute_infer=[0, 0],
            compute_output=[0, 0], inference_count=6, execution_count=3, last_inference_ms=0, failures={},
            batches={2: [3, 0, 0, 0]},
        )
    )  # fmt: skip
    assert rates_by_version(before, reading(1, after_totals))["a", 1].batch_size == 2


def test_versions_of_a_model_are_added_and_a_new_one_began_at_zero() -> None:
    before = reading(0, totals("a", 1, [5]))
    after = reading(1, totals("a", 1, [5, 5]), totals("a", 2, [50, 50, 50]))
    assert rates_by_version(before, after)["a", 2].requests_per_s == 3
    assert rates_by_model(before, after)["a"].requests_per_s == 4


def test_a_version_that_was_loaded_again_began_at_zero() -> None:
    before, after = reading(0, totals("a", 1, [5] * 9)), reading(1, totals("a", 1, [7, 7]))
    assert rates_by_model(before, after)["a"].requests_per_s == 2


def test_readings_of_one_time_have_no_rates() -> None:
    one = reading(3, totals("a", 1, [5] * 9))
    assert rates_by_model(one, one)["a"].requests_per_s == 0


def test_a_reading_keeps_what_it_has() -> None:
    growing = totals("a", 1, [5])
    before = reading(0, growing)
    growing.latency.add_buckets(growing.latency.buckets())
    assert before.versions["a", 1].latency.count == 1


def test_queues_of_partitions_are_added() -> None:
    def scheduler(name: str, depth: int, oldest_us: int, instances: int, utilization: float) -> SchedulerCounters:
        queue = QueueCounters(
            model="a",
            lanes={"live": LaneCounters(depth=depth, oldest_us=oldest_us)},
            versions=[QueuedVersionCounters(version=1, pending=depth, busy=1)],
            load=LoadCounters(instances=instances, utilization=utilization),
        )
        retired = QueueCounters(model="gone", lanes={}, versions=[])
        return SchedulerCounters(scheduler=name, models=[queue, retired])

    queues = queues_of([scheduler("s", 2, 500_000, 1, 1.0), scheduler("t", 3, 2_000_000, 3, 0.0)])
    assert queues.keys() == {"a"}
    assert (queues["a"].waiting, queues["a"].oldest_s, queues["a"].busy) == (5, 2.0, 2)
    assert queues["a"].utilization == pytest.approx(0.25)
