"""`VersionTotals`: the counters of one model version, summed over all processes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from weir.schemas.core.names import plain_name
from weir.schemas.wire.statistics import FAILURE_REASONS, HistogramCounters, QueuedVersionCounters, VersionCounters
from weir.telemetry.instruments import DurationHistogram, DurationSketch

DURATIONS = (
    "success",
    "fail",
    "queue",
    "compute_input",
    "compute_infer",
    "compute_output",
    "cache_hit",
    "cache_miss",
)
"""The request durations of Triton's statistics, in its order."""

RESPONSE_DURATIONS = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")
"""The response durations of Triton's statistics, for decoupled models."""


_MOST = (1 << 64) - 1


class SummaryTotals:
    """A latency summary, merged over workers."""

    def __init__(self) -> None:
        self.count = 0
        self.sum_us = 0
        self.sketch = DurationSketch()

    def add(self, count: int, sum_us: int, bins: Any) -> None:
        """Adds a summary: its values, and the bins of its sketch."""
        self.count += count
        self.sum_us += sum_us
        self.sketch.add_bins(bins)


class VersionTotals:
    """Sums of one version. Durations are [count, nanoseconds]; the other fields are those of `VersionCounters`.

    `latency` has all requests that succeeded, since their counters began. Quantiles of an interval are those of the
    difference of two states (`weir.cluster.rates`).
    """

    def __init__(self, model: str, version: int) -> None:
        self.model = model
        self.version = version
        self.durations: dict[str, list[int]] = {name: [0, 0] for name in DURATIONS}
        self.inference_count = 0
        self.execution_count = 0
        self.last_inference_ms = 0
        self.staged_ns = 0
        self.latency = DurationHistogram()
        self.pending = 0
        self.failures: Counter[str] = Counter(dict.fromkeys(FAILURE_REASONS, 0))
        self.batches: dict[int, list[int]] = {}
        self.responses: dict[int, dict[str, list[int]]] = {}
        self.memory: Counter[tuple[str, int]] = Counter()
        self.first_response_ms: HistogramCounters | None = None
        self.summaries: dict[str, SummaryTotals] = defaultdict(SummaryTotals)

    def add(self, row: VersionCounters) -> None:
        """Adds the counters of one worker or gateway."""
        self.latency.add_buckets(row.latency)
        self._add(row, {name: getattr(row, name) for name in DURATIONS})
        for kind, id, size_bytes in row.memory_usage:
            self.memory[kind, id] += size_bytes
        for name, summary in row.summaries.items():
            self.summaries[name].add(summary.count, summary.sum_us, summary.bins)

    def add_queued(self, queued: QueuedVersionCounters) -> None:
        """Adds the requests that wait in a scheduler, and those that it failed itself."""
        self.pending += queued.pending
        self._add_failures(queued.failures)
        _add(self.durations["fail"], [sum(queued.failures.values()), queued.failed_ns])

    def add_totals(self, other: VersionTotals) -> None:
        """Adds the sums of another `VersionTotals`."""
        self._add(other, other.durations)
        self.pending += other.pending
        self.latency.add_buckets(other.latency.buckets())
        self.memory.update(other.memory)
        for name, summary in other.summaries.items():
            self.summaries[name].add(summary.count, summary.sum_us, summary.sketch.bins())

    def _add(self, counted: VersionCounters | VersionTotals, durations: Mapping[str, Sequence[int]]) -> None:
        for name, total in self.durations.items():
            _add(total, durations[name])
        self.inference_count += counted.inference_count
        self.execution_count += counted.execution_count
        self.last_inference_ms = max(self.last_inference_ms, counted.last_inference_ms)
        self.staged_ns += counted.staged_ns
        self._add_failures(counted.failures)
        for size, values in counted.batches.items():
            _add(self.batches.setdefault(size, [0, 0, 0, 0]), values)
        for index, kinds in counted.responses.items():
            response = self.responses.setdefault(index, {})
            for kind in RESPONSE_DURATIONS:
                _add(response.setdefault(kind, [0, 0]), kinds.get(kind, (0, 0)))
        if counted.first_response_ms is not None:
            self._add_histogram(counted.first_response_ms)

    def _add_failures(self, failures: dict[str, int]) -> None:
        for reason, requests in failures.items():
            self.failures[reason if reason in FAILURE_REASONS else "OTHER"] += requests

    def _add_histogram(self, other: HistogramCounters) -> None:
        known = self.first_response_ms
        if known is None or known.bounds != other.bounds:
            # Histograms with different buckets can't be summed: the configuration has changed.
            self.first_response_ms = HistogramCounters(
                bounds=list(other.bounds), counts=list(other.counts), sum=other.sum
            )
            return
        _add(known.counts, other.counts)
        known.sum += other.sum

    def triton_row(self) -> dict[str, Any]:
        """The row of `model_stats` in Triton's JSON; the gRPC message has the same fields."""
        return {
            "name": plain_name(self.model),
            "version": str(self.version),
            "last_inference": self.last_inference_ms,
            "inference_count": min(self.inference_count, _MOST),
            "execution_count": min(self.execution_count, _MOST),
            "inference_stats": {name: _duration(*self.durations[name]) for name in DURATIONS},
            "response_stats": {
                str(index): {kind: _duration(*values) for kind, values in kinds.items()}
                for index, kinds in sorted(self.responses.items())
            },
            "batch_stats": [
                {
                    "batch_size": size,
                    "compute_input": _duration(runs, input_ns),
                    "compute_infer": _duration(runs, infer_ns),
                    "compute_output": _duration(runs, output_ns),
                }
                for size, (runs, input_ns, infer_ns, output_ns) in sorted(self.batches.items())
            ],
            "memory_usage": [
                {"type": kind, "id": id, "byte_size": size_bytes}
                for (kind, id), size_bytes in sorted(self.memory.items())
            ],
        }


def _add(total: list[int], more: Any) -> None:
    for position, value in enumerate(more):
        total[position] += value


def _duration(count: int, ns: int) -> dict[str, int]:
    # Each counter of a message is bounded, their sum is not, and protobuf can't represent more.
    return {"count": min(count, _MOST), "ns": min(ns, _MOST)}
