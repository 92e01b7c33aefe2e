"""The counters of a version, and its latency distributions."""

from __future__ import annotations

import msgspec
import pytest

from weir.schemas.config.model_config import (
    HistogramOptions,
    MetricControl,
    MetricIdentifier,
    ModelConfig,
    ModelMetrics,
    TransactionPolicy,
)
from weir.schemas.wire.statistics import VersionCounters
from weir.telemetry.instruments import DurationHistogram
from weir.telemetry.metrics_config import MetricsConfig
from weir.worker.execution.statistics import (
    FIRST_RESPONSE_BOUNDS_MS,
    FIRST_RESPONSE_FAMILY,
    ModelStatistics,
    observer_for,
)

MS = 1_000_000


def counters_of(statistics: ModelStatistics) -> VersionCounters:
    """The snapshot, validated as a gateway does."""
    return msgspec.convert({"model": "m", "version": 1, **statistics.snapshot()}, VersionCounters)


def test_counters_of_a_batch_with_a_failed_request() -> None:
    statistics = ModelStatistics()
    statistics.record_failures(1, "BACKEND", 5 * MS)
    statistics.record_requests(2, 5, 10 * MS, (1 * MS, 2 * MS, 3 * MS), staged_ns=4 * MS)
    statistics.record_execution(6, (1 * MS, 2 * MS, 3 * MS), 77)
    counted = counters_of(statistics)
    assert (counted.success, counted.fail) == ([2, 22 * MS], [1, 5 * MS])
    assert (counted.queue, counted.staged_ns) == ([2, 10 * MS], 4 * MS)
    assert (counted.compute_input, counted.compute_infer, counted.compute_output) == (
        [2, 2 * MS],
        [2, 4 * MS],
        [2, 6 * MS],
    )
    assert (counted.inference_count, counted.execution_count, counted.last_inference_ms) == (5, 1, 77)
    assert counted.batches == {6: [1, MS, 2 * MS, 3 * MS]}
    assert counted.failures == {"REJECTED": 0, "CANCELED": 0, "BACKEND": 1, "OTHER": 0}


def test_a_failed_run_counts_as_a_run() -> None:
    statistics = ModelStatistics()
    statistics.record_execution(2, (0, MS, 0), 78)
    counted = counters_of(statistics)
    assert (counted.success, counted.inference_count, counted.execution_count) == ([0, 0], 0, 1)
    assert counted.batches == {2: [1, 0, MS, 0]}


def test_latencies_are_off_by_default() -> None:
    assert observer_for(ModelConfig(name="m"), MetricsConfig()) is None


DECOUPLED = TransactionPolicy(decoupled=True)


def test_latencies() -> None:
    config = ModelConfig(name="m", model_transaction_policy=DECOUPLED)
    observer = observer_for(config, MetricsConfig(histogram_latencies=True, summary_latencies=True))
    assert observer is not None
    statistics = ModelStatistics(latencies=observer)
    observer.observe([100 * MS, 500 * MS], (1 * MS, 2 * MS, 3 * MS))
    observer.observe_first_responses([106 * MS + 1, 507 * MS - 1])
    counted = counters_of(statistics)
    assert counted.first_response_ms is not None
    assert counted.first_response_ms.bounds == list(FIRST_RESPONSE_BOUNDS_MS)
    assert counted.first_response_ms.counts == [0, 1, 1, 0, 0]
    assert counted.first_response_ms.sum == 106 + 506, "whole milliseconds, as in Triton"
    sums = {name: (summary.count, summary.sum_us) for name, summary in counted.summaries.items()}
    assert sums == {
        "request": (2, 612_000),
        "queue": (2, 600_000),
        "compute_input": (2, 2000),
        "compute_infer": (2, 4000),
        "compute_output": (2, 6000),
    }


def test_a_model_may_configure_the_buckets() -> None:
    metrics = ModelMetrics(
        metric_control=[
            MetricControl(
                metric_identifier=MetricIdentifier(family=FIRST_RESPONSE_FAMILY),
                histogram_options=HistogramOptions(buckets=[9.0, -3.0, 9.0]),
            )
        ]
    )
    config = ModelConfig(name="m", model_metrics=metrics, model_transaction_policy=DECOUPLED)
    observer = observer_for(config, MetricsConfig(histogram_latencies=True))
    assert observer is not None
    assert observer.snapshot() == {
        "summaries": {},
        "first_response_ms": {"bounds": [-3.0, 9.0], "counts": [0] * 3, "sum": 0},
    }
    assert counters_of(ModelStatistics(latencies=observer)).first_response_ms is not None


def test_only_decoupled_models_have_a_histogram_of_first_responses() -> None:
    plain = ModelConfig(name="m")
    assert observer_for(plain, MetricsConfig(histogram_latencies=True)) is None
    observer = observer_for(plain, MetricsConfig(histogram_latencies=True, summary_latencies=True))
    assert observer is not None
    assert observer.snapshot()["first_response_ms"] is None


def test_the_latency_of_a_batch_is_always_counted() -> None:
    statistics = ModelStatistics()
    statistics.record_latency([1 * MS, 9 * MS], 1 * MS)
    latency = DurationHistogram(counters_of(statistics).latency)
    assert latency.count == 2
    assert latency.quantile_us(0.5) == pytest.approx(2000, rel=0.07)
    assert latency.quantile_us(1.0) == pytest.approx(10_000, rel=0.07)
