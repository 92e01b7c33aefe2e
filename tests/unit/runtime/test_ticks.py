"""Periodic tasks of a host wake up at the same moments, and keep their interval."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from weir.runtime.ticks import delay_to_tick_s, next_tick


def runs(start_s: float, interval_s: float, until_s: float, early_s: float = 0.0, work_s: float = 0.0) -> list[float]:
    """When a task runs whose timer fires `early_s` too early and whose work takes `work_s`."""
    now_s, found = start_s, []
    while now_s < until_s:
        now_s += delay_to_tick_s(now_s, interval_s) - early_s
        found.append(now_s)
        now_s += work_s
    return found


@pytest.mark.parametrize("start_s", [1000.0, 1000.01, 1000.13, 1000.49, 1000.74, 1000.999])
def test_tasks_with_multiples_of_an_interval_share_its_wake_ups(start_s: float) -> None:
    moments = {round(run_s, 6) for run_s in runs(start_s, 0.25, 1020)}
    for interval_s in (0.25, 0.5, 1.0):
        assert {round(run_s, 6) for run_s in runs(start_s + 0.2, interval_s, 1010)} <= moments


@pytest.mark.parametrize("early_s", [0.0, 0.001])
@pytest.mark.parametrize("work_s", [0.0, 0.01, 0.1])
def test_the_interval_is_kept(early_s: float, work_s: float) -> None:
    found = runs(1000.3, 0.25, 1030, early_s, work_s)
    gaps = [later - earlier for earlier, later in pairwise(found)]
    assert gaps == pytest.approx([0.25] * len(gaps), abs=0.002)


def test_the_first_run_is_at_most_one_and_a_half_intervals_away() -> None:
    for step in range(1000):
        assert 0.5 <= delay_to_tick_s(1000 + step / 1000, 1.0) <= 1.5


async def test_two_tasks_wake_up_in_the_same_turn() -> None:
    woken: list[float] = []

    async def wake(interval_s: float) -> None:
        await next_tick(interval_s)
        woken.append(asyncio.get_running_loop().time())

    await asyncio.gather(wake(0.02), wake(0.02))
    assert woken[1] - woken[0] < 0.01
