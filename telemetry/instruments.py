"""Instruments that can be summed over processes: histograms, quantiles of recent durations, and utilization.

Source of the quantiles: prometheus-cpp's Summary, which Triton uses: quantiles of the last 60 s in steps of 12 s,
count and sum of all time. Its quantiles can not be merged, so DDSketch is used instead (Masson et al., VLDB 2019),
whose quantiles are within 1 % of the exact value.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddsketch.ddsketch import BaseDDSketch
from ddsketch.mapping import LogarithmicMapping
from ddsketch.store import CollapsingLowestDenseStore

_SIZES = 33


class SizeHistogram:
    """Counts sizes (0 and up) by powers of two: bucket k counts those up to 2**k, the last bucket all others."""

    __slots__ = ("_counts", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * (_SIZES + 1)
        self._sum = 0

    def add(self, size: int, times: int = 1) -> None:
        """Counts one size, `times` times."""
        self._counts[min((size - 1).bit_length() if size > 0 else 0, _SIZES)] += times
        self._sum += size * times

    def snapshot(self) -> dict[str, Any]:
        """Returns the form of `schemas.wire.statistics.HistogramCounters`, without empty buckets above the largest size."""
        used = max((position for position, count in enumerate(self._counts[:-1]) if count), default=-1) + 1
        return {
            "bounds": [float(1 << power) for power in range(used)],
            "counts": [*self._counts[:used], self._counts[-1]],
            "sum": float(self._sum),
        }


class BoundedHistogram:
    """Counts values by the smallest of `bounds` (ascending) that is not below them."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Counts one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> dict[str, Any]:
        """Returns the form of `schemas.wire.statistics.HistogramCounters`."""
        return {"bounds": list(self._bounds), "counts": list(self._counts), "sum": self._sum}


WINDOW_S = 60.0
STEPS = 5

_RELATIVE_ACCURACY = 0.01
_MAX_BINS = 2048
_ZERO_BIN = -1
_MAPPING = LogarithmicMapping(_RELATIVE_ACCURACY)


class DurationSketch:
    """The distribution of durations, within 1 %; durations are whole microseconds."""

    def __init__(self) -> None:
        self._store = CollapsingLowestDenseStore(_MAX_BINS)
        self._sketch = BaseDDSketch(_MAPPING, self._store, CollapsingLowestDenseStore(1), 0.0)

    def add(self, duration_us: float, count: int = 1) -> None:
        """Counts a duration `count` times."""
        self._sketch.add(duration_us, count)

    def add_bins(self, bins: Mapping[int, int]) -> None:
        """Adds the counts of another sketch, given as its `bins`."""
        for key, count in bins.items():
            if count:
                self._sketch.add(0 if key == _ZERO_BIN else _MAPPING.value(key), count)

    @staticmethod
    def duration_us(bin: int) -> float:
        """Returns the duration that a bin stands for."""
        return 0.0 if bin == _ZERO_BIN else float(_MAPPING.value(bin))

    def bins(self) -> dict[int, int]:
        """Returns the counts by DDSketch's bin; -1 is the bin of zero."""
        store = self._store
        bins = {store.offset + position: int(count) for position, count in enumerate(store.bins) if count}
        if zeros := int(self._sketch.count - store.count):
            bins[_ZERO_BIN] = zeros
        return bins

    def quantile(self, quantile: float) -> float:
        """Returns the duration that this share of all durations does not exceed; NaN without any."""
        value = self._sketch.get_quantile_value(quantile)
        return float("nan") if value is None else float(value)


class RecentDurations:
    """A summary of durations: count and sum of all time, and sketches of the last minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._count = 0
        self._sum_us = 0
        self._sketches: dict[int, DurationSketch] = {}  # by the number of their step, ascending

    def add(self, duration_us: int, count: int = 1) -> None:
        """Counts a duration `count` times."""
        self._count += count
        self._sum_us += duration_us * count
        step = int(self._clock() * STEPS / WINDOW_S)
        sketch = self._sketches.get(step)
        if sketch is None:
            self._forget(step)
            sketch = self._sketches[step] = DurationSketch()
        sketch.add(duration_us, count)

    def snapshot(self) -> dict[str, Any]:
        """Returns the form of `schemas.wire.statistics.SummaryCounters`."""
        self._forget(int(self._clock() * STEPS / WINDOW_S))
        bins: Counter[int] = Counter()
        for sketch in self._sketches.values():
            bins.update(sketch.bins())
        return {"count": self._count, "sum_us": self._sum_us, "bins": dict(bins)}

    def _forget(self, now_step: int) -> None:
        for step in [step for step in self._sketches if step <= now_step - STEPS]:
            del self._sketches[step]


_SMOOTHING = 0.3


class Utilization:
    """The share of time in which instances were busy, from 0 to 1 (`value`), smoothed over the last seconds."""

    def __init__(self) -> None:
        self.value = 0.0
        self._last_us = 0
        self._last_busy_us = 0

    def update(self, now_us: int, busy_us: int, busy: int, instances: int) -> None:
        """Updates `value`. Called about once a second.

        `busy` of `instances` instances run something now; `busy_us` is the time that all batches ended so far have
        taken.
        """
        elapsed_us, self._last_us = now_us - self._last_us, now_us
        spent_us, self._last_busy_us = busy_us - self._last_busy_us, busy_us
        if not instances:
            self.value = 0.0
            return
        # Batches are counted when they end: if none has ended since the last update, use the instances busy now.
        share = spent_us / (elapsed_us * instances) if spent_us > 0 and elapsed_us > 0 else busy / instances
        self.value += _SMOOTHING * (min(1.0, share) - self.value)
