"""`EnsembleRun`: one request on its way through an ensemble; a state machine without clock, bus or loop.

It is told which tensors arrived and which calls ended, and returns what is to be done: steps to start, responses to send,
tensors nobody needs any more, calls to give up. Values of tensors are opaque to it.

A response of a step opens what follows from it. One of a decoupled step opens an *iteration* of its own: tensors of
different iterations never meet, and each one that brings all requested outputs is a response of the ensemble. A mapped
tensor that a response lacks counts as arrived without a value: optional inputs of steps may stay unset.

Promises, whatever order events come in:
- the run ends exactly once, and nothing is to be done after that;
- each value is handed over in a response or released, once: when its last user has ended, or the run has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from worker.ensembles.plan import Selection, Step

V = TypeVar("V")


class _Held(Generic[V]):
    """A value, and how many calls and responses still need it."""

    __slots__ = ("users", "value")

    def __init__(self, value: V, users: int) -> None:
        self.value = value
        self.users = users


class _Iteration(Generic[V]):
    """Tensors that belong together: by name, None for one that arrived without a value."""

    __slots__ = ("arrived", "has_responded", "started")

    def __init__(self) -> None:
        self.arrived: dict[str, _Held[V] | None] = {}
        self.started: set[int] = set()
        self.has_responded = False


class Call(Generic[V]):
    """A step that was started, with the values it takes by the ensemble's names."""

    __slots__ = ("_iteration", "handle", "inputs", "step")

    def __init__(self, step: Step, iteration: _Iteration[V], inputs: dict[str, V]) -> None:
        self.step = step
        self._iteration = iteration
        self.inputs = inputs
        self.handle: object = None
        """Whatever the shell keeps with it."""


@dataclass(slots=True)
class Actions(Generic[V]):
    """What is to be done, in this order: `release` before anything else, the end last.

    `respond` are values of the requested outputs, which whoever sends them owns from now on. `ended`: the run has ended;
    `is_deadlock`: it did so without a response, though it owes one.
    """

    start: list[Call[V]] = field(default_factory=list)
    respond: list[dict[str, V]] = field(default_factory=list)
    release: list[V] = field(default_factory=list)
    abandon: list[Call[V]] = field(default_factory=list)
    ended: bool = False
    is_deadlock: bool = False


class EnsembleRun(Generic[V]):
    """See the module. `is_decoupled`: the ensemble may answer any number of times, none among them."""

    def __init__(self, selection: Selection, is_decoupled: bool) -> None:
        self._selection = selection
        self._is_decoupled = is_decoupled
        self._running: set[Call[V]] = set()
        self._held: set[_Held[V]] = set()
        self._has_responded = False
        self.has_ended = False

    def begin(self, inputs: Mapping[str, V], absent: frozenset[str]) -> Actions[V]:
        """The request's own tensors; those in `absent` are not given."""
        actions: Actions[V] = Actions()
        root: _Iteration[V] = _Iteration()
        self._arrive(root, {**dict.fromkeys(absent), **inputs}, actions)
        return self._settle(actions)

    def responded(self, call: Call[V], outputs: Mapping[str, V] | None, is_last: bool) -> Actions[V]:
        """A step has answered, with these values by the ensemble's names (None: with no response), perhaps for good.

        What comes for a call that has ended or was given up is released at once.
        """
        actions: Actions[V] = Actions()
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

    def failed(self, call: Call[V]) -> Actions[V]:
        """A step has failed, and the request with it; nothing happens where it was given up before."""
        if call not in self._running:
            return Actions()
        self._running.discard(call)
        return self.cancel()

    def cancel(self) -> Actions[V]:
        """The request is given up, or has failed: everything else is too. Only the first end counts."""
        actions: Actions[V] = Actions()
        if not self.has_ended:
            actions.abandon += self._running
            self._end(actions)
        return actions

    def _arrive(self, iteration: _Iteration[V], tensors: Mapping[str, V | None], actions: Actions[V]) -> None:
        selection = self._selection
        takers: dict[int, Step] = {}
        for tensor, value in tensors.items():
            if tensor in iteration.arrived:
                # A model that answers once can't answer twice; whatever sent it, the first one counts.
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

    def _start(self, step: Step, iteration: _Iteration[V], actions: Actions[V]) -> None:
        taken = {tensor: iteration.arrived[tensor] for _, tensor in step.inputs}
        call = Call(step, iteration, {tensor: held.value for tensor, held in taken.items() if held is not None})
        self._running.add(call)
        actions.start.append(call)

    def _leave(self, call: Call[V], actions: Actions[V]) -> None:
        for tensor in call.inputs:
            held = call._iteration.arrived[tensor]
            assert held is not None  # noqa: S101 - the call took its value
            held.users -= 1
            if not held.users:
                self._release(held, actions)

    def _respond_if_whole(self, iteration: _Iteration[V], actions: Actions[V]) -> None:
        """Responds with what an iteration has brought, once calls need nothing of it any more: it is handed over."""
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

    def _settle(self, actions: Actions[V]) -> Actions[V]:
        if not self._running and not self.has_ended:
            actions.is_deadlock = not (self._has_responded or self._is_decoupled)
            self._end(actions)
        return actions

    def _end(self, actions: Actions[V]) -> None:
        self.has_ended = actions.ended = True
        self._running.clear()
        for held in list(self._held):
            self._release(held, actions)

    def _release(self, held: _Held[V], actions: Actions[V]) -> None:
        self._held.discard(held)
        actions.release.append(held.value)
