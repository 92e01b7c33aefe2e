"""What an instance adds to the requests of sequences: implicit states, control inputs and padding.

Source: Triton's `sequence_batching`.

- `ImplicitStates` (`state`): a state is an output of one request that is an input of the next request of its sequence. Each
  slot of an instance has the state of one run of a sequence and the number of requests that led to it. A request that does
  not continue exactly that run is rejected, so that no request ever runs on another's state. With checkpoints, a sequence
  can continue on another worker. `StateDeclarations` has the model's states with their initial values.
- `SequenceControls` (`control_input`): inputs of one element that tell the model whether a sequence starts or ends with the
  request, whether the row has a request at all, and the correlation id.
- Padding: rows that only keep the other rows of a batch in their positions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from copy import copy
from itertools import compress
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weir.bus.kv.sequence_states import SequenceStates, Wanted
from weir.bus.links.framing import Outgoing
from weir.bus.naming import subjects
from weir.repository.paths import MAX_TENSOR_FILE_BYTES, read_small_file
from weir.schemas.config.model_config import ModelConfig, SequenceControl, SequenceState
from weir.schemas.core.errors import Reason, WeirError, internal, invalid, unavailable
from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START, InferRequest
from weir.schemas.core.tensors import BY_CONFIG_NAME, Tensor
from weir.schemas.wire.batches import NO_REPLY, BatchEntry, BatchMessage, SequencePosition
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.transfers import pack_state, unpack_state
from weir.worker.backend_api.interface import Result

logger = logging.getLogger("weir.worker")


class _SlotState(NamedTuple):
    """The state in a slot: that of a scheduler's run `run`, after `number` requests."""

    scheduler: str
    run: int
    number: int
    tensors: list[Tensor]


