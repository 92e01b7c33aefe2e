"""`Arrivals`: when the requests of an open loop are due, whatever becomes of the earlier ones."""

from __future__ import annotations

import random
from enum import StrEnum


class ArrivalProcess(StrEnum):
    """The distribution of the time between two requests: exponential (independent clients), or always the same."""

    POISSON = "poisson"
    CONSTANT = "constant"


class Arrivals:
    """A schedule of `per_s` requests a second on average, without an end. Equal seeds give equal schedules."""

    def __init__(self, per_s: float, process: ArrivalProcess, seed: int) -> None:
        self._per_s = per_s
        self._random = random.Random(seed) if process is ArrivalProcess.POISSON else None  # noqa: S311 - no secret
        self._count = 0
        self._last_s = 0.0

    def next_s(self) -> float:
        """When the next request is due, in seconds since the beginning of the schedule; the first one of a constant
        schedule at 0.
        """
        if self._random is not None:
            self._last_s += self._random.expovariate(self._per_s)
        else:
            # From the count, so that rounding errors do not add up.
            self._last_s = self._count / self._per_s
            self._count += 1
        return self._last_s
