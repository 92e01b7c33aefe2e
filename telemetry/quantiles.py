"""Quantiles of recent durations that can be merged over workers: sketches of DDSketch, by the minute.

Source: prometheus-cpp's Summary, which Triton uses: quantiles are those of the last 60 s, in steps of 12 s; count and sum
are those of all time. Its quantiles can't be merged, so the algorithm is another one: DDSketch (Masson et al., VLDB 2019),
whose quantiles are off by 1 % of their value at most.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ddsketch.ddsketch import BaseDDSketch
from ddsketch.mapping import LogarithmicMapping
from ddsketch.store import CollapsingLowestDenseStore

WINDOW_S = 60.0
STEPS = 5

_RELATIVE_ACCURACY = 0.01
_MAX_BINS = 2048
_ZERO_BIN = -1
_MAPPING = LogarithmicMapping(_RELATIVE_ACCURACY)


class DurationSketch:
    """How often each duration came, within 1 %; durations are whole microseconds."""

    def __init__(self) -> None:
        self._store = CollapsingLowestDenseStore(_MAX_BINS)
        self._sketch = BaseDDSketch(_MAPPING, self._store, CollapsingLowestDenseStore(1), 0.0)

    def add(self, duration_us: float, count: int = 1) -> None:
        """`count` more of this duration."""
        self._sketch.add(duration_us, count)

    def add_bins(self, bins: Mapping[int, int]) -> None:
        """Adds what another sketch counted, as told by its `bins`."""
        for key, count in bins.items():
            if count:
                self._sketch.add(0 if key == _ZERO_BIN else _MAPPING.value(key), count)

    def bins(self) -> dict[int, int]:
        """What was counted, by DDSketch's bin; -1 is the bin of zero."""
        store = self._store
        bins = {store.offset + position: int(count) for position, count in enumerate(store.bins) if count}
        if zeros := int(self._sketch.count - store.count):
            bins[_ZERO_BIN] = zeros
        return bins

    def quantile(self, quantile: float) -> float:
        """The duration that this share of all does not exceed; NaN when there are none."""
        value = self._sketch.get_quantile_value(quantile)
        return float("nan") if value is None else float(value)


class RecentDurations:
    """A summary of durations: count and sum of all, and sketches of those of the last minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._count = 0
        self._sum_us = 0
        self._sketches: dict[int, DurationSketch] = {}  # by the number of their step, ascending

    def add(self, duration_us: int, count: int = 1) -> None:
        """`count` more of this duration."""
        self._count += count
        self._sum_us += duration_us * count
        step = int(self._clock() * STEPS / WINDOW_S)
        sketch = self._sketches.get(step)
        if sketch is None:
            self._forget(step)
            sketch = self._sketches[step] = DurationSketch()
        sketch.add(duration_us, count)

    def snapshot(self) -> dict[str, Any]:
        """In the form of `schemas.statistics.SummaryCounters`."""
        self._forget(int(self._clock() * STEPS / WINDOW_S))
        bins: Counter[int] = Counter()
        for sketch in self._sketches.values():
            bins.update(sketch.bins())
        return {"count": self._count, "sum_us": self._sum_us, "bins": dict(bins)}

    def _forget(self, now_step: int) -> None:
        for step in [step for step in self._sketches if step <= now_step - STEPS]:
            del self._sketches[step]