class ImplicitStates:
    """The states in the slots of one instance; belongs to the instance's thread. `checkpoints` stores copies of them."""

    def __init__(self, declared: StateDeclarations, checkpoints: SequenceStates | None) -> None:
        self._declared = declared
        self._checkpoints = checkpoints if declared.checkpoint_every else None
        self._slots: dict[int, _SlotState] = {}

    def add_to(
        self, batch: BatchMessage, entries: Sequence[BatchEntry], requests: Sequence[InferRequest]
    ) -> list[WeirError | None]:
        """Adds the state of its slot to each request's inputs. Returns an error for each request without one, else None."""
        self._restore(
            batch, [entry.position for entry in entries if entry.position is not None and entry.position.restore]
        )
        errors: list[WeirError | None] = []
        found: list[Tensor] | None = None
        for entry, request in zip(entries, requests, strict=True):
            place = entry.position
            if place is None:
                errors.append(None if entry.gateway == NO_REPLY else internal("the request has no place in a sequence"))
                continue
            tensors = self._state_for(batch.scheduler, place)
            if tensors is None:
                errors.append(self._lost(request))
                continue
            request.inputs += tensors
            found = tensors
            errors.append(None)
        # Padding takes the state of another row, which has the right shape, and leaves none.
        for entry, request in zip(entries, requests, strict=True):
            if entry.position is None:
                request.inputs += found if found is not None else self._declared.initial
        return errors

    def pass_over(self, batch: BatchMessage, entries: Sequence[BatchEntry]) -> list[Outgoing]:
        """Records entries that do not run. As after a failed request, the next requests continue from the same states.

        Returns messages as `keep` does.
        """
        self._restore(
            batch, [entry.position for entry in entries if entry.position is not None and entry.position.restore]
        )
        messages: list[Outgoing] = []
        for entry in entries:
            tensors = None if entry.position is None else self._state_for(batch.scheduler, entry.position)
            if entry.position is not None and tensors is not None:
                messages += self._leave(batch, entry, entry.position, tensors, has_failed=True)
        return messages

    def alike(self, requests: Sequence[InferRequest]) -> list[list[int]]:
        """The positions of the requests in groups whose states have the same shapes: only those can share a batch."""
        groups: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        states = len(self._declared.states)
        for position, request in enumerate(requests):
            shapes = tuple(tuple(tensor.shape) for tensor in request.inputs[-states:])
            groups.setdefault(shapes, []).append(position)
        return list(groups.values())

    def keep(self, batch: BatchMessage, entries: Sequence[BatchEntry], outcomes: list[Result | None]) -> list[Outgoing]:
        """Stores the states in the outcomes for the next requests; returns the messages that checkpoint them.

        A failed request does not change the state.
        """
        messages: list[Outgoing] = []
        for position, (entry, outcome) in enumerate(zip(entries, outcomes, strict=True)):
            place = entry.position
            if place is None or outcome is None:
                continue
            tensors = None if outcome.error is not None else self._declared.as_inputs(list(outcome.states))
            if tensors is None and outcome.error is None:
                outcomes[position] = Result(error=internal("the model has not output the states it declares"))
            if tensors is None:
                messages += self._leave(batch, entry, place, self._slots[place.slot].tensors, has_failed=True)
            else:
                kept = [_with_own_memory(tensor, len(entries) > 1) for tensor in tensors]
                messages += self._leave(batch, entry, place, kept, has_failed=False)
        return messages

    def _state_for(self, scheduler: str, place: SequencePosition) -> list[Tensor] | None:
        if place.number == 0:
            self._slots[place.slot] = _SlotState(scheduler, place.run, 0, self._declared.initial)
        state = self._slots.get(place.slot)
        if state is None or (state.scheduler, state.run, state.number) != (scheduler, place.run, place.number):
            return None
        return state.tensors

    def _leave(
        self, batch: BatchMessage, entry: BatchEntry, place: SequencePosition, tensors: list[Tensor], has_failed: bool
    ) -> list[Outgoing]:
        """Stores the state for the request after this one."""
        if has_failed and entry.gateway == NO_REPLY:
            del self._slots[place.slot]  # a repeated request failed that had succeeded before: the state is another one
            return []
        self._slots[place.slot] = _SlotState(batch.scheduler, place.run, place.number + 1, tensors)
        return [] if self._checkpoints is None else self._checkpoint(batch, entry, place, tensors, has_failed)

    def _checkpoint(
        self, batch: BatchMessage, entry: BatchEntry, place: SequencePosition, tensors: list[Tensor], has_failed: bool
    ) -> list[Outgoing]:
        assert self._checkpoints is not None  # noqa: S101 - checked by the caller
        key = _key(batch, place)
        if place.flags & SEQUENCE_END:
            return self._checkpoints.removed(key)
        number, every, last = place.number + 1, self._declared.checkpoint_every, (entry.gateway, entry.key)
        if number % every == 0:
            return self._checkpoints.written(key, number, every, pack_state(tensors), last)
        if has_failed:
            # Repeated from an earlier checkpoint the request might succeed, and the state would be another one.
            return self._checkpoints.broken(key)
        return [] if entry.gateway == NO_REPLY else self._checkpoints.requested(key, number, every, entry.body, last)

    def _restore(self, batch: BatchMessage, places: Sequence[SequencePosition]) -> None:
        for place in places:
            self._slots.pop(place.slot, None)
        if not places or self._checkpoints is None:
            return
        every = self._declared.checkpoint_every
        wanted: dict[str, SequencePosition] = {_key(batch, place): place for place in places}
        queries: list[Wanted] = [(key, place.number, every) for key, place in wanted.items()]
        try:
            states = self._checkpoints.fetch(queries)
        except FutureTimeoutError:
            logger.warning(
                "model '%s': the checkpoints of %d sequences did not arrive in time; the sequences are lost",
                batch.model,
                len(queries),
            )
            return
        for key, data in states.items():
            place = wanted[key]
            try:
                tensors = self._declared.as_inputs(unpack_state(data))
            except MalformedMessage as error:
                logger.warning(
                    "model '%s': a checkpoint is malformed, and its sequence is lost: %s", batch.model, error
                )
                continue
            if tensors is not None:
                self._slots[place.slot] = _SlotState(batch.scheduler, place.run, place.number, tensors)

    def _lost(self, request: InferRequest) -> WeirError:
        return unavailable(
            f"the state of sequence {request.correlation_id} of model '{self._declared.model}' was lost with its "
            "instance: start the sequence again",
            Reason.SEQUENCE_LOST,
        )


def _key(batch: BatchMessage, place: SequencePosition) -> str:
    for name in batch.checkpoints:
        if name.run == place.run:
            origin = name.origin_scheduler, name.origin_run
            return subjects.sequence_key(batch.model, batch.version, name.id, *origin)
    raise internal(f"the batch does not name the checkpoint of run {place.run}")


