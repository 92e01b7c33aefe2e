"""The metrics endpoint: Triton's counters, summed over all workers, and this gateway's own.

Workers count; the gateway asks all of them when it is scraped, so that a request that was answered is in the next scrape.
A counter never goes back: what a worker that has gone had counted stays in the sum.
Source: Triton's metrics (names, labels, meaning).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgpack
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from bus import subjects
from bus.connection import Bus, Message
from bus.registry import RegistryView
from gateway.inference import Inference

logger = logging.getLogger("weir.gateway")

ANSWER_TIMEOUT_S = 0.5

_COUNTERS = {
    "nv_inference_request_success": (
        "Number of successful inference requests, all batch sizes",
        lambda row: row["success"][0],
    ),
    "nv_inference_count": (
        "Number of inferences performed (does not include cached requests)",
        lambda row: row["inference_count"],
    ),
    "nv_inference_exec_count": (
        "Number of model executions performed (does not include cached requests)",
        lambda row: row["execution_count"],
    ),
    "nv_inference_request_duration_us": (
        "Cumulative inference request duration in microseconds (includes cached requests)",
        lambda row: row["success"][1] // 1000,
    ),
    "nv_inference_queue_duration_us": (
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        lambda row: row["queue"][1] // 1000,
    ),
    "nv_inference_compute_input_duration_us": (
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda row: row["compute_input"][1] // 1000,
    ),
    "nv_inference_compute_infer_duration_us": (
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda row: row["compute_infer"][1] // 1000,
    ),
    "nv_inference_compute_output_duration_us": (
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        lambda row: row["compute_output"][1] // 1000,
    ),
}
"""Triton's counters of one model version: help text, and the value in what a worker tells of it."""

_TOTAL = re.compile(rb"^(# (?:HELP|TYPE) nv_\w+?)_total\b", re.MULTILINE)
_FAILURES = "nv_inference_request_failure"
_LABELS = ["model", "version"]


class Metrics:
    """Gathers and renders; `render` is the body of a scrape."""

    def __init__(self, bus: Bus, gateway_id: str, registry: RegistryView, inference: Inference) -> None:
        self._bus = bus
        self._subject = f"statistics.{gateway_id}"
        self._registry = registry
        self._inference = inference
        self._by_worker: dict[str, list[dict[str, Any]]] = {}
        self._answered: set[str] = set()
        self._complete = asyncio.Event()
        self._scrape = asyncio.Lock()
        self._prometheus = CollectorRegistry()
        self._prometheus.register(self)

    async def start(self) -> None:
        """Listens for workers' counters."""
        await self._bus.subscribe(self._subject, self._on_statistics)

    async def render(self) -> bytes:
        """All metrics in Prometheus's text format, after asking every live worker."""
        async with self._scrape:
            self._answered.clear()
            self._complete.clear()
            self._bus.publish(subjects.STATISTICS_QUERY, b"", self._subject)
            if self._registry.workers:
                try:
                    await asyncio.wait_for(self._complete.wait(), ANSWER_TIMEOUT_S)
                except TimeoutError:
                    logger.warning("not every worker told its counters in time: the last known ones are used")
        # The library names counters with `_total` in HELP and TYPE; Triton's names, which the samples have, lack it.
        return _TOTAL.sub(rb"\1", generate_latest(self._prometheus))

    def _on_statistics(self, message: Message) -> None:
        try:
            answer = msgpack.unpackb(message.data, strict_map_key=False)
            # Only of workers that the registry knows: anybody may publish here.
            if answer["worker"] in self._registry.workers:
                self._by_worker[answer["worker"]] = answer["models"]
                self._answered.add(answer["worker"])
        except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            logger.warning("dropped a message that holds no counters: %s", error)
        if self._answered >= self._registry.workers.keys():
            self._complete.set()

    def collect(self) -> Iterator[Metric]:
        """For prometheus_client: one family after another."""
        rows = [row for rows in self._by_worker.values() for row in rows]
        for name, (text, value_of) in _COUNTERS.items():
            totals: Counter[tuple[str, ...]] = Counter()
            for row in rows:
                totals[row["model"], str(row["version"])] += value_of(row)
            yield _family(name, text, _LABELS, totals)
        failures: Counter[tuple[str, ...]] = Counter()
        for row in rows:
            for reason, value in row["failures"].items():
                failures[row["model"], str(row["version"]), reason] += value
        yield _family(_FAILURES, "Number of failed inference requests, all batch sizes", [*_LABELS, "reason"], failures)
        yield GaugeMetricFamily("weir_gateway_in_flight", "Requests without an answer yet", self._inference.in_flight)
        yield GaugeMetricFamily(
            "weir_gateway_duplicate_answers",
            "Answers dropped because their request had one already, or was abandoned",
            self._inference.duplicate_answers,
        )


def _family(name: str, text: str, labels: list[str], values: Counter[tuple[str, ...]]) -> Metric:
    # Not a CounterMetricFamily: the exposition would add `_total` to its names, which Triton's don't have.
    family = Metric(name, text, "counter")
    for key, value in values.items():
        family.add_sample(name, dict(zip(labels, key, strict=True)), value)
    return family
