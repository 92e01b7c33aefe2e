"""`EnsembleRequest`: one request to an ensemble while its steps run: asks them, and keeps count of who needs which tensor.

It does what its `EnsembleRun` says. Tensors are passed on as they came: what lies in shared memory stays where the
worker of the step has put it, and goes into the next step's request, or the answer, as a reference.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol, cast

from bus.identity import lies_elsewhere
from bus.payloads import PayloadReader, StalePayload
from calls.pending import Pending
from runtime.containment import report
from schemas.errors import Reason, WeirError, internal, invalid, unavailable
from schemas.messages import Moments
from schemas.model_config import ModelConfig
from schemas.request_errors import is_given_up
from schemas.requests import SEQUENCE_END, SEQUENCE_START, InferRequest, InferResponse, Parameters, RequestedOutput
from schemas.tensors import PayloadRef, Tensor
from worker.ensembles.plan import EnsemblePlan
from worker.ensembles.run import Actions, Call, EnsembleRun
from worker.ensembles.step_gates import StepGates
from worker.inner_calls import InnerCalls

logger = logging.getLogger("weir.worker")

MAX_RUNS = 3
"""How often a request is run whose tensors were lost with the worker that had made them."""


class Sequence(NamedTuple):
    """The correlation id and the flags that go with a tensor."""

    correlation_id: int | str
    flags: int


class Value:
    """A tensor of the ensemble. `is_lent`: its content lies in a worker's memory, and is to be given back."""

    __slots__ = ("is_lent", "sequence", "tensor")

    def __init__(self, tensor: Tensor, sequence: Sequence | None = None, is_lent: bool = False) -> None:
        self.tensor = tensor
        self.sequence = sequence
        self.is_lent = is_lent


class Caller(Protocol):
    """Who is told how the request goes on."""

    def responded(self, outputs: list[Tensor], parameters: Parameters) -> None:
        """A response; content of outputs that is a reference is the caller's from now on."""

    def ended(self, error: WeirError | None) -> None:
        """The end, which comes once: with an error, or after the responses."""


