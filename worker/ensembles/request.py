"""`EnsembleRequest`: one request to an ensemble: sends the steps' requests and passes tensors on between them.

It carries out the actions of its `EnsembleRun`. Tensors are passed on without a copy: an output in shared memory stays
where the worker of the step has put it, and goes into the next step's request, or the response, as a reference.

`StepLimiter` bounds how many requests of an ensemble each step handles at a time (`max_inflight_requests`). As in Triton,
each step has its own limit, shared by all requests of the ensemble.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol, cast

from weir.bus.naming.identity import lies_elsewhere
from weir.bus.payloads.arena import PayloadReader, StalePayload
from weir.calls.catalog import ServedModel
from weir.calls.in_flight import PendingRequest
from weir.runtime.containment import contained
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import Reason, WeirError, internal, invalid, unavailable
from weir.schemas.core.request_limits import is_cancelled_error
from weir.schemas.core.requests import (
    SEQUENCE_END,
    SEQUENCE_START,
    InferRequest,
    InferResponse,
    Parameters,
    RequestedOutput,
)
from weir.schemas.core.tensors import PayloadRef, Tensor
from weir.schemas.wire.calls import Timestamps, timestamp
from weir.worker.backend_api.inference_client import InferenceClient
from weir.worker.ensembles.run import EnsemblePlan, EnsembleRun, RunActions, StepCall
from weir.worker.ensembles.step_templates import StepTemplates, signature_of

logger = logging.getLogger("weir.worker")


MAX_RUNS = 3
"""How often a request runs at most, if tensors between its steps are lost with the worker that has them."""


class SequenceIdentity(NamedTuple):
    """The correlation id and sequence flags that belong to a tensor."""

    correlation_id: int | str
    flags: int


class TensorValue:
    """A tensor of the ensemble. If it `is_lent`, its content lies in a worker's payload slot, which must be released."""

    __slots__ = ("is_lent", "sequence", "tensor")

    def __init__(self, tensor: Tensor, sequence: SequenceIdentity | None = None, is_lent: bool = False) -> None:
        self.tensor = tensor
        self.sequence = sequence
        self.is_lent = is_lent


class Caller(Protocol):
    """Gets the responses to an ensemble request."""

    def responded(self, outputs: list[Tensor], parameters: Parameters) -> None:
        """Handles a response. The caller owns the payload slots to which outputs refer."""

    def ended(self, error: WeirError | None) -> None:
        """Handles the end of the request, once: with an error, or after the last response."""


@dataclass(frozen=True, slots=True)
class EnsembleContext:
    """What all requests to one ensemble on this worker share."""

    config: ModelConfig
    plan: EnsemblePlan
    limiter: StepLimiter
    client: InferenceClient
    reader: PayloadReader
    templates: StepTemplates = field(default_factory=StepTemplates)


