"""What a request takes, from those that have run: three estimates, each for its use."""

from __future__ import annotations

from weir.scheduler.batching.cost import Cost


def test_the_mean_follows_the_requests_that_ran() -> None:
    cost = Cost()
    assert cost.update() == 0
    cost.record(4, 40_000)
    assert cost.update() == 10_000, "the first batch is an estimate"
    cost.record(1, 100_000)
    assert cost.update() == 10_000, "a single one doesn't"
    cost.record(19, 300_000)
    assert cost.update() == 15_000
    assert cost.update() == 15_000
    assert (cost.served, cost.busy_us) == (24, 440_000)


def test_the_time_of_a_request_follows_fast_executions_faster_than_slow_ones() -> None:
    cost = Cost()
    cost.record(2, 2_000)
    assert cost.us_each == 1_000
    cost.record(1, 500)
    assert cost.us_each == 900
    cost.record(1, 1_000)
    assert cost.us_each == 910
    cost.record(1, 1_000_000)
    assert cost.us_each == 910 + 91, "one that waited for the machine counts as at most twice as slow"


def test_the_time_of_a_row_is_smoothed_and_needs_known_rows() -> None:
    cost = Cost()
    cost.record(1, 900)
    assert cost.us_per_row == 0
    cost.record(1, 1_000, rows=10)
    assert cost.us_per_row == 100
    cost.record(1, 1_000, rows=5)
    assert cost.us_per_row == 120
