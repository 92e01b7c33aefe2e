"""`Tracing`: which requests of this gateway are traced, and what becomes of their traces.

Off, which is the default, it costs a request the test of one attribute, `is_on`. Settings are told to all gateways; each
counts its own requests, and writes its own files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Protocol

from runtime.containment import contained
from schemas.errors import WeirError
from schemas.messages import Moments
from schemas.requests import InferRequest, InferResponse
from telemetry.trace import Trace
from telemetry.trace_context import MAX_TRACESTATE, parse_traceparent
from telemetry.trace_file import TraceBuffer, TraceFile
from telemetry.trace_sampler import TraceSampler
from telemetry.trace_settings import OPENTELEMETRY, TENSORS, Overrides, TraceConfig, TraceSetting, TraceSettings

if TYPE_CHECKING:
    from telemetry.span_export import SpanExport

_LAST_EXPORT_S = 5.0


class Asked(Protocol):
    """A request that waits for its answers."""

    request: InferRequest
    on_answer: Callable[[InferResponse | WeirError | None, bool], None]


class _Traced:
    """One setting at work: its sampler, and what it has written so far."""

    def __init__(self, setting: TraceSetting, file: TraceFile) -> None:
        self.setting = setting
        self.sampler = TraceSampler(setting.rate, setting.count)
        self.buffer = TraceBuffer(file, setting.log_frequency)


class Tracing:
    """See the module. `config` is the command line's."""

    def __init__(self, config: TraceConfig | None = None) -> None:
        self._config = config or TraceConfig()
        self.settings = TraceSettings(self._config)
        self._file = TraceFile(self._config.file)
        self._spans: SpanExport | None = None
        self._ids = count(1)
        self._traced: dict[str, _Traced] = {}
        self.is_on = False
        self._update()

    # Settings

    def told(self, model: str) -> dict[str, str | list[str]]:
        """The setting of a model, or the global one (""), as clients are told it."""
        return self.settings.told(model, self._of(model).sampler.remaining)

    def replace(self, model: str, overrides: Overrides) -> None:
        """A setting has been given these values of its own."""
        self.settings.replace(model, overrides)
        self._update()

    def _update(self) -> None:
        """Makes what has changed anew; counts begin again there."""
        for model in {"", *self._traced, *self.settings.models()}:
            if model and model not in self.settings.models():
                self._traced.pop(model).buffer.flush()
                continue
            setting, traced = self.settings.setting(model), self._traced.get(model)
            if traced is None or traced.setting != setting:
                if traced is not None:
                    traced.buffer.flush()
                self._traced[model] = _Traced(setting, self._file)
        has_place = self._config.mode == OPENTELEMETRY or bool(self._file.path)
        self.is_on = has_place and any(traced.setting.levels for traced in self._traced.values())
        if self.is_on and self._config.mode == OPENTELEMETRY and self._spans is None:
            from telemetry.span_export import SpanExport  # half a second, and a thread, that most gateways don't need

            self._spans = SpanExport(self._config)

    def _of(self, model: str) -> _Traced:
        return self._traced.get(model) or self._traced[""]

    # Requests

    def samples(self, model: str, traceparent: str) -> bool:
        """Whether the request that has just come for `model` is traced; `traceparent` is its caller's."""
        traced = self._of(model)
        if not traced.setting.levels:
            return False
        is_propagated = self._spans is not None and bool(traceparent) and parse_traceparent(traceparent) is not None
        return traced.sampler.sample(is_propagated)

    def begin(self, request: InferRequest, model: str, is_traced: bool | None = None) -> Trace | None:
        """The trace of a request that has been checked, None if it is not traced; `is_traced` is what `samples` said.

        The request carries its place in the trace from now on, and no trace of its caller's.
        """
        if is_traced is None:
            is_traced = self.is_on and self.samples(model, request.traceparent)
        if not is_traced:
            request.traceparent = request.tracestate = ""
            return None
        exports = self._spans is not None
        parent = parse_traceparent(request.traceparent) if exports else None
        tracestate = request.tracestate if parent and len(request.tracestate) <= MAX_TRACESTATE else ""
        trace = Trace(next(self._ids), model, request.id, parent, tracestate, exports)
        request.traceparent, request.tracestate = trace.traceparent, tracestate
        for name, at_ns in request.arrival or ():
            trace.mark(name, at_ns)
        trace.mark("REQUEST_START")
        if self._wants_tensors(model):
            trace.add_tensors("TENSOR_QUEUE_INPUT", request.inputs)
        return trace

    def deliver(
        self,
        trace: Trace,
        asked: Asked,
        outcome: InferResponse | WeirError | None,
        is_final: bool,
        moments: Moments | None = None,
    ) -> None:
        """Gives an answer to whoever asked, and hands the trace on with the last one."""
        self._note_outcome(trace, outcome, moments)
        if not is_final:
            asked.on_answer(outcome, False)
            return
        trace.mark("REQUEST_END")
        arrival = asked.request.arrival
        door = "" if arrival is None else arrival[0][0].partition("_")[0]  # HTTP or GRPC
        if door:
            trace.mark(f"{door}_SEND_START")
        asked.on_answer(outcome, True)
        if door:
            trace.mark(f"{door}_SEND_END")
        self._end(trace)

    @contained()
    def _note_outcome(self, trace: Trace, outcome: InferResponse | WeirError | None, moments: Moments | None) -> None:
        trace.add_workers(moments or {})
        trace.mark("INFER_RESPONSE_COMPLETE")
        if isinstance(outcome, WeirError):
            trace.error = outcome.message
        elif outcome is not None:
            trace.model_version = int(outcome.model_version)
            if self._wants_tensors(trace.model_name):
                trace.add_tensors("TENSOR_BACKEND_OUTPUT", outcome.outputs)

    @contained()
    def abandon(self, trace: Trace) -> None:
        """The request was given up."""
        trace.error = "the request was given up"
        trace.mark("REQUEST_END")
        self._end(trace)

    def _wants_tensors(self, model: str) -> bool:
        return self._spans is None and TENSORS in self._of(model).setting.levels

    @contained()
    def _end(self, trace: Trace) -> None:
        if self._spans is not None:
            self._spans.add(trace)
            return
        traced = self._of(trace.model_name)
        traced.buffer.add(trace)
        if not traced.sampler.remaining:
            traced.buffer.flush()

    async def stop(self) -> None:
        """Writes or sends what there is."""
        self.is_on = False
        for traced in self._traced.values():
            traced.buffer.flush()
        self._file.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close, _LAST_EXPORT_S)


class PassedTraces(Tracing):
    """For who asks in the course of another request: nothing is traced anew, and what belongs to a trace goes on in it."""

    def begin(self, request: InferRequest, model: str, is_traced: bool | None = None) -> Trace | None:
        """No trace; the request keeps the place in one that it has."""
        return None
