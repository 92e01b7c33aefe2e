"""`LeaseGate`: holds back events of a scheduler whose heartbeats may not have arrived, until its ownership is checked.

A process that was stopped resumes in the middle of its work with an outdated view; others may have taken its queues
meanwhile. So an event is handled only while the last heartbeat that the broker has confirmed is younger than
`LEASE_S`, which is less than the time after which others consider the process dead. Later events are buffered, and
handled once the owner of the gate has checked its records. The cost is one comparison for each event.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from weir.runtime.containment import call_each

LEASE_S = 0.75
"""For this long after a heartbeat, and longer, others do not take what this process owns."""


class LeaseGate:
    """A gate for events. It is open without limit until the first heartbeat is confirmed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._valid_until_s = float("inf")
        self._buffered: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    @property
    def is_open(self) -> bool:
        """Whether events are handled at once."""
        return self._clock() <= self._valid_until_s

    def guard(self, act: Callable[..., None]) -> Callable[..., None]:
        """Returns `act` in a form that is buffered while the gate is closed."""

        def guarded(*arguments: Any) -> None:
            if self._clock() <= self._valid_until_s:
                act(*arguments)
            else:
                # Bounded by what was requested before: nothing is requested while the gate is closed.
                self._buffered.append((act, arguments))

        return guarded

    def close(self) -> None:
        """Closes the gate: ownership must be checked."""
        self._valid_until_s = float("-inf")

    def renew(self, sent_s: float) -> bool:
        """Renews the lease by a heartbeat sent at `sent_s`, which the broker has; returns False if the gate is closed."""
        if self.is_open:
            self._valid_until_s = sent_s + LEASE_S
        return self.is_open

    def reopen(self, sent_s: float) -> bool:
        """Opens the gate after a check, with a heartbeat sent at `sent_s`, and handles the buffered events.

        Returns False if the lease expired meanwhile: then the check must be repeated.
        """
        self._valid_until_s = sent_s + LEASE_S
        while self._buffered and self.is_open:
            buffered, self._buffered = self._buffered, []
            for position, (act, arguments) in enumerate(buffered):
                if not self.is_open:
                    self._buffered = buffered[position:] + self._buffered
                    break
                call_each("weir.scheduler.service.lease_gate: a buffered event", (act,), *arguments)
        return self.is_open
