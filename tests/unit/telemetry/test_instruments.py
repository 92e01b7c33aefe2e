"""Histograms, quantiles of recent durations, and utilization."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from weir.telemetry.instruments import (
    WINDOW_S,
    BoundedHistogram,
    DurationHistogram,
    DurationSketch,
    RecentDurations,
    SizeHistogram,
    Utilization,
)


@given(st.lists(st.integers(0, 1 << 40), max_size=50))
def test_sizes_fall_into_the_smallest_power_of_two_that_holds_them(sizes: list[int]) -> None:
    histogram = SizeHistogram()
    for size in sizes:
        histogram.add(size)
    reported = histogram.snapshot()
    assert len(reported["counts"]) == len(reported["bounds"]) + 1
    assert sum(reported["counts"]) == len(sizes)
    assert reported["sum"] == sum(sizes)
    below = 0
    for bound, count in zip(reported["bounds"], reported["counts"], strict=False):
        below += count
        assert below == sum(size <= bound for size in sizes)


def test_bounds_are_inclusive() -> None:
    histogram = BoundedHistogram([1.0, 5.0])
    for value in (0.5, 1.0, 1.1, 5.0, 6.0):
        histogram.add(value)
    assert histogram.snapshot() == {"bounds": [1.0, 5.0], "counts": [2, 2, 1], "sum": 13.6}


durations = st.lists(st.integers(0, 10**12), min_size=1, max_size=200)


def sketch_of(values: list[int]) -> DurationSketch:
    sketch = DurationSketch()
    for value in values:
        sketch.add(value)
    return sketch


@given(durations, st.sampled_from([0.0, 0.5, 0.9, 0.999, 1.0]))
def test_a_quantile_is_within_one_percent_of_a_value_of_that_rank(values: list[int], quantile: float) -> None:
    rank = quantile * (len(values) - 1)
    exact = [sorted(values)[math.floor(rank)], sorted(values)[math.ceil(rank)]]
    reported = sketch_of(values).quantile(quantile)
    assert 0.98 * exact[0] - 0.01 <= reported <= 1.02 * exact[1] + 0.01


@given(st.lists(durations, min_size=1, max_size=4))
def test_merging_by_bins_is_as_if_one_had_seen_all(parts: list[list[int]]) -> None:
    merged = DurationSketch()
    for part in parts:
        merged.add_bins(sketch_of(part).bins())
    whole = sketch_of([value for part in parts for value in part])
    assert merged.bins() == whole.bins()
    assert sum(merged.bins().values()) == sum(map(len, parts))


def test_an_empty_sketch_has_no_quantiles() -> None:
    assert math.isnan(DurationSketch().quantile(0.5))


def test_durations_older_than_a_minute_count_only_in_the_sum() -> None:
    now_s = [1000.0]
    recent = RecentDurations(lambda: now_s[0])
    recent.add(100, 3)
    now_s[0] += WINDOW_S / 2
    recent.add(200)
    assert sum(recent.snapshot()["bins"].values()) == 4
    now_s[0] += WINDOW_S / 2
    assert sum(recent.snapshot()["bins"].values()) == 1
    now_s[0] += WINDOW_S
    assert recent.snapshot() == {"count": 4, "sum_us": 500, "bins": {}}


S = 1_000_000


def test_utilization_approaches_the_busy_share_within_seconds() -> None:
    utilization = Utilization()
    for second in range(1, 11):
        utilization.update(second * S, second * S, 1, 2)
    assert abs(utilization.value - 0.5) < 0.02


def test_running_batches_count_by_busy_instances() -> None:
    utilization = Utilization()
    for second in range(1, 11):
        utilization.update(second * S, 0, 3, 4)
    assert abs(utilization.value - 0.75) < 0.03
    utilization.update(11 * S, 0, 0, 0)
    assert utilization.value == 0


@given(st.lists(st.tuples(st.integers(0, 5 * S), st.integers(-S, 9 * S), st.integers(0, 9), st.integers(0, 9))))
def test_utilization_is_a_share(looks: list[tuple[int, int, int, int]]) -> None:
    utilization, now_us, busy_us = Utilization(), 0, 0
    for elapsed_us, spent_us, busy, instances in looks:
        now_us, busy_us = now_us + elapsed_us, busy_us + spent_us
        utilization.update(now_us, busy_us, min(busy, instances), instances)
        assert 0 <= utilization.value <= 1


def histogram_of(values_us: list[int]) -> DurationHistogram:
    histogram = DurationHistogram()
    histogram.add_all(value * 1000 for value in values_us)
    return histogram


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=200), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_of_a_histogram_is_within_a_bucket_of_the_value_of_that_rank(
    values: list[int], quantile: float
) -> None:
    exact = sorted(values)[math.ceil(quantile * len(values)) - 1]
    reported = histogram_of(values).quantile_us(quantile)
    assert reported is not None
    assert exact * 15 / 16 - 1 <= reported <= exact * 17 / 16 + 1


@given(durations, durations)
def test_a_later_state_of_a_histogram_less_an_earlier_one_has_what_came_between(
    earlier: list[int], later: list[int]
) -> None:
    before, after = histogram_of(earlier), histogram_of(earlier + later)
    between = after.since(before)
    assert between.buckets() == histogram_of(later).buckets()
    assert between.count == len(later)
    before.add_buckets(between.buckets())
    assert before.buckets() == after.buckets()


def test_a_histogram_without_durations_has_no_quantile() -> None:
    assert DurationHistogram().quantile_us(0.5) is None


def test_a_histogram_ignores_buckets_that_it_does_not_have_and_takes_any_duration() -> None:
    histogram = DurationHistogram({-1: 5, 100_000: 5})
    histogram.add_all([-5, 10**30], 1)
    assert histogram.count == 2
    assert histogram.quantile_us(0.5) == 1
