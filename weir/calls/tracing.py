"""`Tracing`: selects the requests of one caller that are traced, and writes, exports or reports their traces.

Tracing is off by default, and then costs a request the test of one attribute, `is_on`. All gateways share the settings;
each counts its own requests and writes its own files. While a process observes requests (`weir.bus.observation`), those
of its choice are traced too, and their traces are reported to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Protocol

from weir.runtime.containment import contained
from weir.schemas.core.errors import WeirError
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.wire.calls import Timestamps
from weir.telemetry.tracing.context import MAX_TRACESTATE, parse_traceparent
from weir.telemetry.tracing.file import TraceBuffer, TraceFile
from weir.telemetry.tracing.settings import (
    OPENTELEMETRY,
    TENSORS,
    Overrides,
    TraceConfig,
    TraceSampler,
    TraceSetting,
    TraceSettings,
)
from weir.telemetry.tracing.trace import Trace

if TYPE_CHECKING:
    from weir.telemetry.tracing.span_export import SpanExport

_LAST_EXPORT_S = 5.0

CLIENT_CLOSED_REQUEST = 499
"""The status of a cancelled request in its trace: its client gets no response, so no status of HTTP fits."""


Sampling = int
"""For what a request that has just arrived is traced: NOT_TRACED, or RECORDED and OBSERVED. It is a number because a flag
of `enum` costs each request five times as much.
"""

NOT_TRACED: Sampling = 0
RECORDED: Sampling = 1
"""The trace is written or exported, as the settings say."""
OBSERVED: Sampling = 2
"""The trace may be reported to observers, which is decided once the id of the request is known."""


class TraceObservers(Protocol):
    """The processes that observe requests (`weir.calls.trace_feed`)."""

    @property
    def is_on(self) -> bool:
        """Whether there are any."""

    def may_take(self, model: str) -> bool:
        """Whether some observer may want a request for `model` that has just arrived."""

    def take(self, model: str, id: str) -> tuple[str, ...]:
        """The observers of a request with this id."""

    def report(self, trace: Trace, key: int) -> None:
        """Reports the trace of the request `key` of this caller to its observers."""


class TracedRequest(Protocol):
    """A request whose responses are delivered past its trace."""

    key: int
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
        self._observers: TraceObservers | None = None
        self._records = False  # whether settings ask for traces
        self.is_on = False
        self._update()

    # Observers

    def observe(self, observers: TraceObservers) -> None:
        """Reports traces to these observers from now on. Call `update_observers` after each change of theirs."""
        self._observers = observers
        self.update_observers()

    def update_observers(self) -> None:
        """Begins or ends to trace requests for observers."""
        self.is_on = self._records or (self._observers is not None and self._observers.is_on)

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
        self._records = has_target and any(active.setting.levels for active in self._active.values())
        self.update_observers()
        if self._records and self._config.mode == OPENTELEMETRY and self._spans is None:
            from weir.telemetry.tracing.span_export import (
                SpanExport,  # it takes half a second and a thread, which most gateways do not need
            )

            self._spans = SpanExport(self._config)

    def _of(self, model: str) -> _ActiveSetting:
        return self._active.get(model) or self._active[""]

    # Requests

    def samples(self, model: str, traceparent: str) -> Sampling:
        """For what a request for `model` that has just arrived is traced; `traceparent` is its caller's."""
        is_recorded = self._records and self._is_recorded(model, traceparent)
        if self._observers is not None and self._observers.is_on and self._observers.may_take(model):
            return RECORDED | OBSERVED if is_recorded else OBSERVED
        return RECORDED if is_recorded else NOT_TRACED

    def _is_recorded(self, model: str, traceparent: str) -> bool:
        active = self._of(model)
        if not active.setting.levels:
            return False
        is_propagated = self._spans is not None and bool(traceparent) and parse_traceparent(traceparent) is not None
        return active.sampler.sample(is_propagated)

    def start(self, request: InferRequest, model: str, sampling: Sampling | None = None) -> Trace | None:
        """The trace of a checked request, None if it is not traced; `sampling` is the result of `samples`.

        The request's `traceparent` and `tracestate` become those of its own trace, or empty.
        """
        if sampling is None:
            sampling = self.samples(model, request.traceparent) if self.is_on else NOT_TRACED
        is_recorded = bool(sampling & RECORDED)
        observers: tuple[str, ...] = ()
        if sampling & OBSERVED and self._observers is not None:
            observers = self._observers.take(model, request.id)
        if not (is_recorded or observers):
            request.traceparent = request.tracestate = ""
            return None
        exports = self._spans is not None and is_recorded
        parent = parse_traceparent(request.traceparent) if exports else None
        if parent is not None and len(request.tracestate) <= MAX_TRACESTATE:
            parent = parent._replace(tracestate=request.tracestate)
        trace = Trace(next(self._ids), model, request.id, parent, exports)
        trace.is_recorded, trace.observers = is_recorded, observers
        request.traceparent, request.tracestate = trace.traceparent, trace.tracestate
        for name, at_ns in request.arrival or ():
            trace.mark(name, at_ns)
        trace.mark("REQUEST_START")
        if is_recorded and self._wants_tensors(model):
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
        self._end(trace, request.key)

    @contained()
    def _note_outcome(
        self, trace: Trace, outcome: InferResponse | WeirError | None, timestamps: Timestamps | None
    ) -> None:
        trace.add_worker_timestamps(timestamps or {})
        trace.mark("INFER_RESPONSE_COMPLETE")
        if isinstance(outcome, WeirError):
            trace.error, trace.status = outcome.message, outcome.http_status
        elif outcome is not None:
            trace.model_version = int(outcome.model_version)
            if trace.is_recorded and self._wants_tensors(trace.model_name):
                trace.add_tensors("TENSOR_BACKEND_OUTPUT", outcome.outputs)

    def cancel(self, trace: Trace, key: int = 0) -> None:
        """Ends the trace of the cancelled request `key`."""
        trace.error, trace.status = "the request was cancelled", CLIENT_CLOSED_REQUEST
        trace.mark("REQUEST_END")
        self._end(trace, key)

    def _wants_tensors(self, model: str) -> bool:
        return self._spans is None and TENSORS in self._of(model).setting.levels

    @contained()
    def _end(self, trace: Trace, key: int) -> None:
        if trace.observers and self._observers is not None:
            self._observers.report(trace, key)
        if not trace.is_recorded:
            return
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

    def start(self, request: InferRequest, model: str, sampling: Sampling | None = None) -> Trace | None:
        """No trace of its own; the request keeps its `traceparent`."""
        return None
