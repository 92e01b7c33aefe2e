"""`LatencyObserver`: how durations of requests are distributed, for the metrics that are off unless asked for.

Source: Triton's metrics `nv_inference_first_response_histogram_ms` and `nv_inference_*_summary_us`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from schemas.model_config import ModelConfig
from telemetry.histogram import BoundedHistogram
from telemetry.metrics_config import MetricsConfig
from telemetry.quantiles import RecentDurations

FIRST_RESPONSE_FAMILY = "nv_inference_first_response_histogram_ms"
FIRST_RESPONSE_BOUNDS_MS = (100.0, 500.0, 2000.0, 5000.0)

_PHASES = ("compute_input", "compute_infer", "compute_output")


class LatencyObserver:
    """Of one version on one worker; thread-safe. `bounds_ms` None: no histogram."""

    def __init__(self, bounds_ms: Iterable[float] | None, has_summaries: bool) -> None:
        self._lock = threading.Lock()
        self._first_response = None if bounds_ms is None else BoundedHistogram(sorted(bounds_ms))
        self._summaries = {name: RecentDurations() for name in ("request", "queue", *_PHASES)} if has_summaries else {}

    def observe(self, queues_ns: Iterable[int], phases_ns: tuple[int, int, int]) -> None:
        """A batch was answered: the queue time of each of its requests, and the phases of its run."""
        phases_us = [ns // 1000 for ns in phases_ns]
        busy_us = sum(phases_ns) // 1000
        with self._lock:
            requests = 0
            for queue_ns in queues_ns:
                requests += 1
                queue_us = queue_ns // 1000
                if self._first_response is not None:
                    self._first_response.add((queue_us + busy_us) / 1000)
                if self._summaries:
                    self._summaries["queue"].add(queue_us)
                    self._summaries["request"].add(queue_us + busy_us)
            if self._summaries and requests:
                for name, phase_us in zip(_PHASES, phases_us, strict=True):
                    self._summaries[name].add(phase_us, requests)

    def snapshot(self) -> dict[str, Any]:
        """The fields of `schemas.statistics.VersionCounters` that are told here."""
        with self._lock:
            told: dict[str, Any] = {name: summary.snapshot() for name, summary in self._summaries.items()}
            first = None if self._first_response is None else self._first_response.snapshot()
        return {"summaries": told, "first_response_ms": first}


def observer_for(config: ModelConfig, metrics: MetricsConfig) -> LatencyObserver | None:
    """The observer of a model's version; None where nobody asks for what it observes.

    Buckets are those of the model's `model_metrics`, where it names the histogram.
    """
    if not (metrics.histogram_latencies or metrics.summary_latencies):
        return None
    bounds_ms: Iterable[float] = FIRST_RESPONSE_BOUNDS_MS
    for control in config.model_metrics.metric_control if config.model_metrics else ():
        identifier, options = control.metric_identifier, control.histogram_options
        if identifier is not None and identifier.family == FIRST_RESPONSE_FAMILY and options is not None:
            bounds_ms = options.buckets or bounds_ms
    return LatencyObserver(bounds_ms if metrics.histogram_latencies else None, metrics.summary_latencies)