class EnsembleRequest:
    """One request to an ensemble. Runs in the event loop; `caller` may be called before `begin` has returned."""

    def __init__(self, ensemble: EnsembleContext, request: InferRequest, caller: Caller) -> None:
        plan = ensemble.plan
        self._config = ensemble.config
        self._plan = plan
        self._limiter = ensemble.limiter
        self._client = ensemble.client
        self._reader = ensemble.reader
        self._templates = ensemble.templates if _may_use_templates(request) else None
        self._request = request
        self._caller = caller
        self._own = SequenceIdentity(request.correlation_id, request.sequence_flags)
        self._writes_to_clients = any(output.region is not None for output in request.outputs)
        self._selection = plan.select(output.name for output in request.outputs)
        self._run: EnsembleRun[TensorValue] = EnsembleRun(self._selection, plan.is_decoupled)
        self._runs = 0
        self._response: dict[str, TensorValue] | None = None  # the only response, if the ensemble is not decoupled
        self._has_responded = False
        self._is_over = False
        self.phases_ns = [0, 0, 0]
        """The sums of the durations (compute input, infer, output) of its steps so far."""

    def begin(self) -> None:
        """Starts the steps that need only tensors of the request. What it raises ends the request (`cancel`)."""
        self._runs += 1
        given = {tensor.name: TensorValue(tensor) for tensor in self._request.inputs}
        self._do(self._run.begin(given, self._plan.inputs - given.keys()))

    def cancel(self) -> None:
        """Cancels all steps; the caller is not called any more."""
        self._drop(self._run.cancel())
        self._release_response()

    def _do(self, actions: RunActions[TensorValue]) -> None:
        run = self._run
        self._drop(actions)
        for outputs in actions.respond:
            if self._plan.is_decoupled:
                self._respond(outputs)
            else:
                self._response = outputs
        for call in actions.start:
            if run is not self._run or run.has_ended:
                return  # a step could not be started, and the request has ended
            if self._limiter.is_unlimited:
                self._submit(call)
            else:
                self._limiter.enter(call.step.number, call, partial(self._start, call))
        if actions.ended:
            self._end(actions.is_deadlock)

    def _drop(self, actions: RunActions[TensorValue]) -> None:
        for value in actions.release:
            self._release(value)
        for call in actions.cancel:
            self._limiter.leave(call.step.number, call)
            if call.handle is not None:
                self._client.cancel(cast(PendingRequest, call.handle))

    def _release(self, value: TensorValue) -> None:
        if value.is_lent:
            self._client.release(cast(PayloadRef, value.tensor.data))

    def _release_response(self) -> None:
        response, self._response = self._response, None
        for value in (response or {}).values():
            self._release(value)

    # Steps

    @contained(on_error="_failed_unexpectedly")
    def _start(self, call: StepCall[TensorValue]) -> None:
        # Another request that leaves the limiter may call this: it must not get the exceptions of this one.
        self._submit(call)

    def _submit(self, call: StepCall[TensorValue]) -> None:
        if self._run.has_ended:
            return
        try:
            pending = call.handle = self._send(call)
            # Outputs for memory that the client shares are written there by this worker.
            pending.reads_content = self._writes_to_clients
        except WeirError as error:
            self._fail(call, error)

    def _send(self, call: StepCall[TensorValue]) -> PendingRequest:
        """Sends the request of a step, by a template if one fits. Raises WeirError."""
        step, on_response = call.step, partial(self._on_response, call)
        model = self._client.catalog.resolve(step.model, step.version)
        templates = self._templates
        if templates is None or self._client.caches(model):
            return self._client.submit(self._request_of(call, model), on_response)
        values = [call.inputs.get(tensor) for _, tensor in step.inputs]
        signature = signature_of(step.number, [None if value is None else value.tensor for value in values])
        if signature is None or any(value is not None and value.sequence not in (None, self._own) for value in values):
            return self._client.submit(self._request_of(call, model), on_response)
        template = templates.find(model, signature)
        if template is None:
            request = self._request_of(call, model)
            model.normalizer.normalize(request)
            template = templates.add(model, signature, request)
        contents = [cast(bytes, value.tensor.data) for value in values if value is not None]
        body = template.pack(contents[0] if len(contents) == 1 else b"".join(contents))
        return self._client.submit_template(model, template, body, on_response, self._request.deadline_ms)

    def _request_of(self, call: StepCall[TensorValue], model: ServedModel) -> InferRequest:
        step, own = call.step, self._request
        request = InferRequest(step.model, step.version, own.id, parameters=own.parameters)
        sequence = self._own
        for name, tensor in step.inputs:
            value = call.inputs.get(tensor)
            if value is None:
                continue
            shape = _fit_shape(list(value.tensor.shape), name, model.config)
            request.inputs.append(Tensor(name, value.tensor.datatype, shape, value.tensor.data))
            sequence = value.sequence or sequence
        request.outputs = [RequestedOutput(name) for name, _ in step.outputs]
        request.correlation_id, request.sequence_flags = sequence
        request.owner = own.owner
        request.priority, request.timeout_us = own.priority, own.timeout_us
        request.deadline_ms, request.lane = own.deadline_ms, own.lane
        request.wants_timestamps = True
        return request

    @contained(on_error="_failed_unexpectedly")
    def _on_response(
        self, call: StepCall[TensorValue], outcome: InferResponse | WeirError | None, is_final: bool
    ) -> None:
        if is_final:
            self._limiter.leave(call.step.number, call)
        if isinstance(outcome, WeirError):
            if not is_final:
                self._client.cancel(cast(PendingRequest, call.handle))  # its further responses have no use
            if is_cancelled_error(outcome):
                self._lost(call)
            else:
                self._fail(call, outcome)
            return
        if is_final:
            self._count(cast(PendingRequest, call.handle).timestamps)
        outputs = None if outcome is None else self._values(call, outcome)
        self._do(self._run.responded(call, outputs, is_final))

    def _values(self, call: StepCall[TensorValue], response: InferResponse) -> dict[str, TensorValue]:
        names = dict(call.step.outputs)
        sequence = _sequence_of(call, self._own)
        changed = _update_sequence(sequence, response.parameters)
        values: dict[str, TensorValue] = {}
        for tensor in response.outputs:
            value = TensorValue(tensor, changed, isinstance(tensor.data, PayloadRef))
            name = names.get(tensor.name)
            if name is None or name in values:
                self._release(value)
            else:
                values[name] = value
        return values

    def _count(self, timestamps: Timestamps | None) -> None:
        if not timestamps:
            return
        start = timestamp(timestamps, "COMPUTE_START")
        for position, name in enumerate(("COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")):
            end = timestamp(timestamps, name, start)
            self.phases_ns[position] += max(0, end - start)
            start = end

    def _lost(self, call: StepCall[TensorValue]) -> None:
        """Runs the request again: tensors for the step were lost with the worker that had them."""
        if self._own.correlation_id:
            # A step that has run may have changed the state of its sequence.
            self._fail(
                call, unavailable("tensors between its steps were lost: start the sequence again", Reason.SEQUENCE_LOST)
            )
            return
        if self._has_responded or self._runs >= MAX_RUNS:
            self._fail(call, unavailable("tensors between its steps were lost; the request may be sent again"))
            return
        actions = self._run.failed(call)
        if actions.ended:
            self._limiter.leave(call.step.number, call)
            self._drop(actions)
            self._run_again()

    def _run_again(self) -> None:
        self._release_response()
        self._run = EnsembleRun(self._selection, self._plan.is_decoupled)
        self.begin()

    def _fail(self, call: StepCall[TensorValue], error: WeirError) -> None:
        actions = self._run.failed(call)
        if not actions.ended:
            return
        self._limiter.leave(call.step.number, call)
        self._drop(actions)
        self._release_response()
        self._ended(self._named(error))

    # Responses

    def _failed_unexpectedly(self, _error: Exception, *_: object) -> None:
        """Ends the request with an error, because Weir's own code has raised: it would never get a response otherwise."""
        self.cancel()
        self._ended(self._named(internal("internal server error")))

    def _ended(self, error: WeirError | None) -> None:
        if not self._is_over:
            self._caller.ended(error)
            self._is_over = True  # not before: if the caller has raised, it gets an error instead

    def _end(self, is_deadlock: bool) -> None:
        if is_deadlock:
            text = (
                f"[request id: {self._request.id or '<id_unknown>'}] unexpected deadlock, at least one output is not "
                "set while no more ensemble steps can be made"
            )
            self._ended(self._named(invalid(text)))
            return
        if (
            self._response is not None
            and self._runs < MAX_RUNS
            and not all(map(self._is_readable, self._response.values()))
        ):
            self._run_again()
            return
        response, self._response = self._response, None
        if response is not None:
            self._respond(response)
        self._ended(None)

    def _is_readable(self, value: TensorValue) -> bool:
        """Whether the content of an output can still be read."""
        ref = value.tensor.data
        if not isinstance(ref, PayloadRef) or not value.is_lent or lies_elsewhere(ref.segment):
            return True
        try:
            self._reader.view(ref)
        except (StalePayload, ValueError):
            return False
        return True

    def _respond(self, values: Mapping[str, TensorValue]) -> None:
        self._has_responded = True
        outputs: list[Tensor] = []
        sequence = self._own
        for declared in self._config.output:
            value = values.get(declared.name)
            if value is None:
                continue
            tensor, sequence = value.tensor, value.sequence or sequence
            shape = _fit_shape(list(tensor.shape), declared.name, self._config)
            outputs.append(Tensor(declared.name, tensor.datatype, shape, tensor.data))
        self._caller.responded(outputs, _sequence_parameters(sequence))

    def _named(self, error: WeirError) -> WeirError:
        message = f"in ensemble '{self._config.name}', {error.message}"
        return WeirError(error.code, message, error.retry_after_s, reason=error.reason)


