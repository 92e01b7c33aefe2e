from __future__ import annotations

import random
from math import inf

import pytest

from scheduler.row_cost import RowCost


def test_nothing_is_known_of_rows_until_batches_differ():
    cost = RowCost()
    for _ in range(100):
        cost.has_run(4, 1_000)
    assert cost.us_per_row == inf
    assert cost.rows_within(100) == 0
    assert cost.expected_us(4) == pytest.approx(1_000)
    assert cost.expected_us(8) == pytest.approx(2_000), "the worst that it may be"


@pytest.mark.parametrize(("fixed_us", "row_us"), [(1_000, 0), (1_000, 50), (0, 300)])
def test_the_line_is_found_through_noise(fixed_us: int, row_us: int):
    dice, cost = random.Random(1), RowCost()
    for _ in range(3_000):
        rows = dice.randint(1, 32)
        cost.has_run(rows, (fixed_us + row_us * rows) * dice.lognormvariate(0, 0.1))
    assert cost.us_per_row == pytest.approx(row_us, rel=0.1, abs=5)
    assert cost.expected_us(16) == pytest.approx(fixed_us + 16 * row_us, rel=0.05)


def test_one_execution_that_waited_for_the_machine_changes_little():
    cost = RowCost()
    for number in range(1_000):
        cost.has_run(1 + number % 2, 1_000 + number % 2 * 10)
    cost.has_run(2, 10_000_000)
    assert cost.us_per_row < 50


def test_what_changes_is_followed():
    cost = RowCost()
    for row_us in (100, 0):
        for number in range(4_000):
            cost.has_run(1 + number % 8, 1_000 + row_us * (number % 8))
    assert cost.us_per_row == pytest.approx(0, abs=2)


def test_how_uncertain_the_line_is_is_told():
    dice = random.Random(2)
    errors, told = [], []
    for _ in range(100):
        cost = RowCost()
        for _ in range(300):
            cost.has_run(1 + (dice.random() < 0.05), 10_000 * dice.lognormvariate(0, 0.3))
        errors.append((cost._together / cost._variance) ** 2)
        if cost.us_per_row:
            told.append(cost.uncertain_us_per_row)
    assert sum(told) / len(told) == pytest.approx((sum(errors) / len(errors)) ** 0.5, rel=0.3)
    assert cost.rows_within(1_000, doubt=2.0) >= cost.rows_within(1_000)
