"""`DesiredWorkers`: how many workers a queue should have, computed about once a second from its load.

The load in instances is the arrival rate, times the cost of a request, over the target utilization; plus what is
needed to work off the waiting requests within `DRAIN_US`. Divided by the instances of a worker, this is a number of
workers.

- *Arrivals* are averaged over half a minute, and over a few seconds if those differ by more than chance explains: a
  burst counts at once, the noise of a few requests does not.
- *Scaling down* goes only to the highest demand of the last `HOLD_US`, and only with capacity to spare, so that a
  load
  at the border between two numbers does not make the number oscillate.
- *Zero* is reached when nothing has arrived, waited or run for `IDLE_US`. A waiting request demands a worker at once.
- A new instance of this policy has no history and asks for the current number until it has watched for `HOLD_US`.

A state machine: numbers and the time go in, a number comes out. Times are microseconds of one monotonic clock.
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
"""Demand must be this much below the capacity of a number of workers before the number is reduced to it."""

MAX_DESIRED = 10_000
"""The largest number of workers that is ever asked for."""

_FAST_S, _SLOW_S, _COST_S = 3.0, 30.0, 30.0
_SIGMAS = 2.0
_SHORTEST_US = 100_000
_ROUNDING = 1e-9


class Load(NamedTuple):
    """The state of a queue: totals of requests that have `arrived` and were `served`, the instance time that those
    took (`busy_us`), the requests waiting, whether any runs, and the instances and workers available. Requests of the
    batch lane count as served and waiting, not as arrived.
    """

    arrived: int
    served: int
    busy_us: int
    waiting: int
    is_running: bool
    instances: int
    workers: int


class DesiredWorkers:
    """The number of workers of one queue, a multiple of `step`; that is below 1 if the numbers of several queues are
    added.
    """

    def __init__(self, step: float = 1.0) -> None:
        self.step = step
        self._last: Load | None = None
        self._last_us = 0
        self._born_us = 0
        self._alive_us = 0  # when something last arrived, waited or ran
        self._fast = self._slow = 0.0  # arrivals a second
        self._served = self._busy_us = 0.0  # recent totals, decaying
        self._per_worker = 1.0
        self._peaks: deque[tuple[int, float]] = deque()  # recent demand: descending, in order of time
        self.value = 0.0

    def update(self, now_us: int, load: Load) -> float:
        """Returns the number of workers for the current load."""
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
            self._decide(now_us, self._demand(load))
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
        if served > 0:  # without new data the old estimate stays
            self._served = self._served * kept + served
            self._busy_us = self._busy_us * kept + max(0, busy_us)

    def _demand(self, load: Load) -> float:
        """Returns the demand in workers, as a fraction."""
        if not self._served:
            # Nothing has ended yet: it is only known whether there is work.
            return float(self.step if load.waiting or load.is_running else 0)
        cost_s = self._busy_us / self._served / 1e6
        # The lower confidence bound of the fast mean, given the noise of that many requests.
        certain = self._fast - _SIGMAS * sqrt(self._fast / (2 * _FAST_S))
        coming = max(self._slow, certain) * cost_s / TARGET_UTILIZATION
        waiting = load.waiting * cost_s / (DRAIN_US / 1e6)
        return (coming + waiting) / self._per_worker

    def _decide(self, now_us: int, demand: float) -> None:
        peaks = self._peaks
        while peaks and peaks[-1][1] <= demand:
            peaks.pop()
        peaks.append((now_us, demand))
        while peaks[0][0] < now_us - HOLD_US:
            peaks.popleft()
        up = self._rounded(demand)
        if up > self.value:
            self.value = up
        elif now_us - self._born_us >= HOLD_US:
            self.value = min(self.value, max(self.step, self._rounded(peaks[0][1] * (1 + SPARE))))

    def _rounded(self, workers: float) -> float:
        return min(float(MAX_DESIRED), ceil(workers / self.step - _ROUNDING) * self.step)
