"""Weir's own metrics: queues, frames and batches, hops, and what went wrong on the way.

Those of models come from schedulers and workers and are the same at every gateway; `weir_gateway_*` are this gateway's.
How hops are measured:
- `queue`: from when the scheduler took the request in until its batch was sent;
- `staged`: from when the batch came to its worker until its instance began it;
- `compute`: input, inference and output of the batch;
- all three for each request that succeeded. What `weir_gateway_in_flight_duration_us` has beyond them is spent on the bus:
  frame to scheduler, batch to worker, answers to gateway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from bus.identity import host_of
from calls.inference import Inference
from calls.payload_store import PayloadStore
from gateway.metrics.text import NO_LABELS, Family, Labels, Sample, counter, gauge, histogram_samples
from gateway.statistics import Statistics
from gateway.version_totals import VersionTotals
from schemas.statistics import HealthCounters, HistogramCounters, ProcessReading, QueueCounters


def gateway_families(inference: Inference, payloads: PayloadStore) -> Iterator[Family]:
    """What this gateway counts itself."""
    counters = inference.counters
    yield gauge("weir_gateway_in_flight", "Requests without an answer yet", [Sample(NO_LABELS, inference.in_flight)])
    yield counter(
        "weir_gateway_in_flight_duration_us",
        "Cumulative time between the publishing of requests and their answers in microseconds",
        [Sample(NO_LABELS, counters.in_flight_us)],
    )
    yield counter("weir_gateway_requests", "Requests published by this gateway", [Sample(NO_LABELS, counters.last_key)])
    yield counter(
        "weir_gateway_duplicate_answers",
        "Answers dropped because their request had one already, or was abandoned",
        [Sample(NO_LABELS, inference.duplicate_answers)],
    )
    yield gauge(
        "weir_gateway_payload_slots",
        "Slots of shared memory that hold request bodies or tensors",
        [Sample(NO_LABELS, payloads.slots_in_use)],
    )
    for name, help, sizes in (
        ("weir_gateway_frame_requests", "Requests per frame", counters.frame_requests),
        ("weir_gateway_frame_bytes", "Bytes per frame", counters.frame_bytes),
    ):
        yield _histogram(name, help, [({}, HistogramCounters(**sizes.snapshot()))])


def cluster_families(
    statistics: Statistics, totals: Iterable[VersionTotals], inference: Inference, served: Mapping[str, Labels]
) -> Iterator[Family]:
    """What schedulers and workers count, for the models that are `served`: their labels by identity."""
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
        "Messages dropped because they were not what their subject carries",
        (
            Sample({"role": role}, messages)
            for role, messages in {
                "gateway": inference.malformed_messages + statistics.malformed_messages,
                "scheduler": sum(known.malformed_messages for known in statistics.schedulers()),
                "worker": sum(known.malformed_messages for known in statistics.workers()),
            }.items()
        ),
    )
    yield gauge(
        "weir_worker_payload_slots",
        "Slots of shared memory that hold answers which no gateway has given back yet",
        [Sample(NO_LABELS, sum(known.payload_slots for known in statistics.live_workers()))],
    )


def process_families(readings: Iterable[tuple[str, str, ProcessReading]]) -> Iterator[Family]:
    """What processes take of their hosts, each with its role and its name on the bus."""
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


def health_families(readings: Iterable[tuple[str, str, HealthCounters]]) -> Iterator[Family]:
    """The condition of processes, each with its role and its name on the bus."""
    rows = sorted(
        (({"role": role, "process": name, "host": host_of(name)}, health) for role, name, health in readings),
        key=lambda row: (row[0]["role"], row[0]["process"]),
    )
    yield gauge(
        "weir_loop_lag_seconds",
        "Longest time in the last 10 s for which a process's event loop served nobody, in seconds",
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


def _queue_families(queues: list[QueueCounters], served: Mapping[str, Labels]) -> Iterator[Family]:
    depths: dict[tuple[str, str], int] = {}
    oldest_us: dict[tuple[str, str], int] = {}
    redelivered: dict[str, int] = {}
    redone: dict[str, int] = {}
    sizes: dict[str, HistogramCounters] = {}
    for queue in queues:
        for name, lane in queue.lanes.items():
            key = (queue.model, name)
            depths[key] = depths.get(key, 0) + lane.depth
            oldest_us[key] = max(oldest_us.get(key, 0), lane.oldest_us)
        redelivered[queue.model] = redelivered.get(queue.model, 0) + queue.redelivered_frames
        redone[queue.model] = redone.get(queue.model, 0) + queue.redone_batches
        known = sizes.get(queue.model)
        sizes[queue.model] = queue.batch_requests if known is None else _sum(known, queue.batch_requests)
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
        ("weir_redone_batches", "Batches that were lost or not answered, and done again", redone),
    ):
        yield counter(metric, help, (Sample(served[model], value) for model, value in sorted(counts.items())))


def _histogram(name: str, help: str, rows: Iterable[tuple[Labels, HistogramCounters]]) -> Family:
    return Family(
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
    """Of two histograms by powers of two, which may end at different ones; the last bucket of each is what is above all."""
    longer, shorter = sorted((first, second), key=lambda histogram: len(histogram.bounds), reverse=True)
    counts = list(longer.counts)
    for position, count in enumerate(shorter.counts[:-1]):
        counts[position] += count
    counts[-1] += shorter.counts[-1]
    return HistogramCounters(bounds=longer.bounds, counts=counts, sum=first.sum + second.sum)
