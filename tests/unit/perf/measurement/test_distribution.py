"""Durations and counts of a stretch of time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.perf.clients.session import Answer
from weir.perf.measurement.distribution import MAX_ERROR_TEXTS, OTHER_ERRORS, Distribution, Window

SECONDS = st.lists(st.floats(1e-5, 100), min_size=1, max_size=200)


def distribution(values: list[float]) -> Distribution:
    made = Distribution()
    for value in values:
        made.add(value)
    return made


@given(SECONDS)
def test_quantiles_are_within_two_percent_of_the_exact_ones(values: list[float]) -> None:
    made = distribution(values)
    ascending = sorted(values)
    for share in (0.5, 0.9, 0.99):
        exact = ascending[int(share * (len(ascending) - 1))]
        assert made.quantile_s(share) == pytest.approx(exact, rel=0.02, abs=2e-6)
    assert made.mean_s == pytest.approx(sum(values) / len(values))
    assert made.max_s == max(values)
    assert made.quantile_s(1.0) <= made.max_s


@given(SECONDS, SECONDS)
def test_merged_distributions_are_those_of_all_values(first: list[float], second: list[float]) -> None:
    merged, together = distribution(first), distribution(first + second)
    merged.merge(distribution(second))
    assert (merged.count, merged.max_s) == (together.count, together.max_s)
    assert merged.mean_s == pytest.approx(together.mean_s)
    for share in (0.1, 0.5, 0.99):
        assert merged.quantile_s(share) == pytest.approx(together.quantile_s(share), rel=0.02, abs=2e-6)


def test_nothing_measured_is_zero() -> None:
    assert (Distribution().mean_s, Distribution().quantile_s(0.5)) == (0, 0)
    assert Window(0.0).per_s == 0


def test_times_of_a_stream_are_counted() -> None:
    window = Window(0.0)
    window.answered(10.0, Answer((10.5, 10.6, 10.8), 10.9), streams=True)
    window.answered(20.0, Answer((), 20.1), streams=True)  # a decoupled model may send nothing
    window.end(2.0)
    assert (window.succeeded, window.responses, window.per_s) == (2, 3, 1.0)
    assert window.latency.max_s == pytest.approx(0.9)
    assert (window.first_response.count, window.first_response.max_s) == (1, pytest.approx(0.5))
    assert (window.between_responses.count, window.between_responses.mean_s) == (2, pytest.approx(0.15))


def test_texts_of_errors_are_bounded() -> None:
    first, second = Window(0.0), Window(1.0)
    for number in range(2 * MAX_ERROR_TEXTS):
        first.failure(f"error {'x' * number}")
        second.failure(f"error {'x' * number}")
    first.merge(second)
    assert first.failed == 4 * MAX_ERROR_TEXTS
    assert first.errors["error "] == 2
    assert first.errors[OTHER_ERRORS] == 2 * MAX_ERROR_TEXTS
    assert len(first.errors) == MAX_ERROR_TEXTS + 1


def test_errors_that_differ_only_in_numbers_are_one() -> None:
    window, other = Window(0.0), Window(1.0)
    for number in range(3 * MAX_ERROR_TEXTS):
        window.failure(f"[request id: {number:x}0] queue of 'm' has {number} requests")
    other.failure("[request id: 1] queue of 'm' has 7 requests")
    other.failure("[request id: 1] queue of 'n' has 7 requests")
    window.merge(other)
    assert window.errors == {
        "[request id: 00] queue of 'm' has 0 requests": 3 * MAX_ERROR_TEXTS + 1,
        "[request id: 1] queue of 'n' has 7 requests": 1,
    }
