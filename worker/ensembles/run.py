"""`EnsemblePlan` and `EnsembleRun`: which steps of an ensemble a request needs, and how it proceeds through them.

Source: Triton's ensembles. A step runs when all its input tensors are available; a step that contributes to none of the
requested outputs does not run.

`EnsembleRun` is a state machine without clock, bus and event loop. It gets events (tensors are available, a call has ended)
and returns actions: steps to start, responses to send, values to release, calls to cancel. Values are opaque to it.

Each response of a decoupled step opens an *iteration*: tensors of different iterations never meet in a step, and each
iteration that has all requested outputs is a response of the ensemble. A mapped tensor that a response lacks counts as
available without a value, so that optional inputs stay unset.

Whatever the order of events:
- the run ends exactly once, and returns no actions afterwards;
- each value is either part of a response or released, once: when its last user has ended, or the run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from weir.repository.dependencies import step_identity
from weir.schemas.config.model_config import ModelConfig

_MAX_SELECTIONS = 64


class PlanStep(NamedTuple):
    """One step: `inputs` and `outputs` are (tensor of the model, tensor of the ensemble); `version` is "" for the latest.

    A model that `is_decoupled` may send any number of responses.
    """

    number: int
    model: str
    version: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    is_decoupled: bool = False


class StepSelection(NamedTuple):
    """The steps that a request for `outputs` needs, by index, and for each tensor the steps that take it."""

    outputs: frozenset[str]
    steps: dict[int, PlanStep]
    takers: dict[str, tuple[PlanStep, ...]]


class EnsemblePlan:
    """The steps of the valid ensemble `config`; `decoupled` names the models that are decoupled."""

    def __init__(self, config: ModelConfig, decoupled: Collection[str] = ()) -> None:
        scheduling = config.ensemble_scheduling
        rows = [] if scheduling is None else scheduling.step
        self.steps = tuple(
            PlanStep(
                index,
                step_identity(row),
                "" if row.model_version < 0 else str(row.model_version),
                tuple(row.input_map.items()),
                tuple(row.output_map.items()),
                step_identity(row) in decoupled,
            )
            for index, row in enumerate(rows)
        )
        self.inputs = frozenset(tensor.name for tensor in config.input)
        self.outputs = tuple(tensor.name for tensor in config.output)
        self.is_decoupled = any(step.is_decoupled for step in self.steps)
        self._writers = {tensor: step for step in self.steps for _, tensor in step.outputs}
        self._selections: dict[frozenset[str], StepSelection] = {}

    def select(self, outputs: Iterable[str]) -> StepSelection:
        """The steps for these outputs, or for all outputs if there are none. Recent selections are cached."""
        wanted = frozenset(outputs) or frozenset(self.outputs)
        selection = self._selections.get(wanted)
        if selection is None:
            if len(self._selections) >= _MAX_SELECTIONS:
                self._selections.clear()
            selection = self._selections[wanted] = self._select(wanted)
        return selection

    def _select(self, wanted: frozenset[str]) -> StepSelection:
        needed: dict[int, PlanStep] = {}
        tensors = list(wanted)
        while tensors:
            step = self._writers.get(tensors.pop())
            if step is not None and step.number not in needed:
                needed[step.number] = step
                tensors += [tensor for _, tensor in step.inputs]
        taken = {tensor for step in needed.values() for _, tensor in step.inputs}
        # Outputs that no step takes are not requested.
        steps = {
            index: needed[index]._replace(
                outputs=tuple(row for row in needed[index].outputs if row[1] in taken or row[1] in wanted)
            )
            for index in sorted(needed)
        }
        takers = {
            tensor: tuple(step for step in steps.values() if any(row[1] == tensor for row in step.inputs))
            for tensor in taken
        }
        return StepSelection(wanted, steps, takers)


V = TypeVar("V")


class _Held(Generic[V]):
    """A value, and how many calls and responses still need it."""

    __slots__ = ("users", "value")

    def __init__(self, value: V, users: int) -> None:
        self.value = value
        self.users = users


class _Iteration(Generic[V]):
    """Tensors that may meet in a step, by name; None for one that is available without a value."""

    __slots__ = ("arrived", "has_responded", "started")

    def __init__(self) -> None:
        self.arrived: dict[str, _Held[V] | None] = {}
        self.started: set[int] = set()
        self.has_responded = False


class StepCall(Generic[V]):
    """A started step, with its input values by the ensemble's tensor names."""

    __slots__ = ("_iteration", "handle", "inputs", "step")

    def __init__(self, step: PlanStep, iteration: _Iteration[V], inputs: dict[str, V]) -> None:
        self.step = step
        self._iteration = iteration
        self.inputs = inputs
        self.handle: object = None
        """The pending request; set by `EnsembleRequest`."""


@dataclass(slots=True)
class RunActions(Generic[V]):
    """What to do, in this order: `release` first, the end last.

    `respond` has values of the requested outputs, which the run no longer owns. `cancel` are calls without use. `ended`
    means that the run has ended; with `is_deadlock` it has ended without the response that it owes.
    """

    start: list[StepCall[V]] = field(default_factory=list)
    respond: list[dict[str, V]] = field(default_factory=list)
    release: list[V] = field(default_factory=list)
    cancel: list[StepCall[V]] = field(default_factory=list)
    ended: bool = False
    is_deadlock: bool = False