def _may_use_templates(request: InferRequest) -> bool:
    """Whether the requests of its steps have nothing of their own but the content of their tensors."""
    return not (
        request.id
        or request.parameters
        or request.priority
        or request.timeout_us
        or request.correlation_id
        or request.sequence_flags
        or request.lane
    )


def _fit_shape(shape: list[int], name: str, config: ModelConfig) -> list[int]:
    """The shape with or without a batch dimension, as the model has it: the batch is of one row."""
    declared = config.input_by_name.get(name) or config.output_by_name.get(name)
    if declared is None:
        return shape
    if config.max_batch_size > 0:
        return [1, *shape] if len(shape) == len(declared.dims) else shape
    return shape[1:] if len(shape) == len(declared.dims) + 1 and shape[0] == 1 else shape


def _sequence_of(call: StepCall[TensorValue], own: SequenceIdentity) -> SequenceIdentity:
    for value in call.inputs.values():
        own = value.sequence or own
    return own


def _update_sequence(sequence: SequenceIdentity, parameters: Parameters | None) -> SequenceIdentity:
    """The sequence identity for later steps, as changed by the parameters of a step's response."""
    if not parameters:
        return sequence
    correlation_id, flags = sequence
    given = parameters.get("sequence_id")
    if isinstance(given, (int, str)) and not isinstance(given, bool):
        correlation_id = given % 2**64 if isinstance(given, int) else given
    for name, flag in (("sequence_start", SEQUENCE_START), ("sequence_end", SEQUENCE_END)):
        if isinstance(parameters.get(name), bool):
            flags = flags | flag if parameters[name] else flags & ~flag
    return SequenceIdentity(correlation_id, flags)


