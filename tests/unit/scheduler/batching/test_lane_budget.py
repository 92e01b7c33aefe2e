"""How often live requests collide with batch-lane batches, on a simulated clock, and the cost of rows."""

from __future__ import annotations

import random
from math import inf

import pytest

from weir.scheduler.batching.lane_budget import (
    COLLISION_ONE_IN,
    LONGEST_QUIET_US,
    MAX_SAVED_COLLISIONS,
    SHORTEST_QUIET_US,
    BatchLaneBudget,
    BatchRun,
    RowCost,
)


def traffic(budget: BatchLaneBudget, intervals_us: list[int], now_us: int = 10_000_000) -> tuple[int, int]:
    """Live requests after these intervals, for one otherwise idle instance; (collisions, the time).

    A job's batch runs from the moment it may until the next live request has come.
    """
    found = 0
    for interval_us in intervals_us:
        may_us = budget.may_run_at_us(now_us, 1)
        runs = may_us < now_us + interval_us
        if runs:
            budget.run_started()
        now_us += interval_us
        budget.record_live(now_us, 1, busy=int(runs), idle=int(not runs))
        if runs:
            found += 1
            budget.run_ended(now_us)
    return found, now_us


@pytest.mark.parametrize("mean_us", [500, 20_000, 200_000])
def test_a_steady_stream_hardly_collides_with_the_batch_lane(mean_us: int):
    dice = random.Random(mean_us)
    budget = BatchLaneBudget(0)
    intervals = [int(dice.expovariate(1 / mean_us)) for _ in range(20_000)]
    found, _ = traffic(budget, intervals)
    longest = sum(gap > LONGEST_QUIET_US for gap in intervals)
    assert found <= 20_000 / COLLISION_ONE_IN + longest


@pytest.mark.parametrize("burst", [1, 5, 50])
def test_bursts_hardly_collide_with_the_batch_lane(burst: int):
    dice = random.Random(burst)
    intervals = [int(dice.expovariate(1 / 200)) if number % burst else 300_000 for number in range(20_000)]
    found, _ = traffic(BatchLaneBudget(0), intervals)
    assert found <= 20_000 / COLLISION_ONE_IN + MAX_SAVED_COLLISIONS


def test_after_a_long_silence_the_batch_lane_runs():
    budget = BatchLaneBudget(0)
    _, now_us = traffic(budget, [100_000] * 10)
    assert budget.may_run_at_us(now_us, 1) == now_us + LONGEST_QUIET_US


def test_the_silence_has_a_minimum():
    budget = BatchLaneBudget(0)
    _, now_us = traffic(budget, [100] * 5_000)
    assert budget.may_run_at_us(now_us, 1) == now_us + SHORTEST_QUIET_US


def test_the_batch_lane_stops_if_it_slows_others_down():
    budget = BatchLaneBudget(0)
    now_us = 10_000_000
    for _ in range(2_000):
        now_us += 10_000
        budget.record_live(now_us, 1, busy=0, idle=2)
        budget.record_run(now_us + 1_000, BatchRun(now_us, 1, 1_000, is_batch_lane=False), instances=2)
    assert budget.may_run_at_us(now_us, 2) == now_us
    budget.run_started()
    for _ in range(20):
        budget.record_run(now_us + 2_000, BatchRun(now_us, 1, 1_500, is_batch_lane=False), instances=2)
    budget.run_ended(now_us)
    assert budget.may_run_at_us(now_us, 2) > now_us


def test_backfill_is_less_the_busier_the_instances_are():
    def backfill(every_us: int) -> int:
        budget = BatchLaneBudget(0)
        now_us = 10_000_000
        for number in range(3_000):
            now_us += every_us
            rows = 1 + number % 32
            budget.record_run(
                now_us, BatchRun(now_us - 5_000, rows, 5_000 + 10 * rows, is_batch_lane=False), instances=1
            )
        return budget.backfill_rows(1)

    assert 20 <= backfill(100_000) <= 26
    assert backfill(6_000) < 10


@pytest.mark.parametrize(("row_us", "least", "most"), [(0, 0.7, 1.0), (1_000, 0.0, 0.1)])
def test_the_cost_of_a_row_is_found_on_a_busy_machine(row_us: int, least: float, most: float):
    dice = random.Random(4)
    budget = BatchLaneBudget(0)
    now_us, riding = 10_000_000, 0
    for _ in range(2_000):
        now_us += 16_667
        backfill = min(15, budget.backfill_rows(1))
        riding += backfill
        busy_us = int((10_000 + row_us * backfill) * dice.lognormvariate(0, 0.6))
        budget.record_run(now_us, BatchRun(now_us - busy_us, 1 + backfill, busy_us, is_batch_lane=False), instances=2)
    assert least <= riding / (2_000 * 15) <= most


def test_the_cost_of_rows_is_unknown_until_batches_differ():
    cost = RowCost()
    for _ in range(100):
        cost.record_run(4, 1_000)
    assert cost.us_per_row == inf
    assert cost.rows_within(100) == 0
    assert cost.expected_us(4) == pytest.approx(1_000)
    assert cost.expected_us(8) == pytest.approx(2_000), "the worst that it may be"


@pytest.mark.parametrize(("fixed_us", "row_us"), [(1_000, 0), (1_000, 50), (0, 300)])
def test_the_line_is_found_through_noise(fixed_us: int, row_us: int):
    dice, cost = random.Random(1), RowCost()
    for _ in range(3_000):
        rows = dice.randint(1, 32)
        cost.record_run(rows, (fixed_us + row_us * rows) * dice.lognormvariate(0, 0.1))
    assert cost.us_per_row == pytest.approx(row_us, rel=0.1, abs=5)
    assert cost.expected_us(16) == pytest.approx(fixed_us + 16 * row_us, rel=0.05)


def test_one_execution_that_waited_for_the_machine_changes_little():
    cost = RowCost()
    for number in range(1_000):
        cost.record_run(1 + number % 2, 1_000 + number % 2 * 10)
    cost.record_run(2, 10_000_000)
    assert cost.us_per_row < 50


def test_entries_follow_changes():
    cost = RowCost()
    for row_us in (100, 0):
        for number in range(4_000):
            cost.record_run(1 + number % 8, 1_000 + row_us * (number % 8))
    assert cost.us_per_row == pytest.approx(0, abs=2)


def test_the_standard_error_of_the_slope_matches_its_actual_error():
    dice, slope_us = random.Random(2), 20_000
    errors, estimates = [], []
    for _ in range(100):
        cost = RowCost()
        for _ in range(300):
            rows = 1 + (dice.random() < 0.05)
            cost.record_run(rows, slope_us * rows + 10_000 * dice.lognormvariate(0, 0.3))
        errors.append((cost.us_per_row - slope_us) ** 2)
        estimates.append(cost.stderr_us_per_row)
    assert sum(estimates) / len(estimates) == pytest.approx((sum(errors) / len(errors)) ** 0.5, rel=0.3)
    assert cost.rows_within(1_000, stderrs=2.0) >= cost.rows_within(1_000)
