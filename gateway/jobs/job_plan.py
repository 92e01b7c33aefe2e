"""`JobPlan`: which item of a job is asked next, which again, and when a shard of the output is cut.

Items come from the reader in order, their answers in any order, and shards leave in order: each holds consecutive items,
and the next begins where the last one ended. What is not in a written shard is done again after a restart; so each item is
exactly once in the output, wherever a job is cut. A sans-IO state machine: it holds numbers and sizes, never content.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from gateway.jobs.window import Window

BACKOFF_S = 0.1
MAX_BACKOFF_S = 30.0
MAX_HOLD_S = 5.0
"""An item that failed, and a job that nobody serves, are tried again after so long; it doubles each time."""

MAX_HELD_BYTES = 256 << 20
"""What a job holds of items and results; it reads no further meanwhile."""

MAX_SPAN = 65_536
"""Items between the first that is not written and the last that was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLimits:
    """Bounds of a job. A shard is cut at so many items or bytes, or when its first result has waited for `shard_age_s`.

    `attempts` is how often an item is begun that fails in a way that may pass.
    """

    window: int = 64
    most_in_flight: int = 4096
    in_flight_bytes: int = 64 << 20
    held_bytes: int = MAX_HELD_BYTES
    span: int = MAX_SPAN
    shard_items: int = 1000
    shard_bytes: int = 16 << 20
    shard_age_s: float = 10.0
    attempts: int = 5


@dataclass(frozen=True, slots=True)
class Cut:
    """Consecutive items that make a shard."""

    first: int
    count: int


