"""`OrderedQueue`: requests that wait in another order than they came, and not for ever.

The order: strictly by priority level; in a level, those whose timeout has passed under `timeout_action: DELAY` behind all
others; then, unless order was promised, the earliest deadline first; then as they came.

Earliest deadline first must starve nobody. So each request counts as due `VIRTUAL_DEADLINE_US` after it came, or at its
deadline where that is sooner. A deadline brings a request forward, a distant one or none never puts it back, and nobody is
overtaken (within a level) by a request that came more than that time later.

A request leaves by being run, or by what `drop` and `overdue` return. What was run and is put back, for its worker was
lost, has met its timeout before; its deadline still holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from itertools import count
from operator import itemgetter

from scheduler.queue_rules import QueueRules
from scheduler.queued_request import QueuedRequest

VIRTUAL_DEADLINE_US = 1_000_000
"""When a request without a deadline counts as due, after it came."""

NEVER_US = 1 << 63
"""Later than any time."""

_LEAST_STALE = 64

_Entry = tuple[int, int, int, int, int, int, QueuedRequest]
"""(level, whether delayed, when due, when it came, key, a number of its own, request): entries sort as requests run."""

_request_of: Callable[[_Entry], QueuedRequest] = itemgetter(6)


class OrderedQueue:
    """See the module. Times are microseconds of the policy clock.

    `popleft` takes the next request for a batch that is being formed: it counts as waiting until `leave`, or stands in
    the queue again after `extendleft`.
    """

    def __init__(self, rules: QueueRules) -> None:
        self._rules = rules
        self._entries: dict[QueuedRequest, _Entry] = {}  # of all that wait, those taken for a batch included
        self._sizes: dict[int, int] = {}  # of the levels at which somebody waits: there may be 2**64
        self._taken = 0
        self._numbers = count()
        # Entries that are not a request's own any more are passed over when they come up.
        self._heap: list[_Entry] = []
        self._expiries: list[tuple[int, int, _Entry]] = []

    def __len__(self) -> int:
        """Requests that were not taken."""
        return len(self._entries) - self._taken

    def add(self, requests: Iterable[QueuedRequest]) -> list[QueuedRequest]:
        """Takes requests in, as many as there is room for at their levels; returns the others."""
        refused: list[QueuedRequest] = []
        for request in requests:
            level = self._rules.level_of(request)
            if self._sizes.get(level, 0) < self._rules.of_level(level).max_size:
                self._add(level, request)
            else:
                refused.append(request)
        return refused

    def put_back(self, requests: Iterable[QueuedRequest]) -> None:
        """Takes requests in again, whatever the sizes; they stand where they would had they never left."""
        for request in requests:
            self._add(self._rules.level_of(request), request)

    def popleft(self) -> QueuedRequest:
        """Takes the next request. Raises IndexError if there is none."""
        while True:
            entry = heappop(self._heap)
            request = entry[-1]
            if self._entries.get(request) is entry:
                self._taken += 1
                return request

    def first(self) -> QueuedRequest | None:
        """The next request, which `popleft` would take; None if there is none."""
        heap, entries = self._heap, self._entries
        while heap:
            request = heap[0][-1]
            if entries.get(request) is heap[0]:
                return request
            heappop(heap)
        return None

    def is_before(self, request: QueuedRequest, other: QueuedRequest) -> bool:
        """Whether one that waits should run before another that waits."""
        return self._entries[request] < self._entries[other]

    def extendleft(self, requests: Iterable[QueuedRequest]) -> None:
        """Gives back requests that were taken, in any order."""
        for request in requests:
            self._taken -= 1
            heappush(self._heap, self._entries[request])

    def leave(self, requests: Iterable[QueuedRequest]) -> None:
        """Requests that were taken run."""
        for request in requests:
            self._taken -= 1
            self._forget(request)
        self._compact()

    def drop(self, requests: Iterable[QueuedRequest]) -> None:
        """Requests that were not taken don't wait any more."""
        for request in requests:
            self._forget(request)
        self._compact()

    def drain(self) -> list[QueuedRequest]:
        """Empties the queue: all requests, in order. None may be taken."""
        requests = [_request_of(entry) for entry in sorted(self._entries.values())]
        self._entries.clear()
        self._sizes.clear()
        self._heap.clear()
        self._expiries.clear()
        return requests

    @property
    def next_expiry_us(self) -> int:
        """When the next timeout or deadline passes; NEVER_US without any."""
        expiries, entries = self._expiries, self._entries
        while expiries:
            at_us, _, entry = expiries[0]
            if entries.get(entry[-1]) is entry:
                return at_us
            heappop(expiries)
        return NEVER_US

    def overdue(self, now_us: int) -> list[QueuedRequest]:
        """Those whose timeout or deadline has passed: puts some behind the others, and returns those to be refused.

        None may be taken.
        """
        refused: list[QueuedRequest] = []
        while self.next_expiry_us <= now_us:
            at_us, _, entry = heappop(self._expiries)
            level, _, _, came_us, key, number, request = entry
            deadline_us = request.terms.deadline_us
            if 0 < deadline_us <= now_us or not self._rules.of_level(level).delays:
                self._forget(request)
                refused.append(request)
                continue
            # Behind the others in the order in which their times passed.
            delayed = self._entries[request] = (level, 1, at_us, came_us, key, number, request)
            heappush(self._heap, delayed)
            if deadline_us:
                heappush(self._expiries, (deadline_us, number, delayed))
        self._compact()
        return refused

    def _add(self, level: int, request: QueuedRequest) -> None:
        rules, came_us, deadline_us = self._rules, request.enqueued_us, request.terms.deadline_us
        due_us = 0
        if rules.is_deadline_first:
            due_us = came_us + VIRTUAL_DEADLINE_US
            if 0 < deadline_us < due_us:
                due_us = deadline_us
        number = next(self._numbers)
        entry = (level, 0, due_us, came_us, request.key, number, request)
        self._entries[request] = entry
        self._sizes[level] = self._sizes.get(level, 0) + 1
        heappush(self._heap, entry)
        timeout_us = 0 if request.attempts else rules.of_level(level).timeout_of(request)
        expiry_us = came_us + timeout_us if timeout_us else NEVER_US
        if 0 < deadline_us < expiry_us:
            expiry_us = deadline_us
        if expiry_us < NEVER_US:
            heappush(self._expiries, (expiry_us, number, entry))

    def _forget(self, request: QueuedRequest) -> None:
        level: int = self._entries.pop(request)[0]
        if self._sizes[level] == 1:
            del self._sizes[level]
        else:
            self._sizes[level] -= 1

    def _compact(self) -> None:
        """Most requests leave before their time: what stands for them must not pile up until then."""
        most = 2 * len(self._entries) + _LEAST_STALE
        if len(self._heap) > most:
            self._heap = [entry for entry in self._heap if self._entries.get(entry[-1]) is entry]
            heapify(self._heap)
        if len(self._expiries) > most:
            self._expiries = [expiry for expiry in self._expiries if self._entries.get(expiry[2][-1]) is expiry[2]]
            heapify(self._expiries)
