"""The history of the load: its two resolutions, what is kept, and how much."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.console.history import series as module
from weir.console.history.series import MODEL_COLUMNS, RESOLUTIONS, SeriesHistory

START_MS = 1_800_000_000_000


def filled(seconds: int, **values: float) -> SeriesHistory:
    history = SeriesHistory()
    for second in range(seconds):
        row = {"requests_per_s": float(second), "queue_depth": float(second % 10), **values}
        history.add(START_MS + 1000 * second, row, {"net": row})
    return history


def test_a_second_is_a_point_and_ten_are_one_of_the_coarse_resolution() -> None:
    fine, coarse = filled(31).since("net", 0)
    assert (fine["step_ms"], coarse["step_ms"]) == (1000, 10_000)
    assert fine["requests_per_s"] == list(range(31))
    assert coarse["at_ms"] == [START_MS, START_MS + 10_000, START_MS + 20_000]
    assert coarse["requests_per_s"] == [4.5, 14.5, 24.5], "a rate is the mean"
    assert coarse["queue_depth"] == [9, 9, 9], "a depth is the largest one"


def test_only_later_points_are_returned() -> None:
    fine, coarse = filled(31).since(None, START_MS + 25_000)
    assert fine["requests_per_s"] == [26, 27, 28, 29, 30]
    assert coarse["at_ms"] == []


def test_what_was_not_known_is_none() -> None:
    history = SeriesHistory()
    history.add(START_MS, {"p50_ms": None, "requests_per_s": 1.0}, {})
    fine, _ = history.since(None, 0)
    assert (fine["p50_ms"], fine["requests_per_s"], fine["gpu_utilization"]) == ([None], [1], [None])


def test_a_model_without_history_has_empty_series() -> None:
    fine, coarse = SeriesHistory().since("unknown", 0)
    assert all(fine[name] == coarse[name] == [] for name in ("at_ms", *MODEL_COLUMNS))


def test_the_last_hour_is_kept_and_no_more() -> None:
    history = filled(3700)
    fine, coarse = history.since("net", 0)
    assert len(fine["at_ms"]) == RESOLUTIONS[0].points
    assert len(coarse["at_ms"]) == RESOLUTIONS[1].points
    assert fine["requests_per_s"][-1] == 3699
    # A model that is not served any more goes with its last point.
    history.add(START_MS + 1000 * (3700 + 3700), {}, {})
    assert history.since("net", 0)[0]["at_ms"] == []


def test_the_number_of_models_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SERIES", 2)
    history = SeriesHistory()
    history.add(START_MS, {"requests_per_s": 3.0}, {name: {"requests_per_s": 1.0} for name in "abc"})
    assert [len(history.since(name, 0)[0]["at_ms"]) for name in "abc"] == [1, 1, 0]
    assert history.since(None, 0)[0]["requests_per_s"] == [3]


@given(gaps=st.lists(st.integers(1, 40), min_size=1, max_size=60), since=st.integers(-1, 60))
def test_points_come_in_order_whatever_is_missing(gaps: list[int], since: int) -> None:
    """Without the broker no point is added: the resolutions agree on what there was."""
    history, at_ms, times = SeriesHistory(), START_MS, []
    for gap in gaps:
        at_ms += 1000 * gap
        times.append(at_ms)
        history.add(at_ms, {"requests_per_s": 1.0}, {})
    since_ms = START_MS + 1000 * since
    fine, coarse = history.since(None, since_ms)
    assert fine["at_ms"] == [time for time in times if time > since_ms]
    steps = sorted({time // 10_000 * 10_000 for time in times})
    assert coarse["at_ms"] == [step for step in steps[:-1] if step > since_ms], "the last one is not complete yet"
    assert set(coarse["requests_per_s"]) <= {1.0}
