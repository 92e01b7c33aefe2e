"""`OrderedQueue`: waiting requests in the order of priority, deadline and arrival, by the rules of `QueueRules`.

Requests are ordered by priority level. Within a level, requests whose timeout has passed under `timeout_action:
DELAY` come last; before them, unless the order of arrival was promised, the earliest deadline comes first; then the
order of arrival decides.

Earliest-deadline-first must not starve a request. So each request counts as due `VIRTUAL_DEADLINE_US` after its
arrival, or at its deadline if that is sooner. A deadline moves a request forward, a distant one never moves it back,
and within a level no request is overtaken by one that arrived more than that time later.

`FairOrderedQueue` is one for requests of several owners: priorities come first, then owners take turns by their weights,
and the order above is that within an owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from itertools import count, islice
from operator import itemgetter

from weir.runtime.limits.fair_turns import FairTurns
from weir.scheduler.batching.queue_rules import QueueRules
from weir.scheduler.batching.request import QueuedRequest
from weir.schemas.wire.calls import Caller

VIRTUAL_DEADLINE_US = 1_000_000
"""When a request without a deadline counts as due, after its arrival."""

NEVER_US = 1 << 63
"""Later than any time."""

MAX_ASKED = 64
"""Owners who are asked for a request of the shapes of a batch that the next one's request would end."""

_LEAST_STALE = 64

_Entry = tuple[int, int, int, int, int, int, QueuedRequest]
"""(level, 1 if delayed, due time, arrival time, key, unique number, request): entries sort in running order."""

_number_of: Callable[[_Entry], int] = itemgetter(5)
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


_GroupKey = tuple[int, int]
"""(level, 1 if delayed): the requests of the least one run first, whoever owns them."""


class _Line:
    """The requests of one owner in a group: a heap of entries, of which those of requests that `waiting` counts count."""

    __slots__ = ("entries", "number", "waiting", "weight")

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.number = -1  # of the last entry, whose weight counts
        self.waiting = 0
        self.weight = 1

    def share(self) -> float:
        """How many wait, by the weight."""
        return self.waiting / self.weight


class _Group:
    """The requests of a group by their owners, who take turns."""

    __slots__ = ("lines", "turns")

    def __init__(self) -> None:
        self.lines: dict[str, _Line] = {}
        self.turns = FairTurns()


