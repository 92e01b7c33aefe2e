"""Which requests a queue takes: `Admission` by their expected wait, `OwnersInFlight` by the limits of their owners.

`Cost` estimates the cost of a request from those that have run. A new request waits behind all live requests in the
queue, or where owners take turns behind its own and their turns, so its expected wait is the time the instances need
for those. After a rejection, the queue must become a fifth shorter before requests are admitted again: a client that
retries then finds room, and callers are not alternately admitted and rejected.

A plain state machine that is fed with numbers. Source of the error text: Triton's queue policies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from heapq import nlargest
from typing import NamedTuple

from weir.scheduler.batching.request import QueuedRequest
from weir.schemas.core.errors import MAX_BACKOFF_US, ErrorCode, WeirError
from weir.schemas.wire.statistics import MAX_OWNERS

REOPEN_SHARE = 0.8
"""After a rejection, requests are admitted again once the expected wait is at most this share of the limit."""

MAX_REMEMBERED = 1_000
"""Owners whose refused requests are counted while they have none in flight, and whose admissions are kept."""


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


class Admissions:
    """The `Admission` of each owner, whose requests wait for what its turns leave them."""

    __slots__ = ("_by_owner", "max_wait_us")

    def __init__(self, max_wait_us: int) -> None:
        self.max_wait_us = max_wait_us
        self._by_owner: dict[str, Admission] = {}

    def of(self, owner: str) -> Admission:
        """Returns that of an owner ("": of requests without one)."""
        admission = self._by_owner.get(owner)
        if admission is None:
            if len(self._by_owner) >= MAX_REMEMBERED:
                self._by_owner = {name: one for name, one in self._by_owner.items() if one.is_closed}
            admission = self._by_owner[owner] = Admission(self.max_wait_us)
        return admission


class OwnerUse(NamedTuple):
    """One owner at a queue: requests in flight, and requests refused since the queue has its scheduler."""

    owner: str
    in_flight: int
    refused: int


class OwnersInFlight:
    """Counts the requests that have an owner, from their arrival to their end, for a model of `partitions` queues.

    A scheduler sees one queue only, so each queue of a model allows its part of a limit, rounded up. It is false while
    nothing is counted.
    """

    __slots__ = ("_in_flight", "_refused", "partitions")

    def __init__(self) -> None:
        self.partitions = 1
        self._in_flight: dict[str, int] = {}
        self._refused: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._in_flight)

    def __getitem__(self, owner: str) -> int:
        """Requests in flight of an owner."""
        return self._in_flight.get(owner, 0)

    def admit(self, request: QueuedRequest) -> WeirError | None:
        """Counts a request that has an owner; returns the error if that would exceed the owner's limit."""
        owner, limit, _ = request.caller
        in_flight = self._in_flight.get(owner, 0)
        if limit and in_flight >= -(-limit // self.partitions):
            self._refuse(owner)
            return too_many_in_flight(owner, limit)
        self._in_flight[owner] = in_flight + 1
        return None

    def ended(self, requests: Iterable[QueuedRequest]) -> None:
        """Counts the end of requests that were admitted, and of others without an owner."""
        in_flight = self._in_flight
        for request in requests:
            owner = request.caller.owner
            if owner:
                left = in_flight[owner] - 1
                if left:
                    in_flight[owner] = left
                else:
                    del in_flight[owner]

    def _refuse(self, owner: str) -> None:
        self._refused[owner] += 1
        if len(self._refused) > MAX_REMEMBERED:
            self._refused = Counter(dict(self._refused.most_common(MAX_REMEMBERED // 2)))

    def largest(self) -> list[OwnerUse]:
        """Returns the counters of the owners with most requests in flight, at most `MAX_OWNERS`."""
        rows = [OwnerUse(owner, count, self._refused[owner]) for owner, count in self._in_flight.items()]
        rows += [OwnerUse(owner, 0, count) for owner, count in self._refused.items() if owner not in self._in_flight]
        return nlargest(MAX_OWNERS, rows, key=lambda row: (row.in_flight, row.refused))


def too_many_in_flight(owner: str, limit: int) -> WeirError:
    """The error of a request beyond an owner's limit (RESOURCE_EXHAUSTED, HTTP 429)."""
    return WeirError(
        ErrorCode.RESOURCE_EXHAUSTED,
        f"too many requests in flight: the access policy allows '{owner}' {limit} at this model",
        retry_after_s=1,
    )
