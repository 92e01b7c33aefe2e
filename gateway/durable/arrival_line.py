"""`ArrivalLine`: durable requests that came after a takeover, while it is looked up which of them have their records.

The answers come in any order, and requests that nobody can have begun need none. They are admitted in the order of the
stream all the same: one of a sequence must not overtake another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from gateway.durable.durable_request import DurableRequest, Stage


class ArrivalLine:
    """See the module. `admit` is called with those whose turn it is, ended ones among them."""

    def __init__(self, admit: Callable[[DurableRequest], None]) -> None:
        self._admit = admit
        self._line: deque[DurableRequest] = deque()
        self._asked: set[int] = set()

    def __len__(self) -> int:
        return len(self._line)

    def add(self, request: DurableRequest, is_asked: bool) -> None:
        """The request came; `is_asked`: `settled` tells when it is known to have no record."""
        self._line.append(request)
        if is_asked:
            self._asked.add(request.delivery.sequence)

    def settled(self, request: DurableRequest) -> None:
        """The request has no record."""
        self._asked.discard(request.delivery.sequence)
        self.advance()

    def advance(self) -> None:
        """Admits those of which all is known, up to the first that has to wait."""
        while self._line and (self._line[0].delivery.sequence not in self._asked or self._is_over(self._line[0])):
            request = self._line.popleft()
            self._asked.discard(request.delivery.sequence)
            self._admit(request)

    def clear(self) -> None:
        """Nothing is here any more."""
        self._line.clear()
        self._asked.clear()

    @staticmethod
    def _is_over(request: DurableRequest) -> bool:
        return request.stage in (Stage.ENDING, Stage.ENDED)
