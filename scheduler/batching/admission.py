"""`Admission`: rejects a request on arrival if its expected wait in the queue exceeds the limit.

`Cost` estimates the cost of a request from those that have run. A new request waits behind all live requests in the
queue, so its expected wait is the time the instances need for those. After a rejection, the queue must become a
fifth shorter before requests are admitted again: a client that retries then finds room, and callers are not
alternately admitted and rejected.

A plain state machine that is fed with numbers. Source of the error text: Triton's queue policies.
"""

from __future__ import annotations

from weir.schemas.core.errors import MAX_BACKOFF_US

REOPEN_SHARE = 0.8
"""After a rejection, requests are admitted again once the expected wait is at most this share of the limit."""


class Admission:
    """Limits the expected wait of new requests to `max_wait_us`."""

    __slots__ = ("is_closed", "max_wait_us")

    def __init__(self, max_wait_us: int) -> None:
        self.max_wait_us = max_wait_us
        self.is_closed = False

    def admitted(self, arriving: int, waiting: int, us_per_request: float, instances: int) -> int:
        """Returns how many of `arriving` requests are admitted behind `waiting` others.

        All are admitted while their cost is unknown or no instance exists: requests without a worker have a timeout
        of their own.
        """
        us_each = us_per_request / instances if instances else 0.0
        if us_each <= 0:
            self.is_closed = False
            return arriving
        if self.is_closed:
            if waiting * us_each > REOPEN_SHARE * self.max_wait_us:
                return 0
            self.is_closed = False
        taken = max(0, min(arriving, int(self.max_wait_us / us_each) + 1 - waiting))
        self.is_closed = taken < arriving
        return taken

    def backoff_us(self, waiting: int, us_per_request: float, instances: int) -> int:
        """Returns for how long the next requests will be rejected, in microseconds, at most `MAX_BACKOFF_US`.

        Callers reject requests themselves for this time. An estimate that is too long costs nothing while the queue
        lasts: when the time is over, the queue still holds `REOPEN_SHARE` of the limit.
        """
        if not (self.is_closed and instances):
            return 0
        # One of the running requests may be about to end.
        left_us = (waiting - 1) * us_per_request / instances - REOPEN_SHARE * self.max_wait_us
        return max(0, min(MAX_BACKOFF_US, int(left_us)))
