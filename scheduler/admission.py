"""`Admission`: refuses at once what would wait for longer than it may, as far as one can tell when it comes.

What a request costs is learned from what has run. A request comes behind all live ones that wait; so it is expected to wait
for as long as the instances need for those. Once some were refused, none is taken until the queue has become a fifth
shorter: a client that was told to come again finds room then, and callers are not refused and taken in turns.

A plain state machine that is told numbers. Source of the answer: Triton's queue policies, whose text it gives.
"""

from __future__ import annotations

from schemas.errors import MAX_SHUT_US

REOPENS_BELOW = 0.8
"""Of the longest wait: so much must be expected at most before requests are taken again."""

LEARNS_FROM = 16
"""Requests that must have run before what they cost counts."""


class Pace:
    """What a request costs: microseconds of one instance, in the recent past. Costs nothing until it is asked."""

    __slots__ = ("_busy_us", "_served", "us_per_request")

    def __init__(self) -> None:
        self.us_per_request = 0.0
        self._served = 0
        self._busy_us = 0

    def look(self, served: int, busy_us: int) -> float:
        """So many requests have run so far, for so long in all; returns what one costs, 0 while nobody knows."""
        requests = served - self._served
        # The first ones may tell of a cold start, and a batch of them is all there is to know.
        if requests >= LEARNS_FROM or (requests > 0 and not self.us_per_request):
            latest = (busy_us - self._busy_us) / requests
            known = self.us_per_request
            self.us_per_request = (known + latest) / 2 if known else latest
            self._served, self._busy_us = served, busy_us
        return self.us_per_request


class Admission:
    """See the module. `max_wait_us` is the longest wait that a request is taken in for."""

    __slots__ = ("is_closed", "max_wait_us")

    def __init__(self, max_wait_us: int) -> None:
        self.max_wait_us = max_wait_us
        self.is_closed = False

    def room(self, coming: int, waiting: int, us_per_request: float, instances: int) -> int:
        """How many of the `coming` requests are taken, where `waiting` are before them.

        All, as long as nobody knows what they cost, or nobody is there to run them: who waits for a worker has
        a patience of its own.
        """
        us_each = us_per_request / instances if instances else 0.0
        if us_each <= 0:
            self.is_closed = False
            return coming
        if self.is_closed:
            if waiting * us_each > REOPENS_BELOW * self.max_wait_us:
                return 0
            self.is_closed = False
        taken = max(0, min(coming, int(self.max_wait_us / us_each) + 1 - waiting))
        self.is_closed = taken < coming
        return taken

    def shut_us(self, waiting: int, us_per_request: float, instances: int) -> int:
        """For how long nothing will be taken, where so many wait now: microseconds, `MAX_SHUT_US` at most.

        Callers refuse by themselves for so long. What they believe for too long costs nothing as long as the queue lasts:
        when this time is over, `REOPENS_BELOW` of the longest wait are still in it.
        """
        if not (self.is_closed and instances):
            return 0
        # One of those that run may be about to end.
        left_us = (waiting - 1) * us_per_request / instances - REOPENS_BELOW * self.max_wait_us
        return max(0, min(MAX_SHUT_US, int(left_us)))
