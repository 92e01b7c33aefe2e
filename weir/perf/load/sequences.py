"""`SequenceSource` and `Sequence`: which request of which sequence comes next."""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START


class SequenceStep(NamedTuple):
    """The place of a request in its sequence: its correlation id, its number from 0, `SEQUENCE_START` and `_END` flags."""

    correlation_id: int | str
    number: int
    flags: int


class Sequence:
    """One sequence of `length` requests. The caller sends one request after the other."""

    def __init__(self, correlation_id: int | str, length: int) -> None:
        self._correlation_id = correlation_id
        self._length = length
        self._sent = 0

    @property
    def is_over(self) -> bool:
        """Whether all requests have been sent."""
        return self._sent >= self._length

    @property
    def is_open(self) -> bool:
        """Whether the server has the start of the sequence, and not its end."""
        return 0 < self._sent < self._length

    def next_step(self) -> SequenceStep:
        """The next request."""
        number, self._sent = self._sent, self._sent + 1
        flags = (SEQUENCE_START if number == 0 else 0) | (SEQUENCE_END if self.is_over else 0)
        return SequenceStep(self._correlation_id, number, flags)

    def last_step(self) -> SequenceStep:
        """A request that ends the sequence early."""
        number, self._sent = self._sent, self._length
        return SequenceStep(self._correlation_id, number, SEQUENCE_END)


class SequenceSource:
    """Begins sequences of `length` requests with ids from `first_id` on, as text where the model takes text."""

    def __init__(self, length: int, first_id: int, as_text: bool = False) -> None:
        self._length = length
        self._ids = count(first_id)
        self._as_text = as_text

    def begin(self) -> Sequence:
        """A new sequence."""
        number = next(self._ids)
        return Sequence(f"perf-{number}" if self._as_text else number, self._length)
