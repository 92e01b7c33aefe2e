"""Event-loop lag: how long a role's event loop was blocked.

All clients of a role share its event loop. A callback that computes for a second delays all of them by a second, and
nothing else shows it: the processor may be idle on average. So a timer wakes ten times a second and compares when it
should have been called with when it was. The difference is the lag; the metric `weir_loop_lag_seconds` is the greatest of
the last 10 s.

A stall is seen when it is over, and up to `INTERVAL_S` too short: the timer was due some time after the stall began.

At rest the timer wakes every `REST_INTERVAL_S` only, because each wake-up costs an idle process more than all else that
it does. A loop is at rest after a second in which it used less than `REST_SHARE` of a processor. So the first stall after
a rest is up to `REST_INTERVAL_S` too short.

`process_health`: what a role reports about its own condition.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from weir.runtime.containment import failures
from weir.runtime.ticks import delay_to_tick_s

INTERVAL_S = 0.1
WINDOW_S = 10.0

REST_INTERVAL_S = 0.5
REST_SHARE = 0.02
"""A loop that uses a smaller share of a processor is at rest."""

_QUIET_INTERVALS = 10
"""So many intervals with little processor time make a rest."""


class LoopLag:
    """Measures the lag of one event loop. Everything is called in that loop."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._cpu_s = 0.0
        self._quiet_intervals = 0
        self._seconds: deque[tuple[int, float]] = deque()  # each second of the window, with the greatest lag in it
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Measures from now on, until `stop`."""
        self._cpu_s = self._cpu_clock()
        self._wait(loop, INTERVAL_S)

    def stop(self) -> None:
        """Ends the measurement."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def max_s(self) -> float:
        """The greatest lag of the last `WINDOW_S` in seconds."""
        self._forget_old(int(self._clock()))
        return max((lag_s for _, lag_s in self._seconds), default=0.0)

    def record(self, lag_s: float) -> None:
        """Adds one measurement, of now."""
        second = int(self._clock())
        if self._seconds and self._seconds[-1][0] == second:
            self._seconds[-1] = second, max(lag_s, self._seconds[-1][1])
        else:
            self._seconds.append((second, lag_s))
            self._forget_old(second)

    def _wait(self, loop: asyncio.AbstractEventLoop, delay_s: float) -> None:
        self._due_s = self._clock() + delay_s
        self._timer = loop.call_later(delay_s, self._woken, loop, delay_s)

    def _woken(self, loop: asyncio.AbstractEventLoop, waited_s: float) -> None:
        self.record(max(0.0, self._clock() - self._due_s))
        self._wait(loop, self.next_delay_s(waited_s))

    def next_delay_s(self, waited_s: float) -> float:
        """Returns how long to wait for the next measurement, by the processor time used in the last `waited_s`."""
        cpu_s, self._cpu_s = self._cpu_s, self._cpu_clock()
        is_quiet = self._cpu_s - cpu_s < REST_SHARE * waited_s
        self._quiet_intervals = self._quiet_intervals + 1 if is_quiet else 0
        if self._quiet_intervals < _QUIET_INTERVALS:
            return INTERVAL_S
        return delay_to_tick_s(self._clock(), REST_INTERVAL_S)

    def _forget_old(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] < second - WINDOW_S:
            self._seconds.popleft()


ROLE = LoopLag()
"""That of this process's role, which `weir.runtime.role_life` starts. It stands at 0 where no role runs."""


def process_health() -> dict[str, Any]:
    """The event loop's lag and the contained failures, in the form of `weir.schemas.wire.statistics.HealthCounters`."""
    return {"loop_lag_s": ROLE.max_s(), "contained_failures": failures()}
