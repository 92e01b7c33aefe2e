"""`Pace`: how fast a job goes of late, and how long it will take to its end."""

from __future__ import annotations

from collections import deque

_LATELY_S = 15.0


class Pace:
    """See the module. It is told now and then how many items are done; only counts of the same run compare."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def note(self, now_s: float, done: int) -> None:
        """So many are done now."""
        self._points.append((now_s, done))
        while len(self._points) > 2 and self._points[1][0] <= now_s - _LATELY_S:
            self._points.popleft()

    @property
    def rate(self) -> float:
        """Items/s; 0 where it is not known yet."""
        if len(self._points) < 2:
            return 0.0
        (began_s, before), (now_s, done) = self._points[0], self._points[-1]
        return (done - before) / (now_s - began_s) if now_s > began_s else 0.0

    def left_s(self, left: int) -> float:
        """How long so many items will take; -1 where it can't be told."""
        rate = self.rate
        return left / rate if rate > 0 and left >= 0 else -1.0
