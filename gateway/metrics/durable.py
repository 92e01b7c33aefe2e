"""Metrics of durable requests: those of this gateway, and those in the broker for all gateways.

`weir.durable.api.metrics` bounds the labels with names of models. `weir_durable_waiting`, `weir_durable_in_flight`,
`weir_durable_dead_letters` and those of streams come from the broker and are the same at every gateway; the others count
the work of this gateway, and may be summed over gateways.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

from weir.durable.api.store import DurableStore
from weir.gateway.metrics.text import NO_LABELS, MetricFamily, Sample, counter, gauge
from weir.schemas.wire.statistics import ConsumerCounters


def durable_families(durable: DurableStore, consumed: ConsumerCounters) -> Iterator[MetricFamily]:
    """The families of durable requests. `consumed` counts the work of this gateway, or of `weir durable` in its place."""
    counters, backlog = durable.counters, durable.backlog
    now_s = time.time()
    yield counter(
        "weir_durable_accepted",
        "Durable requests that this gateway has taken from their queue, each once",
        _rows(consumed.accepted, "lane"),
    )
    yield counter(
        "weir_durable_ended",
        "Durable requests that have ended at this gateway, each once",
        _rows(consumed.ended, "outcome"),
    )
    for name, help, counts in (
        ("weir_durable_retries", "Attempts at durable requests after one that failed", consumed.retries),
        ("weir_durable_redelivered", "Durable requests that the broker delivered again", consumed.redelivered),
        ("weir_durable_conflicts", "Durable requests whose id had a terminal record already", consumed.conflicts),
    ):
        yield counter(name, help, [Sample({"model": model}, count) for model, count in sorted(counts.items())])
    yield counter(
        "weir_durable_malformed",
        "Messages to the durable queues that were no requests",
        [Sample(NO_LABELS, consumed.malformed)],
    )
    yield gauge(
        "weir_durable_waiting",
        "Durable requests that wait in their queue",
        _samples(counters.waiting, "lane"),
    )
    yield gauge(
        "weir_durable_in_flight",
        "Durable requests that a gateway has taken from their queue and that have not ended",
        _samples(counters.in_flight, "lane"),
    )
    yield gauge(
        "weir_durable_oldest_age_seconds",
        "Age of the oldest durable request of a model whose queue this gateway owns, in seconds, 0 if there is none",
        [
            Sample({"model": model, "lane": lane}, max(0.0, now_s - ms / 1000) if ms else 0)
            for model, lane, ms in sorted(consumed.oldest_ms)
        ],
    )
    yield gauge(
        "weir_durable_dead_letters",
        "Durable requests that failed for good and can be replayed",
        [Sample({"model": model}, count) for model, count in sorted(backlog.dead_letters.items())],
    )
    sizes = sorted(backlog.sizes.items())
    yield gauge(
        "weir_durable_stream_messages",
        "Messages in a durable stream",
        [Sample({"stream": name}, size.messages) for name, size in sizes],
    )
    yield gauge(
        "weir_durable_stream_bytes",
        "Bytes of a durable stream",
        [Sample({"stream": name}, size.size_bytes) for name, size in sizes],
    )
    yield gauge(
        "weir_durable_stream_oldest_age_seconds",
        "Age of the oldest message in a durable stream in seconds, 0 if there is none",
        [Sample({"stream": name}, max(0.0, now_s - size.first_s) if size.messages else 0) for name, size in sizes],
    )
    yield gauge(
        "weir_durable_owned_models",
        "Models whose durable queues this gateway owns",
        [Sample(NO_LABELS, consumed.owned_models)],
    )
    yield gauge(
        "weir_durable_stalled_streams",
        "Streams that acknowledge nothing, because the broker's disk is full or fails",
        [Sample(NO_LABELS, len(durable.publisher.stalled))],
    )
    is_fsync = durable.durability.result.ack_is_fsync
    yield gauge(
        "weir_durable_ack_is_fsync",
        "Whether what the broker acknowledges on durable queues is on disk: 1 yes, 0 no, -1 unknown",
        [Sample(NO_LABELS, -1 if is_fsync is None else int(is_fsync))],
    )


def _rows(rows: Iterable[tuple[str, str, int]], second: str) -> list[Sample]:
    return [Sample({"model": model, second: value}, count) for model, value, count in sorted(rows)]


def _samples(counts: Mapping[tuple[str, str], int], second: str) -> list[Sample]:
    return [Sample({"model": model, second: value}, count) for (model, value), count in sorted(counts.items())]
