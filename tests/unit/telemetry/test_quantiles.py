"""Sketches: right within a hundredth, the same merged or not, and of the last minute alone."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from telemetry.quantiles import WINDOW_S, DurationSketch, RecentDurations

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
    told = sketch_of(values).quantile(quantile)
    assert 0.98 * exact[0] - 0.01 <= told <= 1.02 * exact[1] + 0.01


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


def test_what_is_older_than_a_minute_is_in_the_sum_but_in_no_quantile() -> None:
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