class EnsembleRequest:
    """See the module. Everything runs in the event loop; `caller` may be told before `begin` has returned."""

    def __init__(
        self,
        config: ModelConfig,
        plan: EnsemblePlan,
        gates: StepGates,
        request: InferRequest,
        calls: InnerCalls,
        reader: PayloadReader,
        caller: Caller,
    ) -> None:
        self._config = config
        self._plan = plan
        self._gates = gates
        self._request = request
        self._calls = calls
        self._reader = reader
        self._caller = caller
        self._own = Sequence(request.correlation_id, request.sequence_flags)
        self._writes_to_clients = any(output.region is not None for output in request.outputs)
        self._selection = plan.select(output.name for output in request.outputs)
        self._run: EnsembleRun[Value] = EnsembleRun(self._selection, plan.is_decoupled)
        self._runs = 0
        self._whole: dict[str, Value] | None = None  # the one response of an ensemble that isn't decoupled
        self._has_responded = False
        self._is_over = False
        self.phases_ns = [0, 0, 0]
        """Compute input, infer and output of its steps so far, summed up."""

    def begin(self) -> None:
        """Starts the steps that the request's own tensors are enough for."""
        self._runs += 1
        given = {tensor.name: Value(tensor) for tensor in self._request.inputs}
        with self._guarded():
            self._do(self._run.begin(given, self._plan.inputs - given.keys()))

    def cancel(self) -> None:
        """Gives everything up; the caller is told nothing any more."""
        self._drop(self._run.cancel())
        self._release_whole()

    def _do(self, actions: Actions[Value]) -> None:
        run = self._run
        self._drop(actions)
        for outputs in actions.respond:
            if self._plan.is_decoupled:
                self._respond(outputs)
            else:
                self._whole = outputs
        for call in actions.start:
            if run is not self._run or run.has_ended:
                return  # one of them could not be started
            self._gates.enter(call.step.number, call, partial(self._start, call))
        if actions.ended:
            self._end(actions.is_deadlock)

    def _drop(self, actions: Actions[Value]) -> None:
        for value in actions.release:
            self._release(value)
        for call in actions.abandon:
            self._gates.leave(call.step.number, call)
            if call.handle is not None:
                self._calls.abandon(cast(Pending, call.handle))

    def _release(self, value: Value) -> None:
        if value.is_lent:
            self._calls.release(cast(PayloadRef, value.tensor.data))

    def _release_whole(self) -> None:
        whole, self._whole = self._whole, None
        for value in (whole or {}).values():
            self._release(value)

    # Steps

    def _start(self, call: Call[Value]) -> None:
        # The place at the gate may have been given by another request, which an error of this one is none of.
        with self._guarded():
            self._submit(call)

    def _submit(self, call: Call[Value]) -> None:
        if self._run.has_ended:
            return
        try:
            pending = call.handle = self._calls.submit(self._request_of(call), partial(self._on_answer, call))
            # What the client wants in memory of its own is written there from here.
            pending.reads_content = self._writes_to_clients
        except WeirError as error:
            self._fail(call, error)

    def _request_of(self, call: Call[Value]) -> InferRequest:
        step, own = call.step, self._request
        model = self._calls.catalog.resolve(step.model, step.version)
        request = InferRequest(step.model, step.version, own.id, parameters=own.parameters)
        sequence = self._own
        for name, tensor in step.inputs:
            value = call.inputs.get(tensor)
            if value is None:
                continue
            shape = _fitting(list(value.tensor.shape), name, model.config)
            request.inputs.append(Tensor(name, value.tensor.datatype, shape, value.tensor.data))
            sequence = value.sequence or sequence
        request.outputs = [RequestedOutput(name) for name, _ in step.outputs]
        request.correlation_id, request.sequence_flags = sequence
        request.priority, request.timeout_us = own.priority, own.timeout_us
        request.deadline_ms, request.lane = own.deadline_ms, own.lane
        request.wants_moments = True
        return request

    def _on_answer(self, call: Call[Value], outcome: InferResponse | WeirError | None, is_final: bool) -> None:
        with self._guarded():
            self._take(call, outcome, is_final)

    def _take(self, call: Call[Value], outcome: InferResponse | WeirError | None, is_final: bool) -> None:
        if is_final:
            self._gates.leave(call.step.number, call)
        if isinstance(outcome, WeirError):
            if not is_final:
                self._calls.abandon(cast(Pending, call.handle))  # the rest of it is of no use
            if is_given_up(outcome):
                self._lost(call)
            else:
                self._fail(call, outcome)
            return
        if is_final:
            self._count(cast(Pending, call.handle).moments)
        outputs = None if outcome is None else self._values(call, outcome)
        self._do(self._run.responded(call, outputs, is_final))

    def _values(self, call: Call[Value], response: InferResponse) -> dict[str, Value]:
        names = dict(call.step.outputs)
        sequence = _sequence_of(call, self._own)
        changed = _changed(sequence, response.parameters)
        values: dict[str, Value] = {}
        for tensor in response.outputs:
            value = Value(tensor, changed, isinstance(tensor.data, PayloadRef))
            name = names.get(tensor.name)
            if name is None or name in values:
                self._release(value)
            else:
                values[name] = value
        return values

    def _count(self, moments: Moments | None) -> None:
        if not moments:
            return
        begun = moments.get("COMPUTE_START", 0)
        for position, name in enumerate(("COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")):
            ended = moments.get(name, begun)
            self.phases_ns[position] += max(0, ended - begun)
            begun = ended

    def _lost(self, call: Call[Value]) -> None:
        """Tensors that the step was to read have gone with the worker that had made them: all of it runs again."""
        if self._own.correlation_id:
            # A step that has run may have taken the request into its sequence's state.
            self._fail(
                call, unavailable("tensors between its steps were lost: start the sequence again", Reason.SEQUENCE_LOST)
            )
            return
        if self._has_responded or self._runs >= MAX_RUNS:
            self._fail(call, unavailable("tensors between its steps were lost; the request may be sent again"))
            return
        actions = self._run.failed(call)
        if actions.ended:
            self._gates.leave(call.step.number, call)
            self._drop(actions)
            self._run_again()

    def _run_again(self) -> None:
        self._release_whole()
        self._run = EnsembleRun(self._selection, self._plan.is_decoupled)
        self.begin()

    def _fail(self, call: Call[Value], error: WeirError) -> None:
        actions = self._run.failed(call)
        if not actions.ended:
            return
        self._gates.leave(call.step.number, call)
        self._drop(actions)
        self._release_whole()
        self._ended(self._named(error))

    # Answers

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Ends the request with an error where our own code fails: nobody else would ever answer it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - reported
            report("worker.ensembles.request: running a request", error)
            self.cancel()
            self._ended(self._named(internal("internal server error")))

    def _ended(self, error: WeirError | None) -> None:
        if not self._is_over:
            self._is_over = True
            self._caller.ended(error)

    def _end(self, is_deadlock: bool) -> None:
        if is_deadlock:
            text = (
                f"[request id: {self._request.id or '<id_unknown>'}] unexpected deadlock, at least one output is not "
                "set while no more ensemble steps can be made"
            )
            self._ended(self._named(invalid(text)))
            return
        if self._whole is not None and self._runs < MAX_RUNS and not all(map(self._is_there, self._whole.values())):
            self._run_again()
            return
        whole, self._whole = self._whole, None
        if whole is not None:
            self._respond(whole)
        self._ended(None)

    def _is_there(self, value: Value) -> bool:
        """Whether an output that was made a while ago can still be read."""
        ref = value.tensor.data
        if not isinstance(ref, PayloadRef) or not value.is_lent or lies_elsewhere(ref.segment):
            return True
        try:
            self._reader.view(ref)
        except (StalePayload, ValueError):
            return False
        return True

    def _respond(self, values: Mapping[str, Value]) -> None:
        self._has_responded = True
        outputs: list[Tensor] = []
        sequence = self._own
        for declared in self._config.output:
            value = values.get(declared.name)
            if value is None:
                continue
            tensor, sequence = value.tensor, value.sequence or sequence
            shape = _fitting(list(tensor.shape), declared.name, self._config)
            outputs.append(Tensor(declared.name, tensor.datatype, shape, tensor.data))
        self._caller.responded(outputs, _told(sequence))

    def _named(self, error: WeirError) -> WeirError:
        message = f"in ensemble '{self._config.name}', {error.message}"
        return WeirError(error.code, message, error.retry_after_s, reason=error.reason)


