"""`InFlight`: the requests that were accepted and have no answer yet, by key, and how many more may be.

The caller holds every request until its answer: it may have to send it again.
"""

from __future__ import annotations

from collections.abc import Iterator

from calls.pending import Pending
from schemas.errors import overloaded
from schemas.messages import Part

MAX_IN_FLIGHT = 50_000
"""Requests that one caller holds; more are refused at once."""

MAX_IN_FLIGHT_BYTES = 1 << 30
"""Their packed bodies together (large tensors lie in shared memory, which has its own bound)."""


class InFlight:
    """See the module. `refused` counts the requests for which there was no room."""

    __slots__ = ("_by_key", "_bytes", "_held", "_held_bytes", "refused")

    def __init__(self) -> None:
        self._by_key: dict[int, Pending] = {}
        self._bytes = 0
        self._held = 0
        self._held_bytes = 0
        self.refused = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._by_key.values())

    def check_room(self) -> None:
        """Raises WeirError (UNAVAILABLE) when there is no room for one more."""
        if len(self._by_key) + self._held >= MAX_IN_FLIGHT or self._bytes >= MAX_IN_FLIGHT_BYTES:
            self.refused += 1
            raise overloaded()

    def add(self, pending: Pending) -> None:
        """Takes a request in."""
        self._by_key[pending.key] = pending
        self._bytes += len(pending.part.body)

    def find(self, key: int) -> Pending | None:
        """The request, unless it is over."""
        return self._by_key.get(key)

    def take(self, key: int) -> Pending | None:
        """Removes a request that is over; None when it was over before."""
        pending = self._by_key.pop(key, None)
        if pending is not None:
            self._bytes -= len(pending.part.body)
        return pending

    def keys(self) -> list[int]:
        """The keys of all, oldest first."""
        return list(self._by_key)

    def replace_part(self, pending: Pending, part: Part) -> None:
        """The request is to be sent in this form from now on."""
        self._bytes += len(part.body) - len(pending.part.body)
        pending.part = part

    def hold(self, answers: int, size_bytes: int) -> None:
        """So many answers wait for their turn now: they take up room as requests do."""
        self._held = answers
        self._bytes += size_bytes - self._held_bytes
        self._held_bytes = size_bytes