def _with_own_memory(tensor: Tensor, is_shared: bool) -> Tensor:
    """The tensor with a copy of its content, if that is a view of a whole batch."""
    if is_shared and not isinstance(tensor.data, tuple):
        tensor.data = bytes(tensor.data)
    return tensor


INITIAL_STATE_FOLDER = "initial_state"
_EMPTY_STRING = bytes(4)


class DeclaredState:
    """One state: its input and output, its dims (with the batch dimension if there is one; -1 for any size), its initial
    value.
    """

    def __init__(self, state: SequenceState, batching: bool, folder: Path, model: str) -> None:
        datatype = BY_CONFIG_NAME[state.data_type]
        self.input_name = state.input_name
        self.output_name = state.output_name
        self.datatype = datatype.name
        batch = [1] if batching else []
        self.dims = [*batch, *state.dims]
        initial = state.initial_state[0] if state.initial_state else None
        dims = initial.dims if initial is not None else [max(1, dim) for dim in state.dims]
        size = prod(dims) * (datatype.size_bytes or len(_EMPTY_STRING))
        content = bytes(size)
        if initial is not None and initial.zero_data is None and initial.data_file:
            content = _read(folder / INITIAL_STATE_FOLDER / initial.data_file, state.input_name, model)
            if len(content) != size and (datatype.size_bytes or len(content) < size):
                raise invalid(
                    f"initial_state setting expects {size} bytes, but the data provided from {initial.data_file} only "
                    f"has {len(content)} bytes"
                )
        self.initial = Tensor(self.input_name, self.datatype, [*batch, *dims], content)

    def fits(self, tensor: Tensor) -> bool:
        """Whether the tensor has the state's datatype and shape."""
        return (
            tensor.datatype == self.datatype
            and len(tensor.shape) == len(self.dims)
            and all(dim in (-1, given) for dim, given in zip(self.dims, tensor.shape, strict=True))
        )


class StateDeclarations:
    """The states of one model version. Raises WeirError for an initial value that can't be read.

    A state is checkpointed after every `checkpoint_every` requests of its sequence; never if that is 0.
    """

    def __init__(self, config: ModelConfig, folder: Path) -> None:
        batching = config.sequence_batching
        self.states = [
            DeclaredState(state, config.max_batch_size > 0, folder, config.name)
            for state in (batching.state if batching is not None else ())
        ]
        self.checkpoint_every = config.checkpoint_every if self.states else 0
        self.model = config.name

    @property
    def initial(self) -> list[Tensor]:
        """The states with which a sequence starts."""
        return [state.initial for state in self.states]

    def as_inputs(self, tensors: list[Tensor]) -> list[Tensor] | None:
        """The states as inputs of the model, from `tensors` that are outputs or inputs; None if one is missing."""
        by_name = {tensor.name: tensor for tensor in tensors}
        inputs: list[Tensor] = []
        for state in self.states:
            tensor = by_name.get(state.output_name) or by_name.get(state.input_name)
            if tensor is None or not state.fits(tensor):
                return None
            inputs.append(Tensor(state.input_name, tensor.datatype, tensor.shape, tensor.data))
        return inputs


def _read(path: Path, state: str, model: str) -> bytes:
    try:
        return read_small_file(path, MAX_TENSOR_FILE_BYTES)
    except OSError as error:
        raise _unreadable(path.name, state, model, error) from error


def _unreadable(name: str, state: str, model: str, error: OSError) -> WeirError:
    return invalid(f"failed to read initial state file '{name}' of state '{state}' for {model}: {error.strerror}")


def pad_rows(positions: list[int], requests: list[InferRequest]) -> frozenset[int]:
    """Inserts padding at the positions of entries that can't run, up to the last one that can; returns these positions."""
    missing = frozenset(range(positions[-1])).difference(positions) if positions else frozenset()
    for position in sorted(missing):
        padding = copy(requests[0])
        padding.inputs = [copy(tensor) for tensor in padding.inputs]  # each is reshaped by itself
        positions.insert(position, position)
        requests.insert(position, padding)
    return missing


def is_padding(entry: BatchEntry) -> bool:
    """Whether the scheduler added the row as a copy of another one, to fill the batch."""
    return entry.gateway == NO_REPLY and entry.position is None


