"""Event-loop lag: how long a role's event loop was blocked.

All clients of a role share its event loop. A callback that computes for a second delays all of them by a second, and
nothing else shows it: the processor may be idle on average. So a timer wakes ten times a second and compares when it
should have been called with when it was. The difference is the lag; the metric `weir_loop_lag_seconds` is the greatest of
the last 10 s.

A stall is seen when it is over, and up to `INTERVAL_S` too short: the timer was due some time after the stall began.

`process_health`: what a role reports about its own condition.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from runtime.containment import failures

INTERVAL_S = 0.1
WINDOW_S = 10.0


class LoopLag:
    """Measures the lag of one event loop. Everything is called in that loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: deque[tuple[int, float]] = deque()  # each second of the window, with the greatest lag in it
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Measures from now on, until `stop`."""
        self._wait(loop)

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

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due_s = self._clock() + INTERVAL_S
        self._timer = loop.call_later(INTERVAL_S, self._woken, loop)

    def _woken(self, loop: asyncio.AbstractEventLoop) -> None:
        self.record(max(0.0, self._clock() - self._due_s))
        self._wait(loop)

    def _forget_old(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] < second - WINDOW_S:
            self._seconds.popleft()


ROLE = LoopLag()
"""That of this process's role, which `runtime.role_life` starts. It stands at 0 where no role runs."""


def process_health() -> dict[str, Any]:
    """The event loop's lag and the contained failures, in the form of `schemas.wire.statistics.HealthCounters`."""
    return {"loop_lag_s": ROLE.max_s(), "contained_failures": failures()}
