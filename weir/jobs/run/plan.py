"""`JobPlan`: which item of a job is submitted next, which is retried, and which items form a shard of the output.

Items arrive from the reader in order, responses in any order, and shards are written in order: each holds consecutive
items and starts where the previous one ends. Items that are not in a written shard are run again after a restart, so
each item is in the output exactly once, wherever a job is interrupted. Sans-IO: it holds numbers and sizes, never
content.

`AdaptiveConcurrency`: how many items of a job are in flight. It grows while that makes the job faster: more items than the
workers can run only wait, and take memory. Sans-IO.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

BACKOFF_S = 0.1
MAX_BACKOFF_S = 30.0
MAX_PAUSE_S = 5.0
"""The delay before a failed item, or a paused job, is tried again; it doubles each time, up to these limits."""

MAX_HELD_BYTES = 96 << 20
"""Bytes of items and results that a job holds; beyond it no further items are read."""

MAX_SPAN = 65_536
"""Items between the first one that is not written and the last one that was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLimits:
    """Limits of a job. A shard is complete at `shard_items` or `shard_bytes`, or `shard_age_s` after its first result.

    `attempts` is the maximum of attempts at an item that fails temporarily.
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
class ShardRange:
    """The consecutive items of a shard."""

    first: int
    count: int


class JobPlan:
    """Plans a job. `first` is the first item that is in no shard yet."""

    def __init__(self, first: int, limits: PlanLimits) -> None:
        self._limits = limits
        self._window = AdaptiveConcurrency(limits.window, limits.most_in_flight)
        self._next_read = first
        self._written_to = first
        self._settled_to = first  # all before are settled
        self._cut_to = first
        self._cut_bytes = 0
        self._oldest_s: float | None = None  # when the first result arrived that is in no shard yet
        self._cuts: deque[ShardRange] = deque()
        self._writing: ShardRange | None = None
        self._sizes: dict[int, int] = {}  # of items without an outcome, and of results that are not written
        self._settled: set[int] = set()  # ahead of `_settled_to`
        self._fresh: deque[int] = deque()
        self._retries: list[tuple[float, int]] = []
        self._in_flight: set[int] = set()
        self._in_flight_bytes = 0
        self._attempts: dict[int, int] = {}
        self._held_bytes = 0
        self._paused_until_s = 0.0
        self._pauses = 0
        self._has_ended = False
        self._is_stopping = False

    # Decisions

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
        """Up to `most` items to submit now, oldest first. They count as in flight from now on."""
        submits: list[int] = []
        if self._is_stopping or now_s < self._paused_until_s:
            return submits
        if self._pauses:
            most = 1  # the first item shows whether the model is served again
            if self._in_flight:
                return submits
        while len(submits) < most and len(self._in_flight) < self._window.size:
            number = self._ready(now_s)
            if number is None:
                break
            size = self._sizes[number]
            if self._in_flight and self._in_flight_bytes + size > self._limits.in_flight_bytes:
                break
            if self._retries and self._retries[0][1] == number and self._retries[0][0] <= now_s:
                heapq.heappop(self._retries)
            else:
                self._fresh.popleft()
            self._in_flight.add(number)
            self._in_flight_bytes += size
            submits.append(number)
        return submits

    def next_shard(self, now_s: float) -> ShardRange | None:
        """The shard to write now, None if there is none or one is being written."""
        if self._writing is not None:
            return None
        if not self._cuts and self._is_due(now_s):
            self._cut()
        if self._cuts:
            self._writing = self._cuts.popleft()
        return self._writing

    def wake_s(self, now_s: float) -> float | None:
        """When to call it again without an event; None for not before the next event."""
        times_s: list[float] = []
        if not self._is_stopping:
            if self._retries:
                times_s.append(max(self._retries[0][0], self._paused_until_s))
            if self._fresh and self._paused_until_s > now_s:
                times_s.append(self._paused_until_s)
        if self._oldest_s is not None and self._writing is None:
            times_s.append(self._oldest_s + self._limits.shard_age_s)
        return min(times_s, default=None)

    @property
    def is_done(self) -> bool:
        """Whether all items are written."""
        return self._has_ended and self._written_to == self._next_read and self._writing is None

    @property
    def is_idle(self) -> bool:
        """Whether a stopped plan has nothing left to do."""
        return self._is_stopping and not self._in_flight and self._settled_to == self._written_to

    @property
    def in_flight(self) -> int:
        """Items that are submitted and have no response yet."""
        return len(self._in_flight)

    @property
    def settled(self) -> int:
        """The number of items with an outcome."""
        return self._settled_to + len(self._settled)

    @property
    def written(self) -> int:
        """The number of items in written shards."""
        return self._written_to

    @property
    def is_paused(self) -> bool:
        """Whether the job is paused because the model is not served."""
        return self._pauses > 0

    # Events

    def read(self, size_bytes: int) -> int:
        """Adds the next item; returns its number."""
        number = self._next_read
        self._next_read += 1
        self._sizes[number] = size_bytes
        self._held_bytes += size_bytes
        self._fresh.append(number)
        return number

    def read_unreadable(self, now_s: float) -> int:
        """Adds an item that could not be read, which is its outcome; returns its number."""
        number = self._next_read
        self._next_read += 1
        self._sizes[number] = 0
        self._settle(now_s, number, 0)
        return number

    def read_all(self) -> None:
        """The input has ended."""
        self._has_ended = True

    def completed(self, now_s: float, number: int, size_bytes: int) -> None:
        """An item in flight has its outcome, of `size_bytes`."""
        self._window.completed(now_s, len(self._in_flight))
        self._pauses = 0
        self._paused_until_s = 0.0
        self._remove_from_flight(number)
        self._attempts.pop(number, None)
        self._settle(now_s, number, size_bytes)

    def pause(self, now_s: float, number: int) -> None:
        """An item in flight failed for a reason that is independent of it: no worker serves the model, or a queue is full.

        The job is paused, longer each time.
        """
        self._remove_from_flight(number)
        heapq.heappush(self._retries, (now_s, number))
        if now_s >= self._paused_until_s:
            self._paused_until_s = now_s + min(MAX_PAUSE_S, BACKOFF_S * 2 ** min(self._pauses, 10))
            self._pauses += 1
            self._window.pause()

    def failed_once(self, now_s: float, number: int) -> bool:
        """An item in flight failed temporarily. False if it is not retried: then call `completed`."""
        attempts = self._attempts.get(number, 0) + 1
        if attempts >= self._limits.attempts:
            return False
        self._attempts[number] = attempts
        self._remove_from_flight(number)
        heapq.heappush(self._retries, (now_s + min(MAX_BACKOFF_S, BACKOFF_S * 2 ** (attempts - 1)), number))
        return True

    def shard_written(self) -> ShardRange:
        """The shard was written."""
        cut = self._writing
        assert cut is not None  # noqa: S101 - there is one at a time
        self._writing = None
        self._written_to += cut.count
        for number in range(cut.first, cut.first + cut.count):
            self._held_bytes -= self._sizes.pop(number)
        return cut

    def shard_failed(self) -> None:
        """The shard could not be written; `next_shard` returns it again."""
        assert self._writing is not None  # noqa: S101 - there is one at a time
        self._cuts.appendleft(self._writing)
        self._writing = None

    def stop(self) -> None:
        """Submits and reads nothing more; items in flight may finish and are written."""
        self._is_stopping = True

    def cancel(self) -> list[int]:
        """Removes and returns the items in flight, of a stopped plan."""
        cancelled = sorted(self._in_flight)
        for number in cancelled:
            self._remove_from_flight(number)
        return cancelled

    # Steps

    def _ready(self, now_s: float) -> int | None:
        if self._retries and self._retries[0][0] <= now_s:
            return self._retries[0][1]
        return self._fresh[0] if self._fresh else None

    def _remove_from_flight(self, number: int) -> None:
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
        """Whether an incomplete shard is to be written now."""
        if self._settled_to == self._cut_to or self._oldest_s is None:
            return False
        if self._has_ended and self._settled_to == self._next_read:
            return True
        if self._is_stopping and not self._in_flight:
            return True
        return now_s >= self._oldest_s + self._limits.shard_age_s

    def _cut(self) -> None:
        self._cuts.append(ShardRange(self._cut_to, self._settled_to - self._cut_to))
        self._cut_to = self._settled_to
        self._cut_bytes = 0
        self._oldest_s = None


_EPOCH_S = 0.5
_GROWTH = 1.5
_GAIN = 1.07
"""How much faster the job must have become for a step to be kept."""

_EPOCHS_BETWEEN_PROBES = 20


class AdaptiveConcurrency:
    """Adapts `size`, between 1 and `most`, to the rate of responses."""

    def __init__(self, start: int, most: int) -> None:
        self._most = max(1, most)
        self.size = max(1, min(start, self._most))
        self._before = self.size  # the size before the last step
        self._rate_before = 0.0
        self._epoch_began_s: float | None = None
        self._answers = 0
        self._was_full = False
        self._resting = 0

    def completed(self, now_s: float, in_flight: int) -> None:
        """Notes a response; `in_flight` counts its item too."""
        if self._epoch_began_s is None:
            self._epoch_began_s = now_s
            return
        self._answers += 1
        self._was_full = self._was_full or in_flight >= self.size
        elapsed_s = now_s - self._epoch_began_s
        if elapsed_s >= _EPOCH_S and self._answers >= self.size:
            self._end_epoch(self._answers / elapsed_s)
            self._epoch_began_s, self._answers, self._was_full = now_s, 0, False

    def pause(self) -> None:
        """Halves the size, because a queue was full."""
        self.size = self._before = max(1, self.size // 2)
        self._rate_before, self._epoch_began_s, self._answers = 0.0, None, 0
        self._resting = _EPOCHS_BETWEEN_PROBES

    def _end_epoch(self, rate: float) -> None:
        if self.size > self._before and rate < self._rate_before * _GAIN:
            self.size = self._before  # the last step did not make the job faster
            self._resting = _EPOCHS_BETWEEN_PROBES
        elif self._resting:
            self._resting -= 1
        elif self._was_full and self.size < self._most:
            self._before, self._rate_before = self.size, rate
            self.size = min(self._most, max(self.size + 1, int(self.size * _GROWTH)))
        else:
            self._before = self.size
