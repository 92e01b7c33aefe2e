"""Instruments that can be summed over processes: histograms, quantiles of recent durations, and utilization.

`DurationHistogram` is always on; the finer `RecentDurations` are those of Triton's summaries, which are off by default.

Source of the quantiles: prometheus-cpp's Summary, which Triton uses: quantiles of the last 60 s in steps of 12 s,
count and sum of all time. Its quantiles can not be merged, so DDSketch is used instead (Masson et al., VLDB 2019),
whose quantiles are within 1 % of the exact value.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        """Returns the form of `weir.schemas.wire.statistics.HistogramCounters`, without empty buckets above the largest
        size.
        """
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
        """Returns the form of `weir.schemas.wire.statistics.HistogramCounters`."""
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
        """Returns the form of `weir.schemas.wire.statistics.SummaryCounters`."""
        self._forget(int(self._clock() * STEPS / WINDOW_S))
        bins: Counter[int] = Counter()
        for sketch in self._sketches.values():
            bins.update(sketch.bins())
        return {"count": self._count, "sum_us": self._sum_us, "bins": dict(bins)}

    def _forget(self, now_step: int) -> None:
        for step in [step for step in self._sketches if step <= now_step - STEPS]:
            del self._sketches[step]


_MANTISSA_BITS = 4
_LEADING = 1 << _MANTISSA_BITS  # durations below have a bucket each
_MAX_SHIFT = 35  # durations up to 12 days
_LAST_BUCKET = ((_MAX_SHIFT + 2) << _MANTISSA_BITS) - 1


class DurationHistogram:
    """The distribution of durations since its creation, in buckets of 1/16 of a power of two, so within 6 %.

    A duration costs 0.1 us, a ninth of what it costs in a `DurationSketch`, and histograms of different processes and times
    can be added and subtracted. Not thread-safe.
    """

    __slots__ = ("_counts",)

    def __init__(self, buckets: Mapping[int, int] | None = None) -> None:
        self._counts: dict[int, int] = {}
        if buckets:
            self.add_buckets(buckets)

    def add_all(self, durations_ns: Iterable[int], more_ns: int = 0) -> None:
        """Counts each of these durations plus `more_ns`, in nanoseconds."""
        counts = self._counts
        for duration_ns in durations_ns:
            us = (duration_ns + more_ns) // 1000
            shift = us.bit_length() - _MANTISSA_BITS - 1
            if shift > 0:
                bucket = (shift << _MANTISSA_BITS) + (us >> shift) if shift <= _MAX_SHIFT else _LAST_BUCKET
            else:
                bucket = us if us > 0 else 0
            counts[bucket] = counts.get(bucket, 0) + 1

    def add_buckets(self, buckets: Mapping[int, int]) -> None:
        """Adds the counts of another histogram, given as its `buckets`. Unknown buckets are ignored."""
        for bucket, count in buckets.items():
            if 0 <= bucket <= _LAST_BUCKET and count:
                self._counts[bucket] = self._counts.get(bucket, 0) + count

    def buckets(self) -> dict[int, int]:
        """Returns the counts of all buckets that are not empty."""
        return dict(self._counts)

    def since(self, earlier: DurationHistogram) -> DurationHistogram:
        """Returns the durations that were counted after `earlier`, an older state of this histogram.

        A bucket that has shrunk, because a process whose counts are not known any more was replaced, counts as a new one.
        """
        changed = DurationHistogram()
        before = earlier._counts
        for bucket, count in self._counts.items():
            if more := count - before.get(bucket, 0):
                changed._counts[bucket] = more if more > 0 else count
        return changed

    @property
    def count(self) -> int:
        """The number of durations."""
        return sum(self._counts.values())

    def quantile_us(self, quantile: float) -> float | None:
        """Returns the duration in microseconds that this share of all durations does not exceed; None without any."""
        rank, below = quantile * self.count, 0
        upper_us = None
        for bucket in sorted(self._counts):
            count = self._counts[bucket]
            lower_us, upper_us = _bucket_bounds_us(bucket)
            if below + count >= rank:
                return lower_us + (upper_us - lower_us) * (rank - below) / count
            below += count
        return upper_us


def _bucket_bounds_us(bucket: int) -> tuple[int, int]:
    """Returns the durations of a bucket: the first, and the first of the next one."""
    if bucket < 2 * _LEADING:
        return bucket, bucket + 1
    shift = (bucket >> _MANTISSA_BITS) - 1
    leading = bucket - (shift << _MANTISSA_BITS)
    return leading << shift, (leading + 1) << shift


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
