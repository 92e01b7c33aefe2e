"""Weir's own metrics: queues, frames and batches, hops, load, memory, payloads, processes and errors.

Metrics of models come from schedulers and workers and are the same at every gateway; `weir_gateway_*` are those of this
gateway. The hops of a successful request:
- `queue`: from its arrival at the scheduler until its batch was sent;
- `staged`: from the arrival of the batch at the worker until an instance started it;
- `compute`: input, inference and output of the batch.
What `weir_gateway_in_flight_duration_us` has beyond these three is spent on the bus: frame to scheduler, batch to worker,
responses to gateway.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import ceil

from weir.bus.naming.identity import host_of
from weir.cluster.counters.collection import Statistics
from weir.cluster.counters.version_totals import VersionTotals
from weir.gateway.admin.load_report import utilization
from weir.gateway.metrics.text import NO_LABELS, Labels, MetricFamily, Sample, counter, gauge, histogram_samples
from weir.schemas.wire.statistics import (
    ConnectionCounters,
    DispatchCounters,
    HealthCounters,
    HistogramCounters,
    LedgerCounters,
    LoadCounters,
    ProcessReading,
    QueueCounters,
)


def gateway_families(counters: DispatchCounters) -> Iterator[MetricFamily]:
    """The counters of this gateway, together with those of `weir durable` in its place."""
    yield gauge(
        "weir_gateway_in_flight", "Requests that have no last response yet", [Sample(NO_LABELS, counters.in_flight)]
    )
    yield counter(
        "weir_gateway_in_flight_duration_us",
        "Cumulative time between the publishing of requests and their last responses in microseconds",
        [Sample(NO_LABELS, counters.in_flight_us)],
    )
    yield counter("weir_gateway_requests", "Requests published by this gateway", [Sample(NO_LABELS, counters.requests)])
    yield counter(
        "weir_gateway_duplicate_responses",
        "Responses dropped because their request had its response already, or was cancelled",
        [Sample(NO_LABELS, counters.duplicate_responses)],
    )
    yield gauge(
        "weir_gateway_payload_slots",
        "Slots of shared memory that hold request bodies or tensors",
        [Sample(NO_LABELS, counters.payload_slots)],
    )
    for name, help, sizes in (
        ("weir_gateway_frame_requests", "Requests per frame", counters.frame_requests),
        ("weir_gateway_frame_bytes", "Bytes per frame", counters.frame_bytes),
    ):
        yield _histogram(name, help, [({}, sizes)])


def cluster_families(
    statistics: Statistics, totals: Iterable[VersionTotals], dispatched: DispatchCounters, served: Mapping[str, Labels]
) -> Iterator[MetricFamily]:
    """The counters of schedulers and workers. `served` are the labels of models by identity."""
    totals = list(totals)
    yield from _queue_families([q for s in statistics.schedulers() for q in s.models if q.model in served], served)
    yield _histogram(
        "weir_batch_rows",
        "Rows per executed batch",
        [({**served[t.model], "version": str(t.version)}, _rows(t)) for t in totals],
    )
    yield counter(
        "weir_hop_duration_us",
        "Cumulative time of successful requests in each hop in microseconds",
        (
            Sample({**served[t.model], "version": str(t.version), "hop": hop}, ns // 1000)
            for t in totals
            for hop, ns in _hops(t).items()
        ),
    )
    yield counter(
        "weir_malformed_messages",
        "Messages dropped because they were not in the form of their subject",
        (
            Sample({"role": role}, messages)
            for role, messages in {
                "gateway": dispatched.malformed_messages + statistics.malformed_messages,
                "scheduler": sum(source.malformed_messages for source in statistics.schedulers()),
                "worker": sum(source.malformed_messages for source in statistics.workers()),
            }.items()
        ),
    )
    yield gauge(
        "weir_worker_payload_slots",
        "Slots of shared memory that hold responses which no gateway has released yet",
        [Sample(NO_LABELS, sum(worker.payload_slots for worker in statistics.live_workers()))],
    )


def process_families(readings: Iterable[tuple[str, str, ProcessReading]]) -> Iterator[MetricFamily]:
    """CPU and memory of processes, with their roles and their names on the bus."""
    rows = sorted(
        (({"role": role, "process": name, "host": host_of(name)}, reading) for role, name, reading in readings),
        key=lambda row: (row[0]["role"], row[0]["process"]),
    )
    yield counter(
        "weir_process_cpu_seconds",
        "Processor time of a process since it started in seconds; a worker's with that of its models' processes",
        (Sample(labels, reading.cpu_s) for labels, reading in rows),
    )
    yield gauge(
        "weir_process_resident_memory_bytes",
        "Memory of a process in bytes, what it shares with others included; a worker's with that of its models' processes",
        (Sample(labels, reading.resident_bytes) for labels, reading in rows),
    )


def health_families(readings: Iterable[tuple[str, str, HealthCounters]]) -> Iterator[MetricFamily]:
    """The health of processes, with their roles and their names on the bus."""
    rows = sorted(
        (({"role": role, "process": name, "host": host_of(name)}, health) for role, name, health in readings),
        key=lambda row: (row[0]["role"], row[0]["process"]),
    )
    yield gauge(
        "weir_loop_lag_seconds",
        "Longest time in the last 10 s for which a process's event loop was blocked, in seconds",
        (Sample(labels, health.loop_lag_s) for labels, health in rows),
    )
    yield counter(
        "weir_contained_failures_total",
        "Unexpected exceptions of a process that ended one request and nothing else, by site in the code",
        (
            Sample({**labels, "site": site}, count)
            for labels, health in rows
            for site, count in sorted(health.contained_failures.items())
        ),
    )


def _queue_families(queues: list[QueueCounters], served: Mapping[str, Labels]) -> Iterator[MetricFamily]:
    depths: dict[tuple[str, str], int] = {}
    oldest_us: dict[tuple[str, str], int] = {}
    redelivered: dict[str, int] = {}
    retried: dict[str, int] = {}
    sizes: dict[str, HistogramCounters] = {}
    for queue in queues:
        for name, lane in queue.lanes.items():
            key = (queue.model, name)
            depths[key] = depths.get(key, 0) + lane.depth
            oldest_us[key] = max(oldest_us.get(key, 0), lane.oldest_us)
        redelivered[queue.model] = redelivered.get(queue.model, 0) + queue.redelivered_frames
        retried[queue.model] = retried.get(queue.model, 0) + queue.retried_batches
        summed = sizes.get(queue.model)
        sizes[queue.model] = queue.batch_requests if summed is None else _sum(summed, queue.batch_requests)
    lanes = {key: {**served[key[0]], "lane": key[1]} for key in sorted(depths)}
    yield gauge(
        "weir_queue_depth",
        "Requests that wait in the scheduler",
        (Sample(labels, depths[key]) for key, labels in lanes.items()),
    )
    yield gauge(
        "weir_queue_oldest_age_us",
        "Age of the request that has waited longest in microseconds, 0 if none waits",
        (Sample(labels, oldest_us[key]) for key, labels in lanes.items()),
    )
    yield _histogram(
        "weir_batch_requests",
        "Requests per batch sent to a worker",
        [(served[m], h) for m, h in sorted(sizes.items())],
    )
    for metric, help, counts in (
        ("weir_redelivered_frames", "Frames that the broker delivered again to a scheduler", redelivered),
        ("weir_retried_batches", "Batches that were lost, or not completed in time, and were retried", retried),
    ):
        yield counter(metric, help, (Sample(served[model], value) for model, value in sorted(counts.items())))


def _histogram(name: str, help: str, rows: Iterable[tuple[Labels, HistogramCounters]]) -> MetricFamily:
    return MetricFamily(
        name,
        help,
        "histogram",
        [s for labels, h in rows for s in histogram_samples(labels, h.bounds, h.counts, h.sum)],
    )


def _hops(totals: VersionTotals) -> dict[str, int]:
    durations = totals.durations
    compute_ns = sum(durations[phase][1] for phase in ("compute_input", "compute_infer", "compute_output"))
    return {
        "queue": max(0, durations["queue"][1] - totals.staged_ns),
        "staged": totals.staged_ns,
        "compute": compute_ns,
    }


def _rows(totals: VersionTotals) -> HistogramCounters:
    """The sizes of executed batches, by powers of two."""
    if not totals.batches:
        return HistogramCounters()
    powers = (max(1, *totals.batches) - 1).bit_length() + 1
    counts = [0] * (powers + 1)
    for size, (runs, *_) in totals.batches.items():
        counts[max(0, size - 1).bit_length()] += runs
    total = float(sum(size * runs for size, (runs, *_) in totals.batches.items()))
    return HistogramCounters(bounds=[float(1 << power) for power in range(powers)], counts=counts, sum=total)


def _sum(first: HistogramCounters, second: HistogramCounters) -> HistogramCounters:
    """The sum of two histograms by powers of two, which may have different last bounds before the overflow bucket."""
    longer, shorter = sorted((first, second), key=lambda histogram: len(histogram.bounds), reverse=True)
    counts = list(longer.counts)
    for position, count in enumerate(shorter.counts[:-1]):
        counts[position] += count
    counts[-1] += shorter.counts[-1]
    return HistogramCounters(bounds=longer.bounds, counts=counts, sum=first.sum + second.sum)


_ROUNDING = 1e-6  # the fractions that schedulers report are sums of floats


def load_families(
    queues: Iterable[QueueCounters],
    served: Mapping[str, Labels],
    workers: Mapping[str, int],
    on_gpus: Collection[str] = (),
) -> Iterator[MetricFamily]:
    """The families of load. `served` are the labels of models by identity; `workers` the number of workers of each.

    `on_gpus` are the models all of whose instances run on GPUs.
    """
    loads: dict[str, list[LoadCounters]] = {model: [] for model in sorted(served)}
    for queue in queues:
        if queue.load is not None and queue.model in loads:
            loads[queue.model].append(queue.load)
    measured = {model: of for model, of in loads.items() if of}
    yield gauge(
        "weir_queue_expected_wait_us",
        "Expected wait of a live request that arrives now, in microseconds",
        (Sample(served[model], max(load.expected_wait_us for load in of)) for model, of in measured.items()),
    )
    yield gauge(
        "weir_workers",
        "Workers that serve the model",
        (Sample(served[model], workers.get(model, 0)) for model in loads),
    )
    yield gauge(
        "weir_model_on_gpu",
        "Whether all instances of the model run on GPUs",
        (Sample(served[model], int(model in on_gpus)) for model in loads),
    )
    yield gauge(
        "weir_instances",
        "Instances of the model that take batches",
        (Sample(served[model], sum(load.instances for load in of)) for model, of in measured.items()),
    )
    yield gauge(
        "weir_worker_utilization",
        "Share of the time in which the model's instances were busy [0.0 - 1.0]",
        (Sample(served[model], utilization(of)) for model, of in measured.items()),
    )
    yield gauge(
        "weir_cluster_utilization",
        "Share of the time in which instances were busy [0.0 - 1.0]",
        [Sample(NO_LABELS, utilization([load for of in measured.values() for load in of]))],
    )
    yield gauge(
        "weir_desired_workers",
        "Workers that the model should have for its load",
        (
            Sample(served[model], max(0, ceil(sum(load.desired_workers for load in of) - _ROUNDING)))
            for model, of in measured.items()
        ),
    )
    yield counter(
        "weir_refused_requests",
        "Requests that a scheduler refused because too many waited in its queue",
        (
            Sample({**served[model], "reason": reason}, sum(load.refused.get(reason, 0) for load in of))
            for model, of in measured.items()
            for reason in ("queue", "wait")
        ),
    )


def refusal_family(dispatched: DispatchCounters, ledger: LedgerCounters) -> MetricFamily:
    """The requests that this gateway rejected itself."""
    refused = {"received": sum(ledger.refused.values()), **dispatched.rejected}
    return counter(
        "weir_gateway_refused_requests",
        "Requests that this gateway refused: it, the broker or their queue held too many, or a limit was used up",
        (Sample({"reason": reason}, requests) for reason, requests in refused.items()),
    )


def access_log_family(dropped: int) -> MetricFamily:
    """The lines that the access log of this gateway lacks."""
    return counter(
        "weir_access_log_dropped_lines",
        "Lines that the access log of this gateway lacks: too many waited, or its file could not be written",
        [Sample(NO_LABELS, dropped)],
    )


def memory_families(ledger: LedgerCounters) -> Iterator[MetricFamily]:
    """The memory ledger of this gateway, together with that of `weir durable` in its place."""
    yield gauge(
        "weir_memory_ledger_bytes",
        "Memory that holds what clients have sent, or have not read yet, in bytes",
        (Sample({"kind": kind}, held_bytes) for kind, held_bytes in sorted(ledger.held_bytes.items())),
    )
    yield gauge(
        "weir_memory_ledger_peak_bytes",
        "The most that the memory ledger has held at once in bytes",
        [Sample(NO_LABELS, ledger.peak_bytes)],
    )
    yield gauge(
        "weir_memory_ledger_limit_bytes",
        "The most that the memory ledger may hold in bytes",
        [Sample(NO_LABELS, ledger.limit_bytes)],
    )
    yield counter(
        "weir_memory_ledger_refusals",
        "Requests, messages and responses for which the memory ledger had no room",
        (Sample({"kind": kind}, refusals) for kind, refusals in sorted(ledger.refused.items())),
    )


def connection_families(connections: ConnectionCounters) -> Iterator[MetricFamily]:
    """The connections of clients to this gateway, over all of its ports."""
    yield gauge("weir_gateway_connections", "Open connections of clients", [Sample(NO_LABELS, connections.open)])
    yield gauge(
        "weir_gateway_connections_limit",
        "The most connections that clients may have open",
        [Sample(NO_LABELS, connections.limit)],
    )
    yield counter(
        "weir_gateway_ended_connections",
        "Connections that this gateway ended because they were silent or displaced by new ones, or that it rejected",
        (Sample({"reason": reason}, ended) for reason, ended in sorted(connections.ended.items())),
    )


_WAYS = ("tcp",)


def payload_families(statistics: Statistics, dispatched: DispatchCounters) -> Iterator[MetricFamily]:
    """The families of fetched payloads."""
    of_workers = [worker.payload_bytes for worker in statistics.workers()]
    for role, fetched in (("gateway", [dispatched.fetched_bytes]), ("worker", of_workers)):
        yield counter(
            f"weir_{role}_payload_fetched_bytes",
            f"Bytes of tensors that a {role} fetched from other hosts",
            [Sample({"way": way}, sum(ways.get(way, 0) for ways in fetched)) for way in _WAYS],
        )
    refused = sum(worker.payload_readers_refused for worker in statistics.workers())
    for role, count in (("gateway", dispatched.refused_readers), ("worker", refused)):
        yield counter(
            f"weir_{role}_payload_readers_refused",
            f"Connections for tensors to a {role} that were refused, or did not prove in time that they may read",
            [Sample(NO_LABELS, count)],
        )
