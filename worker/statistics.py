"""Counters of one model version on one worker, by Triton's counting rules.

Source: Triton's statistics extension and metrics, and a running Triton 2.51. A request counts once in `success` or
`failures`; `inference_count` adds its batch size if it succeeded; durations of a batch are attributed to each of its
requests, `batches` holds them once per run, by all the rows that ran. A run that fails counts as a run, and moves the time
of the last inference. A Python model's error response counts as a success.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from schemas.statistics import FAILURE_REASONS
from worker.latencies import LatencyObserver

RESPONSE_OUTCOMES = ("success", "fail", "empty_response", "cancel")

MAX_RESPONSE_INDEXES = 1000
"""Responses of one request that are counted by their index; those that follow are counted at the last."""


@dataclass(slots=True)
class Durations:
    """How often something happened, and how long it took in all, in nanoseconds."""

    count: int = 0
    ns: int = 0

    def add(self, count: int, ns: int) -> None:
        """`count` more, together `ns`."""
        self.count += count
        self.ns += ns


@dataclass(slots=True)
class ModelStatistics:
    """Thread-safe: instances of a version record, the event loop takes snapshots. `busy_ns` is what all executions took."""

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
    gpu_memory: dict[int, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record_batch(
        self,
        requests: int,
        batch_size: int,
        queue_ns: int,
        phases_ns: tuple[int, int, int],
        now_ms: int,
        executed_rows: int,
        staged_ns: int = 0,
    ) -> None:
        """A batch of `executed_rows` rows ran, of which `requests` requests with `batch_size` rows succeeded.

        `queue_ns` is summed over those, and `staged_ns` is what they spent of it at their instance.
        """
        with self._lock:
            self._add_requests(requests, batch_size, queue_ns, phases_ns, staged_ns)
            self._add_execution(executed_rows, phases_ns, now_ms)

    def record_requests(
        self, requests: int, batch_size: int, queue_ns: int, phases_ns: tuple[int, int, int], staged_ns: int = 0
    ) -> None:
        """As `record_batch`, for requests that end before or after the run of their batch (`record_execution`)."""
        with self._lock:
            self._add_requests(requests, batch_size, queue_ns, phases_ns, staged_ns)

    def record_execution(self, executed_rows: int, phases_ns: tuple[int, int, int], now_ms: int) -> None:
        """A batch of `executed_rows` rows ran, whatever became of its requests."""
        with self._lock:
            self._add_execution(executed_rows, phases_ns, now_ms)

    def record_response(self, index: int, outcome: str, compute_infer_ns: int, compute_output_ns: int) -> None:
        """A decoupled model sent its response number `index` to a request, or ended without one (`empty_response`).

        `outcome` is one of RESPONSE_OUTCOMES; `compute_infer_ns` counts from the response before, or the start.
        """
        with self._lock:
            row = self.responses.setdefault(min(index, MAX_RESPONSE_INDEXES - 1), {})
            row.setdefault(outcome, Durations()).add(1, compute_infer_ns + compute_output_ns)
            if outcome != "cancel":
                row.setdefault("compute_infer", Durations()).add(1, compute_infer_ns)
            if outcome in ("success", "fail"):
                row.setdefault("compute_output", Durations()).add(1, compute_output_ns)

    def record_failures(self, requests: int, reason: str, ns: int) -> None:
        """`requests` requests failed for `reason`, having taken `ns` together."""
        with self._lock:
            self.fail.add(requests, ns)
            self.failures[reason] += requests

    def add_memory(self, taken: Mapping[int, int]) -> None:
        """The version has taken so many bytes more of each GPU."""
        with self._lock:
            for gpu, size_bytes in taken.items():
                self.gpu_memory[gpu] = self.gpu_memory.get(gpu, 0) + size_bytes

    def snapshot(self) -> dict[str, Any]:
        """All counters as plain values: fields of `schemas.statistics.VersionCounters`."""
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
                "memory_usage": [("GPU", gpu, size_bytes) for gpu, size_bytes in self.gpu_memory.items()],
            }

    def _add_requests(
        self, requests: int, batch_size: int, queue_ns: int, phases_ns: tuple[int, int, int], staged_ns: int
    ) -> None:
        input_ns, infer_ns, output_ns = phases_ns
        self.success.add(requests, queue_ns + sum(phases_ns) * requests)
        self.staged_ns += staged_ns
        self.queue.add(requests, queue_ns)
        self.compute_input.add(requests, input_ns * requests)
        self.compute_infer.add(requests, infer_ns * requests)
        self.compute_output.add(requests, output_ns * requests)
        self.inference_count += batch_size

    def _add_execution(self, executed_rows: int, phases_ns: tuple[int, int, int], now_ms: int) -> None:
        self.execution_count += 1
        self.last_inference_ms = now_ms
        self.busy_ns += sum(phases_ns)
        row = self.batches.get(executed_rows)
        if row is None:
            row = self.batches[executed_rows] = [0, 0, 0, 0]
        row[0] += 1
        row[1] += phases_ns[0]
        row[2] += phases_ns[1]
        row[3] += phases_ns[2]


def _response_row(row: dict[str, Durations]) -> dict[str, list[int]]:
    return {
        name: [row[name].count, row[name].ns] if name in row else [0, 0]
        for name in ("compute_infer", "compute_output", *RESPONSE_OUTCOMES)
    }
