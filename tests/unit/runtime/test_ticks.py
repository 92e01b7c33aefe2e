"""Periodic tasks of a host wake up at the same moments, and keep their interval."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

from weir.runtime import ticks
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


async def test_tasks_that_begin_at_two_moments_wake_up_at_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loop:
        now_s = 1000.003

        def time(self) -> float:
            return self.now_s

    loop, woken = Loop(), list[float]()

    async def sleep(delay_s: float) -> None:
        woken.append(loop.now_s + delay_s)

    monkeypatch.setattr(ticks, "asyncio", SimpleNamespace(get_running_loop=lambda: loop, sleep=sleep))
    await next_tick(0.02)
    loop.now_s = 1000.009
    await next_tick(0.02)
    assert woken == pytest.approx([1000.02, 1000.02])
