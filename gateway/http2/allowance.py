"""`Allowance`: how much of something a peer may do at once, and how fast it may go on (a token bucket)."""

from __future__ import annotations


class Allowance:
    """`burst` at once, refilled by `per_s` a second."""

    __slots__ = ("_burst", "_left", "_per_s", "_since_s")

    def __init__(self, burst: int, per_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._left = float(burst)
        self._since_s = 0.0

    def spend(self, now_s: float) -> bool:
        """Takes one at the time `now_s` (seconds of a monotonic clock); False when nothing is left."""
        self._left = min(self._burst, self._left + (now_s - self._since_s) * self._per_s)
        self._since_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True
