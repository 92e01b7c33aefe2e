"""`Tracing`: selects the requests of one caller that are traced, and writes or exports their traces.

Tracing is off by default, and then costs a request the test of one attribute, `is_on`. All gateways share the settings;
each counts its own requests and writes its own files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Protocol

from runtime.containment import contained
from schemas.core.errors import WeirError
from schemas.core.requests import InferRequest, InferResponse
from schemas.wire.messages import Timestamps
from telemetry.tracing.context import MAX_TRACESTATE, parse_traceparent
from telemetry.tracing.file import TraceBuffer, TraceFile
from telemetry.tracing.settings import (
    OPENTELEMETRY,
    TENSORS,
    Overrides,
    TraceConfig,
    TraceSampler,
    TraceSetting,
    TraceSettings,
)
from telemetry.tracing.trace import Trace

if TYPE_CHECKING:
    from telemetry.tracing.span_export import SpanExport

_LAST_EXPORT_S = 5.0


class TracedRequest(Protocol):
    """A request whose responses are delivered past its trace."""

    request: InferRequest

    @property
    def on_response(self) -> Callable[[InferResponse | WeirError | None, bool], None]:
        """Called with each response and whether it is the last one."""


class _ActiveSetting:
    """One setting in force: its sampler, and its buffer of traces to write."""

    def __init__(self, setting: TraceSetting, file: TraceFile) -> None:
        self.setting = setting
        self.sampler = TraceSampler(setting.rate, setting.count)
        self.buffer = TraceBuffer(file, setting.log_frequency)


class Tracing:
    """The traces of one caller. `config` is that of the command line; `file_suffix` is appended to the name of its file."""

    def __init__(self, config: TraceConfig | None = None, file_suffix: str = "") -> None:
        self._config = config or TraceConfig()
        self.settings = TraceSettings(self._config)
        self._file = TraceFile(self._config.file and self._config.file + file_suffix)
        self._spans: SpanExport | None = None
        self._ids = count(1)
        self._active: dict[str, _ActiveSetting] = {}
        self.is_on = False
        self._update()

    # Settings

    def to_dict(self, model: str) -> dict[str, str | list[str]]:
        """The setting of a model, or the global one (""), in the form of the trace API."""
        return self.settings.to_dict(model, self._of(model).sampler.remaining)

    def replace(self, model: str, overrides: Overrides) -> None:
        """Replaces the values of a model's setting, or of the global one ("")."""
        self.settings.replace(model, overrides)
        self._update()

    def _update(self) -> None:
        """Applies changed settings; their counts start again."""
        for model in {"", *self._active, *self.settings.models()}:
            if model and model not in self.settings.models():
                self._active.pop(model).buffer.flush()
                continue
            setting, active = self.settings.setting(model), self._active.get(model)
            if active is None or active.setting != setting:
                if active is not None:
                    active.buffer.flush()
                self._active[model] = _ActiveSetting(setting, self._file)
        has_target = self._config.mode == OPENTELEMETRY or bool(self._file.path)
        self.is_on = has_target and any(active.setting.levels for active in self._active.values())
        if self.is_on and self._config.mode == OPENTELEMETRY and self._spans is None:
            from telemetry.tracing.span_export import (
                SpanExport,  # it takes half a second and a thread, which most gateways do not need
            )

            self._spans = SpanExport(self._config)

    def _of(self, model: str) -> _ActiveSetting:
        return self._active.get(model) or self._active[""]

    # Requests

    def samples(self, model: str, traceparent: str) -> bool:
        """Whether a request for `model` that has just arrived is traced; `traceparent` is its caller's."""
        active = self._of(model)
        if not active.setting.levels:
            return False
        is_propagated = self._spans is not None and bool(traceparent) and parse_traceparent(traceparent) is not None
        return active.sampler.sample(is_propagated)

    def start(self, request: InferRequest, model: str, is_traced: bool | None = None) -> Trace | None:
        """The trace of a checked request, None if it is not traced; `is_traced` is the result of `samples`.

        The request's `traceparent` and `tracestate` become those of its own trace, or empty.
        """
        if is_traced is None:
            is_traced = self.is_on and self.samples(model, request.traceparent)
        if not is_traced:
            request.traceparent = request.tracestate = ""
            return None
        exports = self._spans is not None
        parent = parse_traceparent(request.traceparent) if exports else None
        if parent is not None and len(request.tracestate) <= MAX_TRACESTATE:
            parent = parent._replace(tracestate=request.tracestate)
        trace = Trace(next(self._ids), model, request.id, parent, exports)
        request.traceparent, request.tracestate = trace.traceparent, trace.tracestate
        for name, at_ns in request.arrival or ():
            trace.mark(name, at_ns)
        trace.mark("REQUEST_START")
        if self._wants_tensors(model):
            trace.add_tensors("TENSOR_QUEUE_INPUT", request.inputs)
        return trace

    def deliver(
        self,
        trace: Trace,
        request: TracedRequest,
        outcome: InferResponse | WeirError | None,
        is_final: bool,
        timestamps: Timestamps | None = None,
    ) -> None:
        """Calls the request's `on_response`, and ends the trace with the last response."""
        self._note_outcome(trace, outcome, timestamps)
        if not is_final:
            request.on_response(outcome, False)
            return
        trace.mark("REQUEST_END")
        arrival = request.request.arrival
        protocol = "" if arrival is None else arrival[0][0].partition("_")[0]  # HTTP or GRPC
        if protocol:
            trace.mark(f"{protocol}_SEND_START")
        request.on_response(outcome, True)
        if protocol:
            trace.mark(f"{protocol}_SEND_END")
        self._end(trace)

    @contained()
    def _note_outcome(
        self, trace: Trace, outcome: InferResponse | WeirError | None, timestamps: Timestamps | None
    ) -> None:
        trace.add_worker_timestamps(timestamps or {})
        trace.mark("INFER_RESPONSE_COMPLETE")
        if isinstance(outcome, WeirError):
            trace.error = outcome.message
        elif outcome is not None:
            trace.model_version = int(outcome.model_version)
            if self._wants_tensors(trace.model_name):
                trace.add_tensors("TENSOR_BACKEND_OUTPUT", outcome.outputs)

    @contained()
    def cancel(self, trace: Trace) -> None:
        """Ends the trace of a cancelled request."""
        trace.error = "the request was cancelled"
        trace.mark("REQUEST_END")
        self._end(trace)

    def _wants_tensors(self, model: str) -> bool:
        return self._spans is None and TENSORS in self._of(model).setting.levels

    @contained()
    def _end(self, trace: Trace) -> None:
        if self._spans is not None:
            self._spans.add(trace)
            return
        active = self._of(trace.model_name)
        active.buffer.add(trace)
        if not active.sampler.remaining:
            active.buffer.flush()

    async def stop(self) -> None:
        """Writes or exports the remaining traces."""
        self.is_on = False
        for active in self._active.values():
            active.buffer.flush()
        self._file.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close, _LAST_EXPORT_S)


class PassedTraces(Tracing):
    """The tracing of requests that models make: none starts a trace, and those of a traced request continue its trace."""

    def start(self, request: InferRequest, model: str, is_traced: bool | None = None) -> Trace | None:
        """No trace of its own; the request keeps its `traceparent`."""
        return None