def _fitting(shape: list[int], name: str, config: ModelConfig) -> list[int]:
    """The shape as the model has it: where only one side has a batch dimension, it is a batch of one."""
    declared = config.input_by_name.get(name) or config.output_by_name.get(name)
    if declared is None:
        return shape
    if config.max_batch_size > 0:
        return [1, *shape] if len(shape) == len(declared.dims) else shape
    return shape[1:] if len(shape) == len(declared.dims) + 1 and shape[0] == 1 else shape


def _sequence_of(call: Call[Value], own: Sequence) -> Sequence:
    for value in call.inputs.values():
        own = value.sequence or own
    return own


def _changed(sequence: Sequence, parameters: Parameters | None) -> Sequence:
    """What a step's response parameters make of the sequence, for what follows."""
    if not parameters:
        return sequence
    correlation_id, flags = sequence
    given = parameters.get("sequence_id")
    if isinstance(given, (int, str)) and not isinstance(given, bool):
        correlation_id = given % 2**64 if isinstance(given, int) else given
    for name, flag in (("sequence_start", SEQUENCE_START), ("sequence_end", SEQUENCE_END)):
        if isinstance(parameters.get(name), bool):
            flags = flags | flag if parameters[name] else flags & ~flag
    return Sequence(correlation_id, flags)


def _told(sequence: Sequence) -> Parameters:
    """The parameters that an ensemble's response has, as in Triton."""
    return {
        "sequence_id": sequence.correlation_id,
        "sequence_start": bool(sequence.flags & SEQUENCE_START),
        "sequence_end": bool(sequence.flags & SEQUENCE_END),
    }
