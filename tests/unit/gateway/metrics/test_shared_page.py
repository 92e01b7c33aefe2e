"""However many clients ask for a page at once, few renderings answer them all, and none with old counters."""

from __future__ import annotations

import asyncio

import pytest

from weir.gateway.metrics.shared_page import MAX_PAUSE_S, SharedPage


class Rendered:
    """A page that shows a counter; each rendering takes `takes_s` of a clock that runs for nothing else but waits."""

    def __init__(self, takes_s: float = 0.1) -> None:
        self.takes_s = takes_s
        self.now_s = 100.0
        self.counter = 0
        self.began_s: list[float] = []
        self.fails = False
        self.page = SharedPage(self.render, lambda: self.now_s, self.sleep)

    async def render(self) -> bytes:
        self.began_s.append(self.now_s)
        counted = self.counter
        await asyncio.sleep(0)
        self.now_s += self.takes_s
        if self.fails:
            raise RuntimeError("raised by the test")
        return b"%d" % counted

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        await asyncio.sleep(0)


async def test_clients_that_ask_at_once_share_a_rendering() -> None:
    rendered = Rendered()
    assert set(await asyncio.gather(*(rendered.page.get() for _ in range(50)))) == {b"0"}
    assert len(rendered.began_s) == 1


async def test_a_client_that_asks_during_a_rendering_gets_the_next_one() -> None:
    rendered = Rendered()
    first = asyncio.create_task(rendered.page.get())
    while not rendered.began_s:
        await asyncio.sleep(0)
    rendered.counter = 7
    later = await asyncio.gather(*(rendered.page.get() for _ in range(50)))
    assert await first == b"0"
    assert set(later) == {b"7"}
    assert len(rendered.began_s) == 2


@pytest.mark.parametrize(("takes_s", "distance_s"), [(0.1, 0.5), (2.0, 2.0 + MAX_PAUSE_S)])
async def test_renderings_leave_time_to_others(takes_s: float, distance_s: float) -> None:
    rendered = Rendered(takes_s)
    for number in range(5):
        rendered.counter = number
        assert await rendered.page.get() == b"%d" % number
    distances = [after - before for before, after in zip(rendered.began_s, rendered.began_s[1:], strict=False)]
    assert distances == pytest.approx([distance_s] * 4)


async def test_a_client_that_leaves_does_not_end_it_for_the_others() -> None:
    rendered = Rendered()
    leaves, stays = (asyncio.create_task(rendered.page.get()) for _ in range(2))
    await asyncio.sleep(0)
    leaves.cancel()
    assert await stays == b"0"


async def test_an_error_is_raised_to_all_and_the_next_rendering_may_succeed() -> None:
    rendered = Rendered()
    rendered.fails = True
    outcomes = await asyncio.gather(*(rendered.page.get() for _ in range(3)), return_exceptions=True)
    assert {str(outcome) for outcome in outcomes} == {"raised by the test"}
    rendered.fails = False
    assert await rendered.page.get() == b"0"
