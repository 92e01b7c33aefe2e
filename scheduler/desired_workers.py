"""`DesiredWorkers`: how many workers a queue should have, worked out about once a second from what comes and what it costs.

The work that comes, in instances: arrivals a second, times what a request costs, over the share of time in which instances
are to be busy; and what waits, to be gone within `DRAIN_US`. Over the instances that a worker has, these are workers.

- *Arrivals* are smoothed over half a minute, and over a few seconds where those differ by more than chance explains: so a
  burst counts at once, and the noise of a few requests doesn't.
- *Down* it goes only to the highest of the last `HOLD_US`, and only where there is room to spare, so that a load at
  the border between two numbers doesn't make it go up and down.
- *Zero* it becomes when nothing has come, waited or run for `IDLE_US`. Whoever waits asks for one at once.
- A policy that has just begun knows nothing, and asks for as many as there are until it has watched for `HOLD_US`.

A state machine: it is told numbers and the time, and says a number. Times are microseconds of one monotonic clock.
"""

from __future__ import annotations

from collections import deque
from math import ceil, exp, sqrt
from typing import NamedTuple

TARGET_UTILIZATION = 0.7
DRAIN_US = 10_000_000
HOLD_US = 120_000_000
IDLE_US = 300_000_000
SPARE = 0.1
"""So much less than a number of workers can do must be asked for before it is the number."""

MAX_DESIRED = 10_000
"""More are never asked for, whatever is measured."""

_FAST_S, _SLOW_S, _COST_S = 3.0, 30.0, 30.0
_SIGMAS = 2.0
_SHORTEST_US = 100_000
_ROUNDING = 1e-9


class Load(NamedTuple):
    """A queue as it stands: requests that have `arrived` and `served` so far, instance time spent on these (`busy_us`),
    requests that wait, whether any runs, and who is there for them. Jobs are counted as served and waiting, not as arrived.
    """

    arrived: int
    served: int
    busy_us: int
    waiting: int
    is_running: bool
    instances: int
    workers: int


class DesiredWorkers:
    """See the module. `step` is what the number is a multiple of: less than 1 where it is one of several that are added."""

    def __init__(self, step: float = 1.0) -> None:
        self.step = step
        self._last: Load | None = None
        self._last_us = 0
        self._born_us = 0
        self._alive_us = 0  # when something came, waited or ran last
        self._fast = self._slow = 0.0  # arrivals a second
        self._served = self._busy_us = 0.0  # in the recent past
        self._per_worker = 1.0
        self._peaks: deque[tuple[int, float]] = deque()  # of what was asked for: descending, in the order of time
        self.value = 0.0

    def look(self, now_us: int, load: Load) -> float:
        """The number of workers, given how the queue stands now."""
        last, self._last = self._last, load
        if load.instances and load.workers:
            self._per_worker = load.instances / load.workers
        if last is None:
            self._last_us = self._born_us = self._alive_us = now_us
            self.value = float(min(load.workers, MAX_DESIRED))
            return self._at_least_one(load)
        elapsed_us = now_us - self._last_us
        if elapsed_us < _SHORTEST_US:
            self._last = last
            return self._at_least_one(load)
        self._last_us = now_us
        arrived = max(0, load.arrived - last.arrived)
        if arrived or load.waiting or load.is_running or load.served > last.served:
            self._alive_us = now_us
        self._learn(elapsed_us / 1e6, arrived, load, last)
        if now_us - self._alive_us >= IDLE_US and now_us - self._born_us >= HOLD_US:
            self._fast = self._slow = self.value = 0.0
            self._peaks.clear()
        else:
            self._decide(now_us, self._asked_for(load))
        return self._at_least_one(load)

    def _at_least_one(self, load: Load) -> float:
        if load.waiting and not self.value:
            self.value = self.step
        return self.value

    def _learn(self, seconds: float, arrived: int, load: Load, last: Load) -> None:
        rate = arrived / seconds
        self._fast += (1 - exp(-seconds / _FAST_S)) * (rate - self._fast)
        self._slow += (1 - exp(-seconds / _SLOW_S)) * (rate - self._slow)
        kept = exp(-seconds / _COST_S)
        served, busy_us = load.served - last.served, load.busy_us - last.busy_us
        if served > 0:  # what is not heard of is not forgotten
            self._served = self._served * kept + served
            self._busy_us = self._busy_us * kept + max(0, busy_us)

    def _asked_for(self, load: Load) -> float:
        """Workers, in fractions."""
        if not self._served:
            # Nothing has ended yet: all that is known is whether there is something to do.
            return float(self.step if load.waiting or load.is_running else 0)
        cost_s = self._busy_us / self._served / 1e6
        # So much is certain of a mean of the last seconds, by the noise of as many requests as it is of.
        certain = self._fast - _SIGMAS * sqrt(self._fast / (2 * _FAST_S))
        coming = max(self._slow, certain) * cost_s / TARGET_UTILIZATION
        waiting = load.waiting * cost_s / (DRAIN_US / 1e6)
        return (coming + waiting) / self._per_worker

    def _decide(self, now_us: int, asked: float) -> None:
        peaks = self._peaks
        while peaks and peaks[-1][1] <= asked:
            peaks.pop()
        peaks.append((now_us, asked))
        while peaks[0][0] < now_us - HOLD_US:
            peaks.popleft()
        up = self._rounded(asked)
        if up > self.value:
            self.value = up
        elif now_us - self._born_us >= HOLD_US:
            self.value = min(self.value, max(self.step, self._rounded(peaks[0][1] * (1 + SPARE))))

    def _rounded(self, workers: float) -> float:
        return min(float(MAX_DESIRED), ceil(workers / self.step - _ROUNDING) * self.step)
