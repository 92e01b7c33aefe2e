"""Histograms that cost a list access to add to: of sizes by powers of two, and of durations by given bounds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

_SIZES = 33


class SizeHistogram:
    """Counts sizes (0 and up) by powers of two: bucket k holds those up to 2**k, the last all others."""

    __slots__ = ("_counts", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * (_SIZES + 1)
        self._sum = 0

    def add(self, size: int) -> None:
        """One more of this size."""
        self._counts[min((size - 1).bit_length() if size > 0 else 0, _SIZES)] += 1
        self._sum += size

    def snapshot(self) -> dict[str, Any]:
        """In the form of `schemas.statistics.HistogramCounters`, without the empty buckets above the largest size."""
        used = max((position for position, count in enumerate(self._counts[:-1]) if count), default=-1) + 1
        return {
            "bounds": [float(1 << power) for power in range(used)],
            "counts": [*self._counts[:used], self._counts[-1]],
            "sum": float(self._sum),
        }


class BoundedHistogram:
    """Counts values by the bucket of the smallest of `bounds` (ascending) that is not below them."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """One more value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> dict[str, Any]:
        """In the form of `schemas.statistics.HistogramCounters`."""
        return {"bounds": list(self._bounds), "counts": list(self._counts), "sum": self._sum}
