"""Observed requests and batches as the page draws them: the spans of a request's way, and the requests of each batch."""

from __future__ import annotations

from typing import Any

from weir.calls.catalog import Catalog
from weir.cluster.observation.store import BatchPage, ObservedBatch, ObservedRequest
from weir.schemas.wire.observation import TraceReport

_STAGES = (
    ("read", None, "REQUEST_START"),
    ("check", "REQUEST_START", "FRAME_SENT"),
    ("queue", "FRAME_SENT", "BATCH_SENT"),
    ("to the worker", "BATCH_SENT", "WORKER_RECEIVED"),
    ("wait for the instance", "WORKER_RECEIVED", "COMPUTE_START"),
    ("input", "COMPUTE_START", "COMPUTE_INPUT_END"),
    ("compute", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"),
    ("output", "COMPUTE_OUTPUT_START", "COMPUTE_END"),
    ("to the gateway", "COMPUTE_END", "INFER_RESPONSE_COMPLETE"),
    ("answer", "INFER_RESPONSE_COMPLETE", None),
)
"""The spans of a request: name, the timestamp at which it begins (None: the first one), and the one at which it ends (None:
the last one). A span whose timestamps are missing is left out: a cached response was in no batch.
"""


def spans_of(trace: TraceReport) -> list[dict[str, Any]]:
    """The spans of a request in order, in microseconds since its first timestamp."""
    times = dict(trace.times)
    if not times:
        return []
    first_ns, last_ns = min(times.values()), max(times.values())
    spans = []
    for name, start, end in _STAGES:
        start_ns = first_ns if start is None else times.get(start)
        end_ns = last_ns if end is None else times.get(end)
        if start_ns is not None and end_ns is not None and end_ns >= start_ns:
            spans.append(
                {"name": name, "start_us": (start_ns - first_ns) // 1000, "end_us": (end_ns - first_ns) // 1000}
            )
    return spans


def trace_row(trace: TraceReport) -> dict[str, Any]:
    """A request in a list. `id` finds it again: the client's id, or the caller and key of a request without one."""
    times = [time_ns for _, time_ns in trace.times]
    return {
        "id": trace.id or f"{trace.gateway}/{trace.key}",
        "key": trace.key,
        "model": trace.model,
        "version": trace.version,
        "at_ms": min(times) // 1_000_000 if times else None,
        "duration_ms": (max(times) - min(times)) / 1e6 if times else None,
        "status": trace.status,
        "protocol": trace.protocol,
    }


def trace_details(observed: ObservedRequest) -> dict[str, Any]:
    """A request with its spans, and the batch that ran it."""
    trace = observed.trace
    batch = None
    if trace.batch is not None:
        others = [f"{other.gateway}/{other.key}" for other in observed.others]
        batch = {"id": trace.batch, "size": trace.batch_size, "with": others}
    return {
        **trace_row(trace),
        "error": trace.error,
        "gateway": trace.gateway,
        "scheduler": trace.scheduler,
        "worker": trace.worker,
        "instance": trace.instance,
        "batch": batch,
        "spans": spans_of(trace),
    }


def batch_page(page: BatchPage, catalog: Catalog, model: str) -> dict[str, Any]:
    """The batches of a model, and the settings of its batcher that explain them; null where it has none."""
    served = catalog.served_model(model)
    batching = None if served is None else served.config.dynamic_batching
    return {
        "next": page.next,
        "dropped": page.dropped,
        "settings": {
            "max_batch_size": None if served is None else served.config.max_batch_size,
            "preferred": [] if batching is None else list(batching.preferred_batch_size),
            "max_queue_delay_us": None if batching is None else batching.max_queue_delay_microseconds,
        },
        "batches": [_batch(batch) for batch in page.batches],
    }


def _batch(batch: ObservedBatch) -> dict[str, Any]:
    report = batch.report
    waited_us = [request.waited_us for request in report.requests]
    return {
        "seq": batch.seq,
        "id": report.id,
        "at_ms": report.sent_us / 1000,
        "version": report.version,
        "instance": report.instance,
        "worker": report.worker,
        "size": report.size,
        "rows": report.rows,
        "padding": report.padding,
        "waited_us": waited_us,
        "request_rows": [request.rows for request in report.requests],
        "lanes": [request.lane for request in report.requests],
        "gateways": [request.gateway for request in report.requests],
        "held_us": max(waited_us, default=0),
        "busy_us": batch.busy_us,
        "reason": report.reason.value,
    }
