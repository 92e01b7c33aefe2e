"""`VirtualClock`: the time of a simulation, which advances from event to event.

All events of one time are processed before anything is dispatched: first timers, then arrivals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any

NEVER = 1 << 62


class Stuck(Exception):
    """Requests that never end: what is simulated has a bug."""


class VirtualClock:
    """Made for one run. `times_us` are when requests arrive, ascending; all times are microseconds since the start."""

    def __init__(self, times_us: Sequence[int], patience_us: int) -> None:
        """What has not ended `patience_us` after the last arrival then never will."""
        self._times = [*times_us, NEVER]
        self._patience_us = patience_us
        self._heap: list[tuple[int, int, int, Any]] = []
        self._numbers = count()
        self.now_us = 0

    def set(self, at_us: int, kind: int, what: Any) -> None:
        """Something happens then."""
        heappush(self._heap, (at_us, next(self._numbers), kind, what))

    def moments(
        self, left: Callable[[], int], happen: Callable[[int, Any, int], None], arrive: Callable[[int, int], None]
    ) -> Iterator[int]:
        """Each moment at which something came, after `happen(kind, what, now_us)` was told of what was set for it and
        `arrive(number, now_us)` of who arrived. It ends when all have arrived and none is `left`.

        Raises Stuck.
        """
        times, heap, number = self._times, self._heap, 0
        coming = len(times) - 1
        while number < coming or left():
            now_us = self.now_us = min(times[number], heap[0][0])
            while heap[0][0] == now_us:
                _, _, kind, what = heappop(heap)
                happen(kind, what, now_us)
            while times[number] == now_us:
                arrive(number, now_us)
                number += 1
            yield now_us
            if now_us > times[coming - 1] + self._patience_us:
                raise Stuck(f"{left()} requests never end")
