"""How often live requests find a job's batches in their way, on a made-up clock."""

from __future__ import annotations

import random

import pytest

from scheduler.leeway import FOUND_ONE_IN, LONGEST_QUIET_US, MOST_SAVED, SHORTEST_QUIET_US, Leeway


def traffic(leeway: Leeway, gaps_us: list[int], now_us: int = 10_000_000) -> tuple[int, int]:
    """Live requests after these gaps, for one instance that is else idle; (how many found it taken by a job, the time).

    A job's batch runs from the moment it may until the next live request has come.
    """
    found = 0
    for gap_us in gaps_us:
        may_us = leeway.may_run_alone_us(now_us, 1)
        runs = may_us < now_us + gap_us
        if runs:
            leeway.alone_began()
        now_us += gap_us
        leeway.live_came(now_us, 1, busy=int(runs), idle=int(not runs))
        if runs:
            found += 1
            leeway.alone_ended(now_us)
    return found, now_us


@pytest.mark.parametrize("mean_us", [500, 20_000, 200_000])
def test_a_steady_stream_is_hardly_ever_met(mean_us: int):
    dice = random.Random(mean_us)
    leeway = Leeway(0)
    gaps = [int(dice.expovariate(1 / mean_us)) for _ in range(20_000)]
    found, _ = traffic(leeway, gaps)
    longest = sum(gap > LONGEST_QUIET_US for gap in gaps)
    assert found <= 20_000 / FOUND_ONE_IN + longest


@pytest.mark.parametrize("burst", [1, 5, 50])
def test_nor_are_bursts(burst: int):
    dice = random.Random(burst)
    gaps = [int(dice.expovariate(1 / 200)) if number % burst else 300_000 for number in range(20_000)]
    found, _ = traffic(Leeway(0), gaps)
    assert found <= 20_000 / FOUND_ONE_IN + MOST_SAVED


def test_after_a_long_silence_a_job_runs_whatever_was_before():
    leeway = Leeway(0)
    _, now_us = traffic(leeway, [100_000] * 10)
    assert leeway.may_run_alone_us(now_us, 1) == now_us + LONGEST_QUIET_US


def test_quiet_is_never_shorter_than_some():
    leeway = Leeway(0)
    _, now_us = traffic(leeway, [100] * 5_000)
    assert leeway.may_run_alone_us(now_us, 1) == now_us + SHORTEST_QUIET_US


def test_nothing_runs_beside_batches_that_it_makes_slower():
    leeway = Leeway(0)
    now_us = 10_000_000
    for _ in range(2_000):
        now_us += 10_000
        leeway.live_came(now_us, 1, busy=0, idle=2)
        leeway.has_run(now_us + 1_000, now_us, 1, 1_000, is_alone=False, instances=2)
    assert leeway.may_run_alone_us(now_us, 2) == now_us
    leeway.alone_began()
    for _ in range(20):
        leeway.has_run(now_us + 2_000, now_us, 1, 1_500, is_alone=False, instances=2)
    leeway.alone_ended(now_us)
    assert leeway.may_run_alone_us(now_us, 2) > now_us


def test_riders_are_fewer_the_busier_live_requests_keep_the_instances():
    def riders(every_us: int) -> int:
        leeway = Leeway(0)
        now_us = 10_000_000
        for number in range(3_000):
            now_us += every_us
            rows = 1 + number % 32
            leeway.has_run(now_us, now_us - 5_000, rows, 5_000 + 10 * rows, is_alone=False, instances=1)
        return leeway.riders(1)

    assert 20 <= riders(100_000) <= 26
    assert riders(6_000) < 10


@pytest.mark.parametrize(("row_us", "least", "most"), [(0, 0.7, 1.0), (1_000, 0.0, 0.1)])
def test_what_a_row_costs_is_found_on_a_machine_that_does_much_else(row_us: int, least: float, most: float):
    dice = random.Random(4)
    leeway = Leeway(0)
    now_us, riding = 10_000_000, 0
    for _ in range(2_000):
        now_us += 16_667
        riders = min(15, leeway.riders(1))
        riding += riders
        busy_us = int((10_000 + row_us * riders) * dice.lognormvariate(0, 0.6))
        leeway.has_run(now_us, now_us - busy_us, 1 + riders, busy_us, is_alone=False, instances=2)
    assert least <= riding / (2_000 * 15) <= most
