from __future__ import annotations

import asyncio
import time

import pytest

from weir.scheduler.service import clock
from weir.scheduler.service.clock import DeadlineTimer


def now_us() -> int:
    return time.monotonic_ns() // 1000


@pytest.fixture(params=["timerfd", "loop", "no more files"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(clock, "_has_timerfd", request.param != "loop")
    if request.param == "no more files":

        def refuse(_result: int) -> int:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(clock, "_checked", refuse)
    return request.param


async def test_the_timer_expires_once_and_not_early(kind: str):
    rung = asyncio.Event()
    times: list[int] = []
    clock = DeadlineTimer(lambda: (times.append(now_us()), rung.set()))
    due_us = now_us() + 3_000
    clock.set(due_us)
    await asyncio.wait_for(rung.wait(), 10)
    # A loop's own timer may be early by the resolution it rounds to.
    assert times[0] >= due_us - (0 if kind == "timerfd" else 1_000)
    clock.close()
    assert len(times) == 1


async def test_a_later_setting_takes_the_place_of_an_earlier(kind: str):
    rung: asyncio.Queue[int] = asyncio.Queue()
    clock = DeadlineTimer(lambda: rung.put_nowait(now_us()))
    late_us = now_us() + 50_000
    clock.set(now_us() + 2_000)
    clock.set(late_us)
    assert await asyncio.wait_for(rung.get(), 10) >= late_us - 1_000
    assert rung.empty()
    clock.close()


async def test_a_time_in_the_past_is_now_and_it_can_be_set_again(kind: str):
    rung: asyncio.Queue[int] = asyncio.Queue()
    clock = DeadlineTimer(lambda: rung.put_nowait(1))
    for _ in range(3):
        clock.set(now_us() - 1_000_000)
        await asyncio.wait_for(rung.get(), 10)
    clock.close()


async def test_none_stops_the_timer(kind: str):
    rung: list[int] = []
    other = asyncio.Event()
    clock, second = DeadlineTimer(lambda: rung.append(1)), DeadlineTimer(other.set)
    clock.set(now_us() + 1_000)
    clock.set(None)
    second.set(now_us() + 10_000)
    await asyncio.wait_for(other.wait(), 10)
    assert rung == []
    clock.close()
    second.close()
