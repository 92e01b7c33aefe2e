"""`StatefulWorkers`: what workers would make of the batches of a stateful model, with the states in their slots."""

from __future__ import annotations

from typing import NamedTuple

from scheduler.batch import Batch
from scheduler.placement import Instance


class _State(NamedTuple):
    run: int
    number: int
    made_of: list[bytes]


class StatefulWorkers:
    """The state of a sequence is the bodies of the requests that made it; checkpoints are written `every` so many."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._slots: dict[tuple[Instance, int], _State] = {}
        self._checkpoints: dict[tuple[int, int], _State] = {}
        self._expected: dict[int, list[list[bytes] | None]] = {}

    def expect(self, batch: Batch, states: list[list[bytes] | None]) -> None:
        """The requests of the batch must find states that are made of these."""
        self._expected[batch.id] = states

    def run(self, batch: Batch) -> None:
        """Runs the batch; asserts that each request follows those whose state it finds."""
        for request, place, expected in zip(batch.requests, batch.places, self._expected.pop(batch.id), strict=True):
            where = (batch.instance, place.slot)
            if place.number == 0:
                assert not place.restore
                self._slots[where] = _State(place.run, 0, [])
            elif place.restore:
                state = self._checkpoints[place.run, place.number // self._every % 2]
                assert state.number == place.number, "this checkpoint is not there"
                self._slots[where] = state
            state = self._slots[where]
            assert (state.run, state.number) == (place.run, place.number), "not the state of this sequence"
            assert expected is None or state.made_of == expected
            after = _State(place.run, place.number + 1, [*state.made_of, request.body])
            self._slots[where] = after
            if self._every and after.number % self._every == 0:
                self._checkpoints[place.run, after.number // self._every % 2] = after

    def lose(self, worker: str) -> None:
        """The worker is gone, and so are its states."""
        self._slots = {where: state for where, state in self._slots.items() if where[0].worker != worker}
