"""`StabilityRule`: how many windows a level of load is measured for, and which of them count.

As in Triton's perf_analyzer, a level is stable when throughput and latency of the last three windows differ from their mean
by at most a share of it. Windows before them are warm-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

WINDOWS = 3
"""So many windows in succession must agree."""


class WindowFigures(NamedTuple):
    """What is compared of a window: answered requests per second, and their median latency in seconds (0: of none)."""

    per_s: float
    latency_s: float


class Verdict(Enum):
    """What follows from the windows so far."""

    GO_ON = "go on"
    STABLE = "stable"
    UNSTABLE = "unstable"


class StabilityRule(NamedTuple):
    """`share` is the allowed difference from the mean, `max_windows` ends the measurement of a level that never settles."""

    share: float = 0.1
    max_windows: int = 10

    @property
    def counted(self) -> int:
        """How many windows, the last ones, make the result."""
        return min(WINDOWS, self.max_windows)

    def decide(self, windows: Sequence[WindowFigures]) -> Verdict:
        """Whether to measure another window, and if not, whether the last `counted` ones agree."""
        last = windows[-self.counted :]
        if len(last) == self.counted and self._agree(last):
            return Verdict.STABLE
        return Verdict.UNSTABLE if len(windows) >= self.max_windows else Verdict.GO_ON

    def _agree(self, windows: Sequence[WindowFigures]) -> bool:
        if not all(window.per_s > 0 for window in windows):
            return False
        return all(
            abs(value - mean) <= self.share * mean
            for values in zip(*windows, strict=True)
            for mean in [sum(values) / len(values)]
            for value in values
        )