class EnsembleRun(Generic[V]):
    """The progress of one request. With `is_decoupled` the ensemble may send any number of responses, also none."""

    def __init__(self, selection: StepSelection, is_decoupled: bool) -> None:
        self._selection = selection
        self._is_decoupled = is_decoupled
        self._running: set[StepCall[V]] = set()
        self._held: set[_Held[V]] = set()
        self._has_responded = False
        self.has_ended = False

    def begin(self, inputs: Mapping[str, V], absent: frozenset[str]) -> RunActions[V]:
        """Starts the run with the request's tensors; those in `absent` have no value."""
        actions: RunActions[V] = RunActions()
        root: _Iteration[V] = _Iteration()
        self._arrive(root, {**dict.fromkeys(absent), **inputs}, actions)
        return self._settle(actions)

    def responded(self, call: StepCall[V], outputs: Mapping[str, V] | None, is_last: bool) -> RunActions[V]:
        """Handles a response of a step: values by the ensemble's tensor names, or None for an end without a response.

        Values for a call that has ended or was cancelled are released at once.
        """
        actions: RunActions[V] = RunActions()
        if call not in self._running:
            actions.release += (outputs or {}).values()
            return actions
        if is_last:
            self._running.discard(call)
            self._leave(call, actions)
        if outputs is not None:
            iteration: _Iteration[V] = _Iteration() if call.step.is_decoupled else call._iteration
            mapped = {tensor: outputs.get(tensor) for _, tensor in call.step.outputs}
            actions.release += [value for tensor, value in outputs.items() if tensor not in mapped]
            self._arrive(iteration, mapped, actions)
        if is_last:
            self._respond_if_whole(call._iteration, actions)
        return self._settle(actions)

    def failed(self, call: StepCall[V]) -> RunActions[V]:
        """Handles the failure of a step, with which the request fails; does nothing if the call was cancelled before."""
        if call not in self._running:
            return RunActions()
        self._running.discard(call)
        return self.cancel()

    def cancel(self) -> RunActions[V]:
        """Ends the run and cancels all its calls; does nothing if it has ended."""
        actions: RunActions[V] = RunActions()
        if not self.has_ended:
            actions.cancel += self._running
            self._end(actions)
        return actions

    def _arrive(self, iteration: _Iteration[V], tensors: Mapping[str, V | None], actions: RunActions[V]) -> None:
        selection = self._selection
        takers: dict[int, PlanStep] = {}
        for tensor, value in tensors.items():
            if tensor in iteration.arrived:
                # A model that is not decoupled has sent a second response: the first one counts.
                if value is not None:
                    actions.release.append(value)
                continue
            taking = selection.takers.get(tensor, ())
            for step in taking:
                takers[step.number] = step
            if value is None:
                iteration.arrived[tensor] = None
                continue
            users = len(taking) + (tensor in selection.outputs)
            if not users:
                actions.release.append(value)
                continue
            held = iteration.arrived[tensor] = _Held(value, users)
            self._held.add(held)
        for index in sorted(takers):
            step = takers[index]
            if index not in iteration.started and all(tensor in iteration.arrived for _, tensor in step.inputs):
                iteration.started.add(index)
                self._start(step, iteration, actions)
        self._respond_if_whole(iteration, actions)

    def _start(self, step: PlanStep, iteration: _Iteration[V], actions: RunActions[V]) -> None:
        taken = {tensor: iteration.arrived[tensor] for _, tensor in step.inputs}
        call = StepCall(step, iteration, {tensor: held.value for tensor, held in taken.items() if held is not None})
        self._running.add(call)
        actions.start.append(call)

    def _leave(self, call: StepCall[V], actions: RunActions[V]) -> None:
        for tensor in call.inputs:
            held = call._iteration.arrived[tensor]
            assert held is not None  # noqa: S101 - the call took its value
            held.users -= 1
            if not held.users:
                self._release(held, actions)

    def _respond_if_whole(self, iteration: _Iteration[V], actions: RunActions[V]) -> None:
        """Responds with the outputs of an iteration when all are available and no call uses them any more."""
        if iteration.has_responded:
            return
        outputs: dict[str, _Held[V]] = {}
        for tensor in self._selection.outputs:
            held = iteration.arrived.get(tensor)
            if held is None or held.users > 1:
                return
            outputs[tensor] = held
        iteration.has_responded = self._has_responded = True
        for held in outputs.values():
            self._held.discard(held)
        actions.respond.append({tensor: held.value for tensor, held in outputs.items()})

    def _settle(self, actions: RunActions[V]) -> RunActions[V]:
        if not self._running and not self.has_ended:
            actions.is_deadlock = not (self._has_responded or self._is_decoupled)
            self._end(actions)
        return actions

    def _end(self, actions: RunActions[V]) -> None:
        self.has_ended = actions.ended = True
        self._running.clear()
        for held in list(self._held):
            self._release(held, actions)

    def _release(self, held: _Held[V], actions: RunActions[V]) -> None:
        self._held.discard(held)
        actions.release.append(held.value)
