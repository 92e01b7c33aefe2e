"""Triton's metrics of models, hosts and GPUs.

With workers on several hosts, memory is the sum and utilization the mean; GPUs have their UUIDs as labels. Pinned memory is
the sum over workers, each of which has its own pool.
Source: Triton's metrics (names, labels, help texts, meaning), and the page of a running Triton 2.51.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from weir.cluster.counters.version_totals import VersionTotals
from weir.gateway.metrics.text import NO_LABELS, Labels, MetricFamily, Sample, counter, gauge, histogram_samples
from weir.schemas.core.names import plain_name
from weir.schemas.wire.statistics import FAILURE_REASONS, GpuReading, HostReading, WorkerCounters
from weir.telemetry.metrics_config import MetricsConfig

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
"""By the part in the metric's name: the duration in the statistics, and the help text."""

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
    """A served version and its labels: sums, metric tags, load duration, and whether it uses the response cache.

    `namespace` is the namespace of its model, "" without namespacing.
    """

    totals: VersionTotals
    tags: Mapping[str, str]
    load_duration_s: float
    has_cache: bool
    namespace: str = ""

    @property
    def labels(self) -> dict[str, str]:
        """Triton's labels, in its order; characters that are not allowed in the name of a label become `_`."""
        tags = {f"_{_NO_LABEL.sub('_', tag)}": value for tag, value in self.tags.items()}
        model = model_labels(self.totals.model, self.namespace)
        return {**dict(sorted(tags.items())), **model, "version": str(self.totals.version)}


def model_labels(identity: str, namespace: str) -> dict[str, str]:
    """The labels that identify the model of a series; `namespace` "" without namespacing."""
    return {"model": plain_name(identity), **({"namespace": namespace} if namespace else {})}


def model_families(versions: Iterable[ServedVersion], config: MetricsConfig) -> Iterator[MetricFamily]:
    """The families that `config` asks for, with a series for each version."""
    rows = [(version.labels, version) for version in versions]
    # As in Triton: without the counters of latencies, the other counters of models are not increased either.
    is_counting = int(config.counter_latencies)

    def counted(name: str, help: str, value_of: Callable[[VersionTotals], int]) -> MetricFamily:
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
    # As in Triton, families that apply to none of the loaded models are left out.
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


def _first_responses(rows: list[tuple[dict[str, str], ServedVersion]]) -> MetricFamily:
    samples: list[Sample] = []
    for labels, row in rows:
        observed = row.totals.first_response_ms
        if observed is not None:
            samples += histogram_samples(labels, observed.bounds, observed.counts, observed.sum)
    help = "Duration from request to first response in milliseconds"
    return MetricFamily("nv_inference_first_response_histogram_ms", help, "histogram", samples)


def _summaries(rows: list[tuple[dict[str, str], ServedVersion]], quantiles: Iterable[float]) -> Iterator[MetricFamily]:
    names = {name: (f"nv_inference_{name}_summary_us", help) for name, help in _SUMMARY_HELP.items()}
    for name, (metric, help) in names.items():
        # A model with a response cache has no summary of requests: hits would hide the latency of the others.
        of = [(labels, row) for labels, row in rows if not (name == "request" and row.has_cache)]
        yield MetricFamily(
            metric, help, "summary", [s for labels, row in of for s in _summary(labels, row, name, quantiles)]
        )
    cached = [(labels, row) for labels, row in rows if row.has_cache]
    for name in ("cache_hit", "cache_miss"):
        samples = [s for labels, row in cached for s in _summary(labels, row, name, quantiles)]
        help = f"Summary of cache {name.removeprefix('cache_')} duration per model, in microseconds"
        yield MetricFamily(f"nv_{name}_summary_per_model", help, "summary", samples)


def _summary(labels: Labels, row: ServedVersion, name: str, quantiles: Iterable[float]) -> Iterator[Sample]:
    summary = row.totals.summaries[name]
    yield Sample(labels, summary.count, "_count")
    yield Sample(labels, summary.sum_us, "_sum")
    for quantile in quantiles:
        value = summary.sketch.quantile(quantile)
        yield Sample({**labels, "quantile": repr(quantile)}, value if value != value else round(value))


_GPU_GAUGES = {
    "nv_gpu_utilization": ("GPU utilization rate [0.0 - 1.0)", "utilization"),
    "nv_gpu_memory_total_bytes": ("GPU total memory, in bytes", "memory_total_bytes"),
    "nv_gpu_memory_used_bytes": ("GPU used memory, in bytes", "memory_used_bytes"),
    "nv_gpu_power_usage": ("GPU power usage in watts", "power_usage_w"),
    "nv_gpu_power_limit": ("GPU power management limit in watts", "power_limit_w"),
}
_ENERGY = ("nv_energy_consumption", "GPU energy consumption in joules since the Triton Server started")


def device_families(workers: Iterable[WorkerCounters]) -> Iterator[MetricFamily]:
    """The families of hosts and GPUs, from the reports of live workers."""
    hosts: dict[str, HostReading] = {}
    gpus: dict[str, GpuReading] = {}
    pinned_total_bytes = pinned_used_bytes = 0
    for worker in workers:
        pinned_total_bytes += worker.pinned_total_bytes
        pinned_used_bytes += worker.pinned_used_bytes
        if worker.host is not None:
            hosts[worker.host.host] = worker.host
        for uuid, reading in worker.gpus.items():
            # Several workers may report the same GPU: the one that has run longest has counted the most energy.
            known = gpus.get(uuid)
            if known is None or (known.energy_j or 0) < (reading.energy_j or 0):
                gpus[uuid] = reading
    yield from _host_families(list(hosts.values()))
    for name, (help, field) in _GPU_GAUGES.items():
        yield gauge(name, help, _of_gpus(gpus, field))
    yield counter(*_ENERGY, _of_gpus(gpus, "energy_j"))
    for name, help, value in (
        ("nv_pinned_memory_pool_total_bytes", "Pinned memory pool total memory size, in bytes", pinned_total_bytes),
        ("nv_pinned_memory_pool_used_bytes", "Pinned memory pool used memory size, in bytes", pinned_used_bytes),
    ):
        yield gauge(name, help, [Sample(NO_LABELS, value)])


def _of_gpus(gpus: Mapping[str, GpuReading], field: str) -> Iterator[Sample]:
    for uuid, reading in sorted(gpus.items()):
        value = getattr(reading, field)
        if value is not None:
            yield Sample({"gpu_uuid": uuid}, value)


def _host_families(hosts: list[HostReading]) -> Iterator[MetricFamily]:
    has_hosts = bool(hosts)
    utilization = sum(host.utilization for host in hosts) / max(1, len(hosts))
    total_bytes = sum(host.memory_total_bytes for host in hosts)
    used_bytes = sum(host.memory_used_bytes for host in hosts)
    for name, help, value in (
        ("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", utilization),
        ("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", total_bytes),
        ("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", used_bytes),
    ):
        yield gauge(name, help, [Sample(NO_LABELS, value)] if has_hosts else [])
