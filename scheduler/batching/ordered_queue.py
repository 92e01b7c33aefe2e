"""`OrderedQueue`: waiting requests in the order of priority, deadline and arrival, by the rules of `QueueRules`.

Requests are ordered by priority level. Within a level, requests whose timeout has passed under `timeout_action:
DELAY` come last; before them, unless the order of arrival was promised, the earliest deadline comes first; then the
order of arrival decides.

Earliest-deadline-first must not starve a request. So each request counts as due `VIRTUAL_DEADLINE_US` after its
arrival, or at its deadline if that is sooner. A deadline moves a request forward, a distant one never moves it back,
and within a level no request is overtaken by one that arrived more than that time later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from itertools import count
from operator import itemgetter

from weir.scheduler.batching.queue_rules import QueueRules
from weir.scheduler.batching.request import QueuedRequest

VIRTUAL_DEADLINE_US = 1_000_000
"""When a request without a deadline counts as due, after its arrival."""

NEVER_US = 1 << 63
"""Later than any time."""

_LEAST_STALE = 64

_Entry = tuple[int, int, int, int, int, int, QueuedRequest]
"""(level, 1 if delayed, due time, arrival time, key, unique number, request): entries sort in running order."""

_request_of: Callable[[_Entry], QueuedRequest] = itemgetter(6)


class OrderedQueue:
    """Waiting requests by priority, deadline and arrival. Times are microseconds of the policy clock.

    `popleft` takes the next request for a batch that is being formed. The request still counts as waiting until
    `leave`, or until `extendleft` returns it. A request leaves by running, or by being returned from `drop` or
    `overdue`. A request that is put back after its worker was lost has already met its queue timeout; its deadline
    still applies.
    """

    def __init__(self, rules: QueueRules) -> None:
        self._rules = rules
        self._entries: dict[QueuedRequest, _Entry] = {}  # of all waiting requests, including taken ones
        self._sizes: dict[int, int] = {}  # of non-empty levels only: there may be 2**64 levels
        self._taken = 0
        self._numbers = count()
        # Both heaps may hold stale entries, which are skipped when they reach the top.
        self._heap: list[_Entry] = []
        self._expiries: list[tuple[int, int, _Entry]] = []

    def __len__(self) -> int:
        """Requests that were not taken."""
        return len(self._entries) - self._taken

    def add(self, requests: Iterable[QueuedRequest]) -> list[QueuedRequest]:
        """Adds requests as long as their levels have room; returns those without room."""
        refused: list[QueuedRequest] = []
        for request in requests:
            level = self._rules.level_of(request)
            if self._sizes.get(level, 0) < self._rules.of_level(level).max_size:
                self._add(level, request)
            else:
                refused.append(request)
        return refused

    def put_back(self, requests: Iterable[QueuedRequest]) -> None:
        """Adds requests again at their original positions, regardless of the sizes of the levels."""
        for request in requests:
            self._add(self._rules.level_of(request), request)

    def popleft(self) -> QueuedRequest:
        """Takes the next request. Raises IndexError if the queue is empty."""
        while True:
            entry = heappop(self._heap)
            request = entry[-1]
            if self._entries.get(request) is entry:
                self._taken += 1
                return request

    def first(self) -> QueuedRequest | None:
        """Returns the request that `popleft` would take next, or None."""
        heap, entries = self._heap, self._entries
        while heap:
            request = heap[0][-1]
            if entries.get(request) is heap[0]:
                return request
            heappop(heap)
        return None

    def is_before(self, request: QueuedRequest, other: QueuedRequest) -> bool:
        """Whether waiting request `request` runs before waiting request `other`."""
        return self._entries[request] < self._entries[other]

    def extendleft(self, requests: Iterable[QueuedRequest]) -> None:
        """Returns taken requests to the queue, in any order."""
        for request in requests:
            self._taken -= 1
            heappush(self._heap, self._entries[request])

    def leave(self, requests: Iterable[QueuedRequest]) -> None:
        """Removes taken requests: they run."""
        for request in requests:
            self._taken -= 1
            self._forget(request)
        self._compact()

    def drop(self, requests: Iterable[QueuedRequest]) -> None:
        """Removes requests that were not taken."""
        for request in requests:
            self._forget(request)
        self._compact()

    def drain(self) -> list[QueuedRequest]:
        """Empties the queue and returns all requests in order. None may be taken."""
        requests = [_request_of(entry) for entry in sorted(self._entries.values())]
        self._entries.clear()
        self._sizes.clear()
        self._heap.clear()
        self._expiries.clear()
        return requests

    @property
    def next_expiry_us(self) -> int:
        """When the next timeout or deadline passes; `NEVER_US` without any."""
        expiries, entries = self._expiries, self._entries
        while expiries:
            at_us, _, entry = expiries[0]
            if entries.get(entry[-1]) is entry:
                return at_us
            heappop(expiries)
        return NEVER_US

    def overdue(self, now_us: int) -> list[QueuedRequest]:
        """Handles requests whose timeout or deadline has passed: delays some, removes and returns those to be rejected.

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
            # Delayed requests are ordered by when their timeouts passed.
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
        """Removes stale heap entries: most requests leave before their timeout, and their entries must not pile up."""
        most = 2 * len(self._entries) + _LEAST_STALE
        if len(self._heap) > most:
            self._heap = [entry for entry in self._heap if self._entries.get(entry[-1]) is entry]
            heapify(self._heap)
        if len(self._expiries) > most:
            self._expiries = [expiry for expiry in self._expiries if self._entries.get(expiry[2][-1]) is expiry[2]]
            heapify(self._expiries)
