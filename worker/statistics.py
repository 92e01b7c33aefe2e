"""Counters of one model version on one worker, by Triton's counting rules.

Source: Triton's statistics extension and metrics. A request counts once in `success` or `failures`; `inference_count`
adds its batch size; durations of a batch are attributed to each of its requests, `batches` holds them once per run.
A Python model's error response counts as a success, as in Triton.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

FAILURE_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
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
    """Thread-safe: instances of a version record, the event loop takes snapshots."""

    success: Durations = field(default_factory=Durations)
    fail: Durations = field(default_factory=Durations)
    queue: Durations = field(default_factory=Durations)
    compute_input: Durations = field(default_factory=Durations)
    compute_infer: Durations = field(default_factory=Durations)
    compute_output: Durations = field(default_factory=Durations)
    inference_count: int = 0
    execution_count: int = 0
    last_inference_ms: int = 0
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAILURE_REASONS, 0))
    batches: dict[int, list[int]] = field(default_factory=dict)
    responses: dict[int, dict[str, Durations]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record_batch(
        self, requests: int, batch_size: int, queue_ns: int, phases_ns: tuple[int, int, int], now_ms: int
    ) -> None:
        """A batch of `requests` requests and `batch_size` rows ran; `queue_ns` summed over requests."""
        with self._lock:
            self._add_requests(requests, batch_size, queue_ns, phases_ns, now_ms)
            self._add_execution(batch_size, phases_ns)

    def record_requests(
        self, requests: int, batch_size: int, queue_ns: int, phases_ns: tuple[int, int, int], now_ms: int
    ) -> None:
        """As `record_batch`, for requests that end before or after the run of their batch (`record_execution`)."""
        with self._lock:
            self._add_requests(requests, batch_size, queue_ns, phases_ns, now_ms)

    def record_execution(self, batch_size: int, phases_ns: tuple[int, int, int]) -> None:
        """A batch of `batch_size` rows ran."""
        with self._lock:
            self._add_execution(batch_size, phases_ns)

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

    def snapshot(self) -> dict[str, Any]:
        """All counters as plain values, for a bus message."""
        with self._lock:
            return {
                "success": [self.success.count, self.success.ns],
                "fail": [self.fail.count, self.fail.ns],
                "queue": [self.queue.count, self.queue.ns],
                "compute_input": [self.compute_input.count, self.compute_input.ns],
                "compute_infer": [self.compute_infer.count, self.compute_infer.ns],
                "compute_output": [self.compute_output.count, self.compute_output.ns],
                "inference_count": self.inference_count,
                "execution_count": self.execution_count,
                "last_inference_ms": self.last_inference_ms,
                "failures": dict(self.failures),
                "batches": {size: list(row) for size, row in self.batches.items()},
                "responses": {index: _response_row(row) for index, row in self.responses.items()},
            }

    def _add_requests(
        self, requests: int, batch_size: int, queue_ns: int, phases_ns: tuple[int, int, int], now_ms: int
    ) -> None:
        input_ns, infer_ns, output_ns = phases_ns
        self.success.add(requests, queue_ns + sum(phases_ns) * requests)
        self.queue.add(requests, queue_ns)
        self.compute_input.add(requests, input_ns * requests)
        self.compute_infer.add(requests, infer_ns * requests)
        self.compute_output.add(requests, output_ns * requests)
        self.inference_count += batch_size
        self.last_inference_ms = now_ms

    def _add_execution(self, batch_size: int, phases_ns: tuple[int, int, int]) -> None:
        self.execution_count += 1
        row = self.batches.setdefault(batch_size, [0, 0, 0, 0])
        for position, value in enumerate((1, *phases_ns)):
            row[position] += value


def _response_row(row: dict[str, Durations]) -> dict[str, list[int]]:
    return {
        name: [row[name].count, row[name].ns] if name in row else [0, 0]
        for name in ("compute_infer", "compute_output", *RESPONSE_OUTCOMES)
    }