def _sequence_parameters(sequence: SequenceIdentity) -> Parameters:
    """The parameters of an ensemble's response, as in Triton."""
    return {
        "sequence_id": sequence.correlation_id,
        "sequence_start": bool(sequence.flags & SEQUENCE_START),
        "sequence_end": bool(sequence.flags & SEQUENCE_END),
    }


STEP_TIMEOUT_S = 300.0
"""How long a request waits for a step. It then proceeds beyond the limit, so that steps never wait for each other forever.
"""


class _Waiting:
    """A call that waits for its step."""

    __slots__ = ("call", "start", "timer")

    def __init__(self, call: Hashable, start: Callable[[], None]) -> None:
        self.call = call
        self.start = start
        self.timer: asyncio.TimerHandle | None = None


class StepLimiter:
    """Limits the calls of each step of one ensemble on one worker; with `limit` 0 there is no limit.

    Calls beyond the limit wait in order, for `timeout_s` at most.
    """

    def __init__(self, steps: int, limit: int, timeout_s: float = STEP_TIMEOUT_S) -> None:
        self._limit = limit
        self.is_unlimited = not limit
        self._timeout_s = timeout_s
        self._running: list[set[Hashable]] = [set() for _ in range(steps)]
        self._waiting: list[deque[_Waiting]] = [deque() for _ in range(steps)]

    def enter(self, step: int, call: Hashable, start: Callable[[], None]) -> None:
        """Calls `start` now, or when the step may handle another call."""
        if not self._limit:
            start()
        elif len(self._running[step]) < self._limit:
            self._running[step].add(call)
            start()
        else:
            waiting = _Waiting(call, start)
            waiting.timer = asyncio.get_running_loop().call_later(self._timeout_s, self._time_out, step, waiting)
            self._waiting[step].append(waiting)

    def leave(self, step: int, call: Hashable) -> None:
        """Removes a call that has ended or that waits; does nothing if it was removed before."""
        if not self._limit:
            return
        if call in self._running[step]:
            self._running[step].remove(call)
        else:
            for waiting in self._waiting[step]:
                if waiting.call is call:
                    self._waiting[step].remove(waiting)
                    _cancel_timer(waiting)
                    break
        while self._waiting[step] and len(self._running[step]) < self._limit:
            self._admit(step, self._waiting[step].popleft())

    def _time_out(self, step: int, waiting: _Waiting) -> None:
        if waiting in self._waiting[step]:
            self._waiting[step].remove(waiting)
            self._admit(step, waiting)

    def _admit(self, step: int, waiting: _Waiting) -> None:
        _cancel_timer(waiting)
        self._running[step].add(waiting.call)
        waiting.start()


def _cancel_timer(waiting: _Waiting) -> None:
    if waiting.timer is not None:
        waiting.timer.cancel()
