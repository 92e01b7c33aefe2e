"""Counters of one model version on one worker, by Triton's counting rules.

Source: Triton's statistics extension and metrics, and a running Triton 2.51. A request counts once in `success` or in
`failures`; if it succeeded, its batch size is added to `inference_count`. The durations of a batch are added for each of
its requests; `batches` has them once for each run, by the number of rows. A failed run counts as a run and updates the time
of the last inference. An error response of a Python model counts as a success.

`LatencyObserver` keeps the distributions of durations for the metrics `nv_inference_first_response_histogram_ms` and
`nv_inference_*_summary_us`, which are off by default, as in Triton.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.wire.statistics import FAILURE_REASONS
from weir.telemetry.instruments import BoundedHistogram, DurationHistogram, RecentDurations
from weir.telemetry.metrics_config import MetricsConfig

FIRST_RESPONSE_FAMILY = "nv_inference_first_response_histogram_ms"
FIRST_RESPONSE_BOUNDS_MS = (100.0, 500.0, 2000.0, 5000.0)

_PHASES = ("compute_input", "compute_infer", "compute_output")


class LatencyObserver:
    """The distributions of one version on one worker; thread-safe. Without `bounds_ms` there is no histogram."""

    def __init__(self, bounds_ms: Iterable[float] | None, has_summaries: bool) -> None:
        self._lock = threading.Lock()
        self._first_response = None if bounds_ms is None else BoundedHistogram(sorted({*bounds_ms}))
        self._summaries = {name: RecentDurations() for name in ("request", "queue", *_PHASES)} if has_summaries else {}

    def observe(self, queues_ns: Iterable[int], phases_ns: tuple[int, int, int]) -> None:
        """Adds a batch: the queue time of each of its requests, and the (input, infer, output) durations of its run."""
        if not self._summaries:
            return
        phases_us = [ns // 1000 for ns in phases_ns]
        busy_us = sum(phases_ns) // 1000
        with self._lock:
            requests = 0
            for queue_ns in queues_ns:
                requests += 1
                queue_us = queue_ns // 1000
                self._summaries["queue"].add(queue_us)
                self._summaries["request"].add(queue_us + busy_us)
            if requests:
                for name, phase_us in zip(_PHASES, phases_us, strict=True):
                    self._summaries[name].add(phase_us, requests)

    def observe_first_responses(self, durations_ns: Iterable[int]) -> None:
        """Adds the times from requests to their first responses, in whole milliseconds as Triton counts them."""
        if self._first_response is None:
            return
        with self._lock:
            for duration_ns in durations_ns:
                self._first_response.add(duration_ns // 1_000_000)

    def snapshot(self) -> dict[str, Any]:
        """The fields `summaries` and `first_response_ms` of `weir.schemas.wire.statistics.VersionCounters`."""
        with self._lock:
            summaries: dict[str, Any] = {name: summary.snapshot() for name, summary in self._summaries.items()}
            first = None if self._first_response is None else self._first_response.snapshot()
        return {"summaries": summaries, "first_response_ms": first}


def observer_for(config: ModelConfig, metrics: MetricsConfig) -> LatencyObserver | None:
    """The observer of a model's version; None if neither histograms nor summaries are switched on for it.

    As in Triton, only decoupled models have the histogram: the first response of any other is its only one. If the
    model's `model_metrics` name the histogram, its buckets are those.
    """
    has_histogram = metrics.histogram_latencies and config.is_decoupled
    if not (has_histogram or metrics.summary_latencies):
        return None
    bounds_ms: Iterable[float] = FIRST_RESPONSE_BOUNDS_MS
    for control in config.model_metrics.metric_control if config.model_metrics else ():
        identifier, options = control.metric_identifier, control.histogram_options
        if identifier is not None and identifier.family == FIRST_RESPONSE_FAMILY and options is not None:
            bounds_ms = options.buckets or bounds_ms
    return LatencyObserver(bounds_ms if has_histogram else None, metrics.summary_latencies)


RESPONSE_OUTCOMES = ("success", "fail", "empty_response", "cancel")

MAX_RESPONSE_INDEXES = 1000
"""Responses of one request that are counted by their index; further ones are counted at the last index."""


@dataclass(slots=True)
class Durations:
    """A number of events and their total duration in nanoseconds."""

    count: int = 0
    ns: int = 0

    def add(self, count: int, ns: int) -> None:
        """Adds `count` events that took `ns` together."""
        self.count += count
        self.ns += ns


class BatchRun(NamedTuple):
    """A run of a batch of `rows` rows: its phases, input, infer and output, and how long it took with all of them.

    It kept its instance busy for `busy_ns`, since another batch may have done so for a part of the time; before that its
    requests had waited at the instance for `waited_ns`.
    """

    rows: int
    phases_ns: tuple[int, int, int]
    busy_ns: int
    waited_ns: int
    duration_ns: int


@dataclass(slots=True)
class ModelStatistics:
    """The counters of a version. Thread-safe: instances record, the event loop takes snapshots. `busy_ns` sums all runs."""

    success: Durations = field(default_factory=Durations)
    fail: Durations = field(default_factory=Durations)
    queue: Durations = field(default_factory=Durations)
    compute_input: Durations = field(default_factory=Durations)
    compute_infer: Durations = field(default_factory=Durations)
    compute_output: Durations = field(default_factory=Durations)
    staged_ns: int = 0
    inference_count: int = 0
    execution_count: int = 0
    last_inference_ms: int = 0
    busy_ns: int = 0
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAILURE_REASONS, 0))
    batches: dict[int, list[int]] = field(default_factory=dict)
    responses: dict[int, dict[str, Durations]] = field(default_factory=dict)
    latencies: LatencyObserver | None = None
    latency: DurationHistogram = field(default_factory=DurationHistogram)
    gpu_memory: dict[int, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record_batch(self, run: BatchRun, succeeded_rows: int, queues_ns: Sequence[int]) -> None:
        """Adds a run, whose requests with these queue times have succeeded, with `succeeded_rows` rows together."""
        with self._lock:
            self._add_requests(
                len(queues_ns), succeeded_rows, sum(queues_ns), run.phases_ns, run.waited_ns * len(queues_ns)
            )
            self.latency.add_all(queues_ns, run.duration_ns)
            self._add_execution(run.rows, run.phases_ns, time.time_ns() // 1_000_000, run.busy_ns)
        if self.latencies is not None:
            self.latencies.observe(queues_ns, run.phases_ns)
            self.latencies.observe_first_responses(queue_ns + run.duration_ns for queue_ns in queues_ns)

    def record_requests(
        self, requests: int, batch_size: int, queue_ns: int, phases_ns: tuple[int, int, int], staged_ns: int = 0
    ) -> None:
        """Adds `requests` requests with `batch_size` rows together that succeeded in a run of these phases.

        `queue_ns` is the sum of their queue times, of which they spent `staged_ns` at their instance.
        """
        with self._lock:
            self._add_requests(requests, batch_size, queue_ns, phases_ns, staged_ns)

    def _add_requests(
        self, requests: int, batch_size: int, queue_ns: int, phases_ns: tuple[int, int, int], staged_ns: int
    ) -> None:
        input_ns, infer_ns, output_ns = phases_ns
        self.success.add(requests, queue_ns + (input_ns + infer_ns + output_ns) * requests)
        self.staged_ns += staged_ns
        self.queue.add(requests, queue_ns)
        self.compute_input.add(requests, input_ns * requests)
        self.compute_infer.add(requests, infer_ns * requests)
        self.compute_output.add(requests, output_ns * requests)
        self.inference_count += batch_size

    def record_latency(self, queues_ns: Iterable[int], busy_ns: int) -> None:
        """Adds requests that succeeded, by their queue times; each then took `busy_ns`."""
        with self._lock:
            self.latency.add_all(queues_ns, busy_ns)

    def record_execution(self, executed_rows: int, phases_ns: tuple[int, int, int], now_ms: int) -> None:
        """Adds a run of `executed_rows` rows, whatever the outcomes of its requests."""
        with self._lock:
            self._add_execution(executed_rows, phases_ns, now_ms, sum(phases_ns))

    def _add_execution(self, rows: int, phases_ns: tuple[int, int, int], now_ms: int, busy_ns: int) -> None:
        self.execution_count += 1
        self.last_inference_ms = now_ms
        self.busy_ns += busy_ns
        row = self.batches.get(rows)
        if row is None:
            row = self.batches[rows] = [0, 0, 0, 0]
        row[0] += 1
        row[1] += phases_ns[0]
        row[2] += phases_ns[1]
        row[3] += phases_ns[2]

    def record_response(self, index: int, outcome: str, compute_infer_ns: int, compute_output_ns: int) -> None:
        """Adds the response number `index` of a decoupled model to a request, or its end without a response.

        `outcome` is one of RESPONSE_OUTCOMES (`empty_response` for an end without a response); `compute_infer_ns` is the
        time since the response before it, or since the start.
        """
        with self._lock:
            row = self.responses.setdefault(min(index, MAX_RESPONSE_INDEXES - 1), {})
            row.setdefault(outcome, Durations()).add(1, compute_infer_ns + compute_output_ns)
            if outcome != "cancel":
                row.setdefault("compute_infer", Durations()).add(1, compute_infer_ns)
            if outcome in ("success", "fail"):
                row.setdefault("compute_output", Durations()).add(1, compute_output_ns)

    def record_failures(self, requests: int, reason: str, ns: int) -> None:
        """Adds `requests` requests that failed for `reason` after `ns` together."""
        with self._lock:
            self.fail.add(requests, ns)
            self.failures[reason] += requests

    def add_memory(self, taken: Mapping[int, int]) -> None:
        """Adds bytes of GPU memory that the version has allocated, by GPU."""
        with self._lock:
            for gpu, size_bytes in taken.items():
                self.gpu_memory[gpu] = self.gpu_memory.get(gpu, 0) + size_bytes

    def snapshot(self) -> dict[str, Any]:
        """All counters as the fields of `weir.schemas.wire.statistics.VersionCounters`."""
        observed = {} if self.latencies is None else self.latencies.snapshot()
        with self._lock:
            return {
                **observed,
                "success": [self.success.count, self.success.ns],
                "fail": [self.fail.count, self.fail.ns],
                "queue": [self.queue.count, self.queue.ns],
                "compute_input": [self.compute_input.count, self.compute_input.ns],
                "compute_infer": [self.compute_infer.count, self.compute_infer.ns],
                "compute_output": [self.compute_output.count, self.compute_output.ns],
                "staged_ns": self.staged_ns,
                "inference_count": self.inference_count,
                "execution_count": self.execution_count,
                "last_inference_ms": self.last_inference_ms,
                "failures": dict(self.failures),
                "batches": {size: list(row) for size, row in self.batches.items()},
                "responses": {index: _response_row(row) for index, row in self.responses.items()},
                "latency": self.latency.buckets(),
                "memory_usage": [("GPU", gpu, size_bytes) for gpu, size_bytes in self.gpu_memory.items()],
            }


def _response_row(row: dict[str, Durations]) -> dict[str, list[int]]:
    return {
        name: [row[name].count, row[name].ns] if name in row else [0, 0]
        for name in ("compute_infer", "compute_output", *RESPONSE_OUTCOMES)
    }