class FairOrderedQueue(OrderedQueue):
    """As `OrderedQueue`, for requests of several owners, who take turns in the rows of batches by their weights.

    A batch that holds requests of one shape goes on with owners whose next request has that shape: they are charged for it,
    and whose turn it is has the first place of the next batch. If a level is full, an owner with less than its share of the
    places takes one from the owner with most, one of whose newest requests is rejected.
    """

    def __init__(self, rules: QueueRules) -> None:
        super().__init__(rules)
        # `_heap` holds the entries that were added since the last look; here the others are, by level and whether delayed.
        self._groups: dict[_GroupKey, _Group] = {}
        self._keys: list[_GroupKey] = []  # a heap of those of the groups, and of former ones
        self._listed: set[_GroupKey] = set()  # all in that heap
        self._charges: dict[QueuedRequest, int] = {}  # of taken requests
        self._stored = 0  # entries in groups, stale ones included

    def add(self, requests: Iterable[QueuedRequest]) -> list[QueuedRequest]:
        """Adds requests as long as their levels have room; returns those that have none, or have lost their place."""
        rejected: list[QueuedRequest] = []
        for request in super().add(requests):
            displaced = self._displaced_by(request)
            if displaced is None:
                rejected.append(request)
            else:
                self._forget(displaced)
                self._add(self._rules.level_of(request), request)
                rejected.append(displaced)
        return rejected

    def popleft(self) -> QueuedRequest:
        """Takes the next request. Raises IndexError if the queue is empty."""
        found = self._next()
        if found is None:
            raise IndexError("the queue is empty")
        key, name = found
        group = self._groups[key]
        request = heappop(group.lines[name].entries)[-1]
        self._stored -= 1
        self._taken += 1
        self._charges[request] = group.turns.charge(name, request.batch_size)
        self._left(key, name)
        return request

    def first(self) -> QueuedRequest | None:
        """Returns the request that `popleft` would take next, or None."""
        found = self._next()
        return None if found is None else self._groups[found[0]].lines[found[1]].entries[0][-1]

    def is_before(self, request: QueuedRequest, other: QueuedRequest) -> bool:
        """Whether waiting request `request` runs before waiting request `other`, which owners do not wait for."""
        entry, of_other = self._entries[request], self._entries[other]
        if entry[:2] != of_other[:2]:
            return entry[:2] < of_other[:2]
        return request.caller.owner == other.caller.owner and entry < of_other

    def extendleft(self, requests: Iterable[QueuedRequest]) -> None:
        """Returns taken requests to the queue, the last one first."""
        for request in requests:
            self._taken -= 1
            entry = self._entries[request]
            self._store(entry)
            self._groups[entry[:2]].turns.refund(request.caller.owner, self._charges.pop(request))

    def drain(self) -> list[QueuedRequest]:
        """Empties the queue and returns all requests in order. None may be taken."""
        self._groups.clear()
        self._keys.clear()
        self._listed.clear()
        self._stored = 0
        return super().drain()

    def overdue(self, now_us: int) -> list[QueuedRequest]:
        """As that of `OrderedQueue`."""
        self._store_added()  # first, so that a delayed request has been in the group that it leaves
        return super().overdue(now_us)

    def turns_of(self, caller: Caller) -> tuple[int, float]:
        """Returns how many requests of an owner wait, and in how many turns of all, by weight, it has one."""
        self._store_added()
        taken = sum(request.caller.owner == caller.owner for request in self._charges)
        weights = {name: line.weight for group in self._groups.values() for name, line in group.lines.items()}
        weights[caller.owner] = caller.weight
        lines = [group.lines[caller.owner] for group in self._groups.values() if caller.owner in group.lines]
        return taken + sum(line.waiting for line in lines), sum(weights.values()) / caller.weight

    def _store_added(self) -> None:
        """Moves entries that were added into their groups."""
        for entry in sorted(self._heap, key=_number_of):  # owners take their places as they came
            if self._entries.get(entry[-1]) is entry:
                if entry[1]:
                    self._left((entry[0], 0), entry[-1].caller.owner)
                self._store(entry)
        self._heap.clear()

    def _store(self, entry: _Entry) -> None:
        key, caller = entry[:2], entry[-1].caller
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group()
            if key not in self._listed:
                self._listed.add(key)
                heappush(self._keys, key)
        line = group.lines.get(caller.owner)
        if line is None:
            line = group.lines[caller.owner] = _Line()
        if entry[5] > line.number:  # else it returns, and its owner's weight may have changed since it came
            line.number, line.weight = entry[5], caller.weight
        group.turns.add(caller.owner, line.weight)
        heappush(line.entries, entry)
        line.waiting += 1
        self._stored += 1

    def _left(self, key: _GroupKey, name: str) -> None:
        """Counts that one request of an owner waits there no longer."""
        group = self._groups[key]
        line = group.lines[name]
        line.waiting -= 1
        if not line.waiting:
            self._stored -= len(line.entries)
            del group.lines[name]
            group.turns.remove(name)
            if not group.lines:
                del self._groups[key]

    def _next(self) -> tuple[_GroupKey, str] | None:
        """Returns the group and the owner of the next request, which is then the first of its line."""
        if self._heap:
            self._store_added()
        while self._keys and self._keys[0] not in self._groups:
            self._listed.remove(heappop(self._keys))
        if not self._keys:
            return None
        key = self._keys[0]
        lines, turns = self._groups[key].lines, self._groups[key].turns

        def head(name: str) -> QueuedRequest:
            entries = lines[name].entries
            while self._entries.get(entries[0][-1]) is not entries[0]:
                heappop(entries)
                self._stored -= 1
            return entries[0][-1]

        name = turns.next(lambda name: head(name).batch_size)
        next_one = head(name)
        if self._charges and self._rules.is_batched_by_shape:
            shape_key = next(iter(self._charges)).shape_key
            if next_one.shape_key != shape_key:
                alike = (other for other in islice(turns, MAX_ASKED) if head(other).shape_key == shape_key)
                name = next(alike, name)
        return key, name

    def _displaced_by(self, request: QueuedRequest) -> QueuedRequest | None:
        """Returns the request whose place `request`, of a full level, takes; None if its owner has its share of places."""
        self._store_added()
        group = self._groups.get((self._rules.level_of(request), 0))
        if group is None:
            return None
        caller = request.caller
        own = group.lines.get(caller.owner)
        share = ((own.waiting if own else 0) + 1) / caller.weight
        # Promoted events are of nobody, and keep their places.
        owned = [line for name, line in group.lines.items() if name and line is not own]
        most = max(owned, key=_Line.share, default=None)
        if most is None or most.share() <= share:
            return None
        while True:
            entry = most.entries.pop()  # the last one of a heap is one of those that came last
            self._stored -= 1
            if self._entries.get(entry[-1]) is entry:
                return entry[-1]

    def _forget(self, request: QueuedRequest) -> None:
        self._store_added()
        if self._charges.pop(request, None) is None:
            self._left(self._entries[request][:2], request.caller.owner)
        super()._forget(request)

    def _compact(self) -> None:
        super()._compact()
        if self._stored <= 2 * len(self._entries) + _LEAST_STALE:
            return
        self._stored = 0
        for group in self._groups.values():
            for line in group.lines.values():
                line.entries = [entry for entry in line.entries if self._entries.get(entry[-1]) is entry]
                heapify(line.entries)
                self._stored += len(line.entries)