def apply_position(request: InferRequest, entry: BatchEntry, is_reference: bool) -> None:
    """Sets the request's flags and correlation id for its sequence. Raises WeirError if the request can't be repeated."""
    place = entry.position
    assert place is not None  # noqa: S101 - checked by the caller
    request.sequence_flags = place.flags
    request.correlation_id = request.correlation_id or place.run
    if entry.gateway == NO_REPLY and (is_reference or any(isinstance(tensor.data, tuple) for tensor in request.inputs)):
        # The request has its response, so its slots in shared memory may have been reused.
        raise unavailable("a request whose content was in shared memory can't run again", Reason.NOT_REPEATABLE)


def restorable(
    states: ImplicitStates,
    batch: BatchMessage,
    positions: list[int],
    requests: list[InferRequest],
    results: list[Result | None],
) -> tuple[list[int], list[InferRequest]]:
    """The positions and requests whose states are available; stores an error in `results` for each of the others."""
    errors = states.add_to(batch, [batch.entries[position] for position in positions], requests)
    for position, error in zip(positions, errors, strict=True):
        if error is not None:
            results[position] = Result(error=error)
    kept = [error is None for error in errors]
    return list(compress(positions, kept)), list(compress(requests, kept))


_Value = Callable[[InferRequest, bool], Tensor]


class SequenceControls:
    """Adds a model's control inputs to requests."""

    def __init__(self, config: ModelConfig) -> None:
        shape = [1, 1] if config.max_batch_size > 0 else [1]
        control_inputs = config.sequence_batching.control_input if config.sequence_batching is not None else ()
        self._controls: list[_Value] = [
            _control(control_input.name, control, shape)
            for control_input in control_inputs
            for control in control_input.control
        ]

    @property
    def is_needed(self) -> bool:
        """Whether the model has control inputs."""
        return bool(self._controls)

    def add_to(self, requests: Iterable[InferRequest], ready: Iterable[bool]) -> None:
        """Adds the controls to each request; `ready` is False for padding."""
        for request, is_ready in zip(requests, ready, strict=True):
            request.inputs += [value(request, is_ready) for value in self._controls]


def control_datatypes(config: ModelConfig) -> dict[str, str]:
    """The datatypes of a model's control inputs, each of which has one element in a row."""
    controls = config.sequence_batching.control_input if config.sequence_batching is not None else ()
    return {control.name: _control_datatype(kind) for control in controls for kind in control.control}


def _control_datatype(control: SequenceControl) -> str:
    if control.kind == "CONTROL_SEQUENCE_CORRID":
        return BY_CONFIG_NAME[control.data_type].name
    return "INT32" if control.int32_false_true else "FP32" if control.fp32_false_true else "BOOL"


def _control(name: str, control: SequenceControl, shape: list[int]) -> _Value:
    if control.kind == "CONTROL_SEQUENCE_CORRID":
        return _correlation_id(name, control, shape)
    if control.int32_false_true:
        datatype, values = "INT32", np.array(control.int32_false_true, np.int32)
    elif control.fp32_false_true:
        datatype, values = "FP32", np.array(control.fp32_false_true, np.float32)
    else:
        datatype, values = "BOOL", np.array(control.bool_false_true, np.bool_)
    off, on = (Tensor(name, datatype, shape, value.tobytes()) for value in values)
    flag = {"CONTROL_SEQUENCE_START": SEQUENCE_START, "CONTROL_SEQUENCE_END": SEQUENCE_END}.get(control.kind)
    if flag is None:
        return lambda request, is_ready: on if is_ready else off
    return lambda request, is_ready: on if is_ready and request.sequence_flags & flag else off


def _correlation_id(name: str, control: SequenceControl, shape: list[int]) -> _Value:
    datatype = BY_CONFIG_NAME[control.data_type]

    def value(request: InferRequest, is_ready: bool) -> Tensor:
        id = request.correlation_id if is_ready else 0
        if datatype.name == "BYTES":
            return Tensor.from_numpy(
                name, np.array(str(id).encode() if is_ready else b"", np.object_).reshape(shape), "BYTES"
            )
        # A narrower control gets the low bits, as in Triton.
        number = np.array([id if isinstance(id, int) else 0], np.uint64).astype(datatype.numpy)
        return Tensor(name, datatype.name, shape, number.tobytes())

    return value
