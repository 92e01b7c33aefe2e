"""The gauge of event-loop lag sees a callback that computes for long, and forgets it after its window."""

from __future__ import annotations

import asyncio
import time

from weir.runtime.loop_lag import INTERVAL_S, REST_INTERVAL_S, REST_SHARE, WINDOW_S, LoopLag


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def block(seconds: float) -> None:
    """What must never happen in a role."""
    time.sleep(seconds)


async def test_a_blocking_callback_is_measured() -> None:
    lag = LoopLag()
    lag.start(asyncio.get_running_loop())
    try:
        await asyncio.sleep(0)
        block(INTERVAL_S + 0.2)
        await asyncio.sleep(0.001)
        assert lag.max_s() > 0.19
    finally:
        lag.stop()


async def test_after_stop_nothing_is_measured() -> None:
    lag = LoopLag()
    lag.start(asyncio.get_running_loop())
    lag.stop()
    block(INTERVAL_S + 0.05)
    await asyncio.sleep(0.001)
    assert lag.max_s() == 0


def test_the_greatest_lag_of_the_window_counts() -> None:
    clock = Clock()
    lag = LoopLag(clock)
    assert lag.max_s() == 0
    lag.record(0.5)
    clock.now_s += 0.1
    lag.record(0.1)
    clock.now_s += WINDOW_S - 1
    lag.record(0.2)
    assert lag.max_s() == 0.5
    clock.now_s += 2
    assert lag.max_s() == 0.2
    clock.now_s += 2 * WINDOW_S
    assert lag.max_s() == 0


def test_memory_is_bounded_by_the_window() -> None:
    clock = Clock()
    lag = LoopLag(clock)
    for _ in range(10_000):
        clock.now_s += INTERVAL_S
        lag.record(0.001)
    assert len(lag._seconds) <= WINDOW_S + 1


class Ticking:
    """A `LoopLag` on clocks of the test."""

    def __init__(self) -> None:
        self.clock, self.cpu = Clock(), Clock()
        self.lag = LoopLag(self.clock, self.cpu)
        self.lag._cpu_s = self.cpu()
        self.delay_s = INTERVAL_S

    def run(self, seconds: float, cpu_share: float) -> int:
        """Lets so much time pass; returns how often the timer fired."""
        until_s, wakes = self.clock.now_s + seconds, 0
        while self.clock.now_s < until_s:
            self.clock.now_s += self.delay_s
            self.cpu.now_s += self.delay_s * cpu_share
            self.delay_s = self.lag.next_delay_s(self.delay_s)
            wakes += 1
        return wakes


def test_a_loop_at_rest_is_woken_twice_a_second() -> None:
    ticking = Ticking()
    ticking.run(2.0, cpu_share=REST_SHARE / 4)
    assert ticking.run(10.0, cpu_share=REST_SHARE / 4) <= 10.0 / REST_INTERVAL_S + 1


def test_a_loop_that_works_is_measured_at_the_short_interval() -> None:
    ticking = Ticking()
    ticking.run(5.0, cpu_share=0.0)
    ticking.run(REST_INTERVAL_S, cpu_share=0.5)
    assert ticking.run(10.0, cpu_share=2 * REST_SHARE) >= 10.0 / INTERVAL_S - 1
