"""`ImplicitStates`: the states that the sequences in an instance's slots have left to their next requests.

Each slot names the run of the sequence whose state it has, and how many requests have made it. A request that does not
follow them is refused: whatever went wrong before, it is never run on a state that is not its own. With checkpoints the
state of a sequence can come from another worker, and go there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import NamedTuple

from bus import subjects
from bus.sequence_states import SequenceStates, Wanted
from bus.thread_publisher import Outgoing
from schemas.errors import Reason, WeirError, internal, unavailable
from schemas.messages import NOBODY, BatchEntry, BatchMessage, SequencePlace
from schemas.requests import SEQUENCE_END, InferRequest
from schemas.sequence_states import pack_state, unpack_state
from schemas.tensors import Tensor
from schemas.wire import MalformedMessage
from worker.backend import Result
from worker.state_declarations import StateDeclarations

logger = logging.getLogger("weir.worker")


class _SlotState(NamedTuple):
    """The state in a slot: of this run of this scheduler's, after so many requests."""

    scheduler: str
    run: int
    number: int
    tensors: list[Tensor]


class ImplicitStates:
    """See the module. One for each instance; all of it belongs to the instance's thread.

    `checkpoints` is where states are kept besides, None for nowhere.
    """

    def __init__(self, declared: StateDeclarations, checkpoints: SequenceStates | None) -> None:
        self._declared = declared
        self._checkpoints = checkpoints if declared.checkpoint_every else None
        self._slots: dict[int, _SlotState] = {}

    def add_to(
        self, batch: BatchMessage, entries: Sequence[BatchEntry], requests: Sequence[InferRequest]
    ) -> list[WeirError | None]:
        """Gives each request the state of its slot as further inputs; an error for one whose state is not there."""
        self._restore(batch, [entry.place for entry in entries if entry.place is not None and entry.place.restore])
        refused: list[WeirError | None] = []
        found: list[Tensor] | None = None
        for entry, request in zip(entries, requests, strict=True):
            place = entry.place
            if place is None:
                refused.append(None if entry.gateway == NOBODY else internal("the request has no place in a sequence"))
                continue
            tensors = self._state_for(batch.scheduler, place)
            if tensors is None:
                refused.append(self._lost(request))
                continue
            request.inputs += tensors
            found = tensors
            refused.append(None)
        # Null rows are nobody's: they take the state of another, so that they are of its shape, and leave none.
        for entry, request in zip(entries, requests, strict=True):
            if entry.place is None:
                request.inputs += found if found is not None else self._declared.initial
        return refused

    def pass_over(self, batch: BatchMessage, entries: Sequence[BatchEntry]) -> list[Outgoing]:
        """These are not run: as those that fail, they leave the states as they are, for the next ones to go on from.

        Returns messages as `keep` does.
        """
        self._restore(batch, [entry.place for entry in entries if entry.place is not None and entry.place.restore])
        messages: list[Outgoing] = []
        for entry in entries:
            tensors = None if entry.place is None else self._state_for(batch.scheduler, entry.place)
            if entry.place is not None and tensors is not None:
                messages += self._leave(batch, entry, entry.place, tensors, has_failed=True)
        return messages

    def alike(self, requests: Sequence[InferRequest]) -> list[list[int]]:
        """The positions of the requests whose states have the same shapes, together: others can't be joined."""
        groups: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        states = len(self._declared.states)
        for position, request in enumerate(requests):
            shapes = tuple(tuple(tensor.shape) for tensor in request.inputs[-states:])
            groups.setdefault(shapes, []).append(position)
        return list(groups.values())

    def keep(self, batch: BatchMessage, entries: Sequence[BatchEntry], outcomes: list[Result | None]) -> list[Outgoing]:
        """Takes the states out of the outcomes, for the next requests; returns the messages that checkpoint them.

        A request that failed leaves the state as it was.
        """
        messages: list[Outgoing] = []
        for position, (entry, outcome) in enumerate(zip(entries, outcomes, strict=True)):
            place = entry.place
            if place is None or outcome is None:
                continue
            tensors = None if outcome.error is not None else self._declared.as_inputs(list(outcome.states))
            if tensors is None and outcome.error is None:
                outcomes[position] = Result(error=internal("the model has not output the states it declares"))
            if tensors is None:
                messages += self._leave(batch, entry, place, self._slots[place.slot].tensors, has_failed=True)
            else:
                kept = [_owned(tensor, len(entries) > 1) for tensor in tensors]
                messages += self._leave(batch, entry, place, kept, has_failed=False)
        return messages

    def _state_for(self, scheduler: str, place: SequencePlace) -> list[Tensor] | None:
        if place.number == 0:
            self._slots[place.slot] = _SlotState(scheduler, place.run, 0, self._declared.initial)
        state = self._slots.get(place.slot)
        if state is None or (state.scheduler, state.run, state.number) != (scheduler, place.run, place.number):
            return None
        return state.tensors

    def _leave(
        self, batch: BatchMessage, entry: BatchEntry, place: SequencePlace, tensors: list[Tensor], has_failed: bool
    ) -> list[Outgoing]:
        """The request is over, and this state is for the next one."""
        if has_failed and entry.gateway == NOBODY:
            del self._slots[place.slot]  # what succeeded before has failed: this is not the state it was
            return []
        self._slots[place.slot] = _SlotState(batch.scheduler, place.run, place.number + 1, tensors)
        return [] if self._checkpoints is None else self._checkpoint(batch, place, tensors, has_failed)

    def _checkpoint(
        self, batch: BatchMessage, place: SequencePlace, tensors: list[Tensor], has_failed: bool
    ) -> list[Outgoing]:
        assert self._checkpoints is not None  # noqa: S101 - asked by the caller
        key = _key(batch, place)
        if place.flags & SEQUENCE_END:
            return self._checkpoints.removed(key)
        number, every = place.number + 1, self._declared.checkpoint_every
        if number % every == 0:
            return self._checkpoints.written(key, number, every, pack_state(tensors))
        # It would run again from an earlier checkpoint, and perhaps not fail: then the state would not be this one.
        return self._checkpoints.broken(key) if has_failed else []

    def _restore(self, batch: BatchMessage, places: Sequence[SequencePlace]) -> None:
        for place in places:
            self._slots.pop(place.slot, None)
        if not places or self._checkpoints is None:
            return
        every = self._declared.checkpoint_every
        wanted: dict[str, SequencePlace] = {_key(batch, place): place for place in places}
        asked: list[Wanted] = [(key, place.number, every) for key, place in wanted.items()]
        try:
            states = self._checkpoints.fetch(asked)
        except FutureTimeoutError:
            logger.warning("model '%s': the checkpoints of %d sequences did not come", batch.model, len(asked))
            return
        for key, data in states.items():
            place = wanted[key]
            try:
                tensors = self._declared.as_inputs(unpack_state(data))
            except MalformedMessage as error:
                logger.warning("model '%s': a checkpoint makes no sense: %s", batch.model, error)
                continue
            if tensors is not None:
                self._slots[place.slot] = _SlotState(batch.scheduler, place.run, place.number, tensors)

    def _lost(self, request: InferRequest) -> WeirError:
        return unavailable(
            f"the state of sequence {request.correlation_id} of model '{self._declared.model}' was lost with its "
            "instance: start the sequence again",
            Reason.SEQUENCE_LOST,
        )


def _key(batch: BatchMessage, place: SequencePlace) -> str:
    return subjects.sequence_key(batch.model, batch.version, batch.scheduler, place.run)


def _owned(tensor: Tensor, is_shared: bool) -> Tensor:
    """The tensor with content of its own, where it is a view of a whole batch."""
    if is_shared and not isinstance(tensor.data, tuple):
        tensor.data = bytes(tensor.data)
    return tensor
