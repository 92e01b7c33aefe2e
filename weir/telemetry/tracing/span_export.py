"""Mode "opentelemetry": sends traces as spans, in batches, to a collector by OTLP over HTTP.

One trace makes these spans, the first three with Triton's names, attributes and events, the others ours:

    InferRequest            the request in the gateway (child of the caller's span, if it sent a `traceparent`)
      <model name>          from validation to the response
        scheduler           from the queue to the worker
        worker              from the arrival of the batch to its responses
        compute             the execution, with its phases as events

The gateway creates them all, from timestamps that came with the response; the other roles send none. This module
imports opentelemetry-sdk, so import it only if the mode is used.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from weir.telemetry.tracing.context import new_span_id
from weir.telemetry.tracing.settings import TraceConfig
from weir.telemetry.tracing.trace import OWN_TIMESTAMPS, WORKER_RECEIVED, Trace

EXPORT_TIMEOUT_S = 5.0
"""How long the export of one batch may take, including retries; then it is lost."""

_SCOPE = InstrumentationScope("triton-server")
_COMPUTE = ("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")
_REQUEST = ("REQUEST_START", "QUEUE_START", "REQUEST_END")

_Attributes = Mapping[str, str | int]


class SpanExport:
    """Sends traces to `config.url` from a thread of its own, which starts with it."""

    def __init__(self, config: TraceConfig) -> None:
        self._resource = Resource.create({"service.name": "triton-inference-server", **config.resource})
        batches = config.batches
        self._processor = BatchSpanProcessor(
            OTLPSpanExporter(config.url, timeout=EXPORT_TIMEOUT_S),
            max_queue_size=batches["bsp_max_queue_size"],
            schedule_delay_millis=batches["bsp_schedule_delay"],
            max_export_batch_size=batches["bsp_max_export_batch_size"],
        )

    def add(self, trace: Trace) -> None:
        """Adds a complete trace. When the queue is full, the oldest spans are dropped."""
        for span in self._spans(trace):
            self._processor.on_end(span)

    def close(self, timeout_s: float) -> None:
        """Sends the queued spans, for at most `timeout_s`. Blocks."""
        closing = threading.Thread(target=self._processor.shutdown, name="span-export-end", daemon=True)
        closing.start()
        closing.join(timeout_s)

    def _spans(self, trace: Trace) -> list[ReadableSpan]:
        state = TraceState.from_header([trace.tracestate]) if trace.tracestate else TraceState()

        def context(span_id: int, is_remote: bool = False) -> SpanContext:
            return SpanContext(trace.trace_id, span_id, is_remote, TraceFlags(TraceFlags.SAMPLED), state)

        def span(
            name: str, own: SpanContext, parent: SpanContext | None, start_ns: int, end_ns: int, **more: Any
        ) -> ReadableSpan:
            return ReadableSpan(
                name=name,
                context=own,
                parent=parent,
                resource=self._resource,
                instrumentation_scope=_SCOPE,
                start_time=start_ns,
                end_time=max(start_ns, end_ns),
                **more,
            )

        root, model = context(trace.root_span_id), context(trace.span_id)
        caller = None if trace.parent is None else context(trace.parent.span_id, is_remote=True)
        status = Status(StatusCode.ERROR, trace.error) if trace.error else Status()
        start_ns = trace.first("REQUEST_START")
        end_ns = max(ns for _, ns in trace.timestamps)
        frontend_events = [e for e in trace.timestamps if e[0] not in (*_REQUEST, *_COMPUTE, *OWN_TIMESTAMPS)]
        spans = [
            span(
                "InferRequest",
                root,
                caller,
                min([start_ns, *(ns for _, ns in frontend_events)]),
                end_ns,
                kind=SpanKind.SERVER,
                events=_events(frontend_events),
                status=status,
                attributes={"weir.supervisor.role": "gateway"},
            ),
            span(
                trace.model_name,
                model,
                root,
                start_ns,
                trace.first("REQUEST_END") or end_ns,
                kind=SpanKind.SERVER,
                events=_events([e for e in trace.timestamps if e[0] in _REQUEST]),
                status=status,
                attributes=_model_attributes(trace),
            ),
        ]
        queued_ns, received_ns, responded_ns = map(trace.first, ("QUEUE_START", WORKER_RECEIVED, "COMPUTE_END"))
        if queued_ns and received_ns:
            attributes = {"weir.supervisor.role": "scheduler"}
            spans.append(
                span("scheduler", context(new_span_id()), model, queued_ns, received_ns, attributes=attributes)
            )
        if received_ns and responded_ns:
            attributes = {"weir.supervisor.role": "worker"}
            spans.append(
                span("worker", context(new_span_id()), model, received_ns, responded_ns, attributes=attributes)
            )
        if trace.first("COMPUTE_START"):
            events = [e for e in trace.timestamps if e[0] in _COMPUTE]
            begun_ns, ended_ns = events[0][1], events[-1][1]
            own = context(new_span_id())
            spans.append(span("compute", own, model, begun_ns, ended_ns, kind=SpanKind.SERVER, events=_events(events)))
        return spans


def _model_attributes(trace: Trace) -> _Attributes:
    attributes: dict[str, str | int] = {
        "triton.model_name": trace.model_name,
        "triton.model_version": trace.model_version,
        "triton.trace_id": trace.id,
        "triton.trace_parent_id": 0,
    }
    if trace.request_id:
        attributes["triton.request_id"] = trace.request_id
    return attributes


def _events(timestamps: list[tuple[str, int]]) -> list[Event]:
    return [Event(name, timestamp=ns) for name, ns in timestamps]
