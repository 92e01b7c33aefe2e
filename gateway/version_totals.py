"""`VersionTotals`: the counters of one model version, summed over everybody who counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from schemas.model_identity import plain_name
from schemas.statistics import (
    FAILURE_REASONS,
    HistogramCounters,
    QueuedVersionCounters,
    VersionCounters,
)
from telemetry.quantiles import DurationSketch

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
"""What Triton counts of requests, in the order in which it tells."""

RESPONSE_DURATIONS = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")
"""What Triton counts of the responses of decoupled models."""


_MOST = (1 << 64) - 1


class SummaryTotals:
    """A summary over several workers."""

    def __init__(self) -> None:
        self.count = 0
        self.sum_us = 0
        self.sketch = DurationSketch()


class VersionTotals:
    """Durations are [count, nanoseconds]; see `schemas.statistics.VersionCounters` for the others."""

    def __init__(self, model: str, version: int) -> None:
        self.model = model
        self.version = version
        self.durations: dict[str, list[int]] = {name: [0, 0] for name in DURATIONS}
        self.inference_count = 0
        self.execution_count = 0
        self.last_inference_ms = 0
        self.staged_ns = 0
        self.pending = 0
        self.failures: Counter[str] = Counter(dict.fromkeys(FAILURE_REASONS, 0))
        self.batches: dict[int, list[int]] = {}
        self.responses: dict[int, dict[str, list[int]]] = {}
        self.memory: Counter[tuple[str, int]] = Counter()
        self.first_response_ms: HistogramCounters | None = None
        self.summaries: dict[str, SummaryTotals] = defaultdict(SummaryTotals)

    def add(self, row: VersionCounters) -> None:
        """Adds what one worker counted."""
        for name, total in self.durations.items():
            _add(total, getattr(row, name))
        self.inference_count += row.inference_count
        self.execution_count += row.execution_count
        self.last_inference_ms = max(self.last_inference_ms, row.last_inference_ms)
        self.staged_ns += row.staged_ns
        self._add_failures(row.failures)
        for size, values in row.batches.items():
            _add(self.batches.setdefault(size, [0, 0, 0, 0]), values)
        for index, kinds in row.responses.items():
            response = self.responses.setdefault(index, {})
            for kind in RESPONSE_DURATIONS:
                _add(response.setdefault(kind, [0, 0]), kinds.get(kind, (0, 0)))
        for kind, id, size_bytes in row.memory_usage:
            self.memory[kind, id] += size_bytes
        if row.first_response_ms is not None:
            self._add_histogram(row.first_response_ms)
        for name, counted in row.summaries.items():
            summary = self.summaries[name]
            summary.count += counted.count
            summary.sum_us += counted.sum_us
            summary.sketch.add_bins(counted.bins)

    def add_queued(self, queued: QueuedVersionCounters) -> None:
        """Adds what a scheduler holds, and what it failed itself."""
        self.pending += queued.pending
        self._add_failures(queued.failures)
        _add(self.durations["fail"], [sum(queued.failures.values()), queued.failed_ns])

    def add_totals(self, other: VersionTotals) -> None:
        """Adds other sums."""
        for name, total in self.durations.items():
            _add(total, other.durations[name])
        self.inference_count += other.inference_count
        self.execution_count += other.execution_count
        self.last_inference_ms = max(self.last_inference_ms, other.last_inference_ms)
        self.staged_ns += other.staged_ns
        self.pending += other.pending
        self.failures.update(other.failures)
        for size, values in other.batches.items():
            _add(self.batches.setdefault(size, [0, 0, 0, 0]), values)
        for index, kinds in other.responses.items():
            response = self.responses.setdefault(index, {})
            for kind, values in kinds.items():
                _add(response.setdefault(kind, [0, 0]), values)
        self.memory.update(other.memory)
        if other.first_response_ms is not None:
            self._add_histogram(other.first_response_ms)
        for name, summary in other.summaries.items():
            mine = self.summaries[name]
            mine.count += summary.count
            mine.sum_us += summary.sum_us
            mine.sketch.add_bins(summary.sketch.bins())

    def _add_failures(self, failures: dict[str, int]) -> None:
        for reason, requests in failures.items():
            self.failures[reason if reason in FAILURE_REASONS else "OTHER"] += requests

    def _add_histogram(self, other: HistogramCounters) -> None:
        known = self.first_response_ms
        if known is None or known.bounds != other.bounds:
            # Buckets that differ can't be summed: the model has another configuration since.
            self.first_response_ms = other.model_copy(deep=True)
            return
        _add(known.counts, other.counts)
        known.sum += other.sum

    def triton_row(self) -> dict[str, Any]:
        """The row of `model_stats` in Triton's JSON; gRPC's message has the same fields."""
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
    # Each counter of a message is bounded, their sum is not; beyond this neither JSON nor protobuf has numbers.
    return {"count": min(count, _MOST), "ns": min(ns, _MOST)}
