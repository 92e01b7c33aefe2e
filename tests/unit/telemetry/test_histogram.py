"""Histograms: each value in the one bucket that is its."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from telemetry.histogram import BoundedHistogram, SizeHistogram


@given(st.lists(st.integers(0, 1 << 40), max_size=50))
def test_sizes_fall_into_the_smallest_power_of_two_that_holds_them(sizes: list[int]) -> None:
    histogram = SizeHistogram()
    for size in sizes:
        histogram.add(size)
    told = histogram.snapshot()
    assert len(told["counts"]) == len(told["bounds"]) + 1
    assert sum(told["counts"]) == len(sizes)
    assert told["sum"] == sum(sizes)
    below = 0
    for bound, count in zip(told["bounds"], told["counts"], strict=False):
        below += count
        assert below == sum(size <= bound for size in sizes)


def test_bounds_are_inclusive() -> None:
    histogram = BoundedHistogram([1.0, 5.0])
    for value in (0.5, 1.0, 1.1, 5.0, 6.0):
        histogram.add(value)
    assert histogram.snapshot() == {"bounds": [1.0, 5.0], "counts": [2, 2, 1], "sum": 13.6}