class JobPlan:
    """See the module. `first` is the first item that is in no shard yet."""

    def __init__(self, first: int, limits: PlanLimits) -> None:
        self._limits = limits
        self._window = Window(limits.window, limits.most_in_flight)
        self._next_read = first
        self._written_to = first
        self._settled_to = first  # all before are settled
        self._cut_to = first
        self._cut_bytes = 0
        self._oldest_s: float | None = None  # when the first result came that is in no cut
        self._cuts: deque[Cut] = deque()
        self._writing: Cut | None = None
        self._sizes: dict[int, int] = {}  # of items without an outcome, and of results that are not written
        self._settled: set[int] = set()  # ahead of `_settled_to`
        self._fresh: deque[int] = deque()
        self._again: list[tuple[float, int]] = []
        self._in_flight: set[int] = set()
        self._in_flight_bytes = 0
        self._attempts: dict[int, int] = {}
        self._held_bytes = 0
        self._hold_until_s = 0.0
        self._holds = 0
        self._has_ended = False
        self._is_stopping = False

    # What is to be done

    def has_room(self) -> bool:
        """Whether more items should be read."""
        return (
            not self._has_ended
            and not self._is_stopping
            and self._held_bytes < self._limits.held_bytes
            and self._next_read - self._written_to < self._limits.span
            and len(self._fresh) < 2 * self._window.size
        )

    def next_submits(self, now_s: float, most: int) -> list[int]:
        """Up to `most` items that are to be asked now, oldest first. They are in flight from now on."""
        submits: list[int] = []
        if self._is_stopping or now_s < self._hold_until_s:
            return submits
        if self._holds:
            most = 1  # the first shows whether there is somebody again
            if self._in_flight:
                return submits
        while len(submits) < most and len(self._in_flight) < self._window.size:
            number = self._ready(now_s)
            if number is None:
                break
            size = self._sizes[number]
            if self._in_flight and self._in_flight_bytes + size > self._limits.in_flight_bytes:
                break
            if self._again and self._again[0][1] == number and self._again[0][0] <= now_s:
                heapq.heappop(self._again)
            else:
                self._fresh.popleft()
            self._in_flight.add(number)
            self._in_flight_bytes += size
            submits.append(number)
        return submits

    def next_shard(self, now_s: float) -> Cut | None:
        """The shard that is to be written now; the next one is told when it is written."""
        if self._writing is not None:
            return None
        if not self._cuts and self._is_due(now_s):
            self._cut()
        if self._cuts:
            self._writing = self._cuts.popleft()
        return self._writing

    def wake_s(self, now_s: float) -> float | None:
        """When it should be looked at again though nothing has happened; None: not before something does."""
        moments: list[float] = []
        if not self._is_stopping:
            if self._again:
                moments.append(max(self._again[0][0], self._hold_until_s))
            if self._fresh and self._hold_until_s > now_s:
                moments.append(self._hold_until_s)
        if self._oldest_s is not None and self._writing is None:
            moments.append(self._oldest_s + self._limits.shard_age_s)
        return min(moments, default=None)

    @property
    def is_done(self) -> bool:
        """Whether all items are written."""
        return self._has_ended and self._written_to == self._next_read and self._writing is None

    @property
    def is_idle(self) -> bool:
        """Whether a plan that was stopped has nothing left to do."""
        return self._is_stopping and not self._in_flight and self._settled_to == self._written_to

    @property
    def in_flight(self) -> int:
        """Items that are asked and have no answer."""
        return len(self._in_flight)

    @property
    def settled(self) -> int:
        """Items below which all have an outcome, and those beyond that have one."""
        return self._settled_to + len(self._settled)

    @property
    def written(self) -> int:
        """Items that are in shards."""
        return self._written_to

    @property
    def is_held_up(self) -> bool:
        """Whether nobody serves just now."""
        return self._holds > 0

    # What has happened

    def read(self, size_bytes: int) -> int:
        """The next item was read; returns its number."""
        number = self._next_read
        self._next_read += 1
        self._sizes[number] = size_bytes
        self._held_bytes += size_bytes
        self._fresh.append(number)
        return number

    def read_unreadable(self, now_s: float) -> int:
        """The next item could not be read, which is its outcome; returns its number."""
        number = self._next_read
        self._next_read += 1
        self._sizes[number] = 0
        self._settle(now_s, number, 0)
        return number

    def read_all(self) -> None:
        """There are no more items."""
        self._has_ended = True

    def answered(self, now_s: float, number: int, size_bytes: int) -> None:
        """An item in flight has its outcome, of this size."""
        self._window.answered(now_s, len(self._in_flight))
        self._holds = 0
        self._hold_until_s = 0.0
        self._land(number)
        self._attempts.pop(number, None)
        self._settle(now_s, number, size_bytes)

    def refused(self, now_s: float, number: int) -> None:
        """An item in flight could not be done, and not for its own sake: nobody serves, or there is no room.

        It and all others wait, for longer each time.
        """
        self._land(number)
        heapq.heappush(self._again, (now_s, number))
        if now_s >= self._hold_until_s:
            self._hold_until_s = now_s + min(MAX_HOLD_S, BACKOFF_S * 2 ** min(self._holds, 10))
            self._holds += 1
            self._window.refused()

    def failed_once(self, now_s: float, number: int) -> bool:
        """An item in flight failed in a way that may pass. False when it is not tried again: then it is `answered`."""
        attempts = self._attempts.get(number, 0) + 1
        if attempts >= self._limits.attempts:
            return False
        self._attempts[number] = attempts
        self._land(number)
        heapq.heappush(self._again, (now_s + min(MAX_BACKOFF_S, BACKOFF_S * 2 ** (attempts - 1)), number))
        return True

    def shard_written(self) -> Cut:
        """The shard that was to be written is on disk."""
        cut = self._writing
        assert cut is not None  # noqa: S101 - there is one at a time
        self._writing = None
        self._written_to += cut.count
        for number in range(cut.first, cut.first + cut.count):
            self._held_bytes -= self._sizes.pop(number)
        return cut

    def shard_failed(self) -> None:
        """It could not be written: it is the next one again."""
        assert self._writing is not None  # noqa: S101 - there is one at a time
        self._cuts.appendleft(self._writing)
        self._writing = None

    def stop(self) -> None:
        """Nothing more is asked or read; what is in flight is waited for, and what can be is written."""
        self._is_stopping = True

    def give_up(self) -> list[int]:
        """The items in flight, which are not waited for any more. For a plan that was stopped."""
        given_up = sorted(self._in_flight)
        for number in given_up:
            self._land(number)
        return given_up

    # How

    def _ready(self, now_s: float) -> int | None:
        if self._again and self._again[0][0] <= now_s:
            return self._again[0][1]
        return self._fresh[0] if self._fresh else None

    def _land(self, number: int) -> None:
        self._in_flight.remove(number)
        self._in_flight_bytes -= self._sizes[number]

    def _settle(self, now_s: float, number: int, size_bytes: int) -> None:
        self._held_bytes += size_bytes - self._sizes[number]
        self._sizes[number] = size_bytes
        self._settled.add(number)
        while self._settled_to in self._settled:
            self._settled.remove(self._settled_to)
            self._cut_bytes += self._sizes[self._settled_to]
            self._settled_to += 1
            if self._oldest_s is None:
                self._oldest_s = now_s
            waiting = self._settled_to - self._cut_to
            if waiting >= self._limits.shard_items or self._cut_bytes >= self._limits.shard_bytes:
                self._cut()

    def _is_due(self, now_s: float) -> bool:
        """Whether what waits for its shard to become full waits no longer."""
        if self._settled_to == self._cut_to or self._oldest_s is None:
            return False
        if self._has_ended and self._settled_to == self._next_read:
            return True
        if self._is_stopping and not self._in_flight:
            return True
        return now_s >= self._oldest_s + self._limits.shard_age_s

    def _cut(self) -> None:
        self._cuts.append(Cut(self._cut_to, self._settled_to - self._cut_to))
        self._cut_to = self._settled_to
        self._cut_bytes = 0
        self._oldest_s = None
