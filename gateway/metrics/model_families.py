"""Triton's metrics of models.

Source: Triton's metrics (names, labels, help texts, meaning), and the page of a running Triton 2.51.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from gateway.metrics.text import Family, Labels, Sample, counter, gauge, histogram_samples
from gateway.version_totals import VersionTotals
from schemas.model_identity import plain_name
from schemas.statistics import FAILURE_REASONS
from telemetry.metrics_config import MetricsConfig

_COUNTERS: dict[str, tuple[str, Callable[[VersionTotals], int]]] = {
    "nv_inference_count": (
        "Number of inferences performed (does not include cached requests)",
        lambda totals: totals.inference_count,
    ),
    "nv_inference_exec_count": (
        "Number of model executions performed (does not include cached requests)",
        lambda totals: totals.execution_count,
    ),
}

_DURATIONS = {
    "request": ("success", "Cumulative inference request duration in microseconds (includes cached requests)"),
    "queue": ("queue", "Cumulative inference queuing duration in microseconds (includes cached requests)"),
    "compute_input": (
        "compute_input",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
    ),
    "compute_infer": (
        "compute_infer",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
    ),
    "compute_output": (
        "compute_output",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
    ),
}
"""By what stands in the metric's name: the duration in the statistics, and the help text."""

_SUMMARY_HELP = {
    "request": "Summary of inference request duration in microseconds (includes cached requests)",
    "queue": "Summary of inference queuing duration in microseconds (includes cached requests)",
    **{name: text for name, (_, text) in _DURATIONS.items() if name.startswith("compute")},
}

_CACHE_COUNTERS: dict[str, tuple[str, Callable[[VersionTotals], int]]] = {
    "nv_cache_num_hits_per_model": ("Number of cache hits per model", lambda totals: totals.durations["cache_hit"][0]),
    "nv_cache_num_misses_per_model": (
        "Number of cache misses per model",
        lambda totals: totals.durations["cache_miss"][0],
    ),
    "nv_cache_hit_duration_per_model": (
        "Total cache hit duration per model, in microseconds",
        lambda totals: totals.durations["cache_hit"][1] // 1000,
    ),
    "nv_cache_miss_duration_per_model": (
        "Total cache miss duration per model, in microseconds",
        lambda totals: totals.durations["cache_miss"][1] // 1000,
    ),
}

_NO_LABEL = re.compile(r"[^A-Za-z0-9_]")


class ServedVersion(NamedTuple):
    """A version as its metrics are labelled: sums, metric tags, how long it took to load, and whether it caches.

    `namespace` is that of its model, "" without namespacing.
    """

    totals: VersionTotals
    tags: Mapping[str, str]
    load_duration_s: float
    has_cache: bool
    namespace: str = ""

    @property
    def labels(self) -> dict[str, str]:
        """Triton's labels, in the order in which it writes them; what can't be in a label's name becomes `_`."""
        tags = {f"_{_NO_LABEL.sub('_', tag)}": value for tag, value in self.tags.items()}
        model = model_labels(self.totals.model, self.namespace)
        return {**dict(sorted(tags.items())), **model, "version": str(self.totals.version)}


def model_labels(identity: str, namespace: str) -> dict[str, str]:
    """The labels that say which model a series is of; `namespace` "" without namespacing."""
    return {"model": plain_name(identity), **({"namespace": namespace} if namespace else {})}


def model_families(versions: Iterable[ServedVersion], config: MetricsConfig) -> Iterator[Family]:
    """The families that `config` asks for, with a series for each version."""
    rows = [(version.labels, version) for version in versions]
    # As in Triton: with the counters of latencies off, the other counters of models stand still too.
    is_counting = int(config.counter_latencies)

    def counted(name: str, help: str, value_of: Callable[[VersionTotals], int]) -> Family:
        return counter(name, help, (Sample(labels, value_of(row.totals) * is_counting) for labels, row in rows))

    yield counted(
        "nv_inference_request_success",
        "Number of successful inference requests, all batch sizes",
        lambda totals: totals.durations["success"][0],
    )
    yield counter(
        "nv_inference_request_failure",
        "Number of failed inference requests, all batch sizes",
        (
            Sample(_with_reason(labels, reason), row.totals.failures[reason] * is_counting)
            for labels, row in rows
            for reason in FAILURE_REASONS
        ),
    )
    for name, (help, value_of) in _COUNTERS.items():
        yield counted(name, help, value_of)
    if config.counter_latencies:
        for name, (duration, help) in _DURATIONS.items():
            yield counted(
                f"nv_inference_{name}_duration_us",
                help,
                lambda totals, duration=duration: totals.durations[duration][1] // 1000,  # type: ignore[misc]
            )
    yield gauge(
        "nv_inference_pending_request_count",
        "Instantaneous number of pending requests awaiting execution per-model.",
        (Sample(labels, row.totals.pending) for labels, row in rows),
    )
    yield gauge(
        "nv_model_load_duration_secs",
        "Model load time in seconds",
        (Sample(labels, row.load_duration_s) for labels, row in rows),
    )
    # As in Triton, families that have no meaning for any model that is loaded have no lines either.
    cached = [(labels, row) for labels, row in rows if row.has_cache]
    for name, (help, value_of) in _CACHE_COUNTERS.items() if cached else ():
        yield counter(name, help, (Sample(labels, value_of(row.totals) * is_counting) for labels, row in cached))
    observed = [_first_responses(rows)] if config.histogram_latencies else []
    if config.summary_latencies:
        observed += _summaries(rows, config.quantiles)
    yield from (family for family in observed if family.samples)


def _with_reason(labels: Mapping[str, str], reason: str) -> dict[str, str]:
    version = labels["version"]
    return {
        **{name: value for name, value in labels.items() if name != "version"},
        "reason": reason,
        "version": version,
    }


def _first_responses(rows: list[tuple[dict[str, str], ServedVersion]]) -> Family:
    samples: list[Sample] = []
    for labels, row in rows:
        observed = row.totals.first_response_ms
        if observed is not None:
            samples += histogram_samples(labels, observed.bounds, observed.counts, observed.sum)
    help = "Duration from request to first response in milliseconds"
    return Family("nv_inference_first_response_histogram_ms", help, "histogram", samples)


def _summaries(rows: list[tuple[dict[str, str], ServedVersion]], quantiles: Iterable[float]) -> Iterator[Family]:
    names = {name: (f"nv_inference_{name}_summary_us", help) for name, help in _SUMMARY_HELP.items()}
    for name, (metric, help) in names.items():
        # A model that caches has none of whole requests: hits would hide how long the others take.
        of = [(labels, row) for labels, row in rows if not (name == "request" and row.has_cache)]
        yield Family(metric, help, "summary", [s for labels, row in of for s in _summary(labels, row, name, quantiles)])
    cached = [(labels, row) for labels, row in rows if row.has_cache]
    for name in ("cache_hit", "cache_miss"):
        samples = [s for labels, row in cached for s in _summary(labels, row, name, quantiles)]
        help = f"Summary of cache {name.removeprefix('cache_')} duration per model, in microseconds"
        yield Family(f"nv_{name}_summary_per_model", help, "summary", samples)


def _summary(labels: Labels, row: ServedVersion, name: str, quantiles: Iterable[float]) -> Iterator[Sample]:
    summary = row.totals.summaries[name]
    yield Sample(labels, summary.count, "_count")
    yield Sample(labels, summary.sum_us, "_sum")
    for quantile in quantiles:
        value = summary.sketch.quantile(quantile)
        yield Sample({**labels, "quantile": repr(quantile)}, value if value != value else round(value))
