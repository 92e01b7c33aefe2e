"""`measure_level`: one level of load, in windows until they agree."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from weir.perf.clients.session import Unreachable
from weir.perf.load.levels import Level
from weir.perf.load.stability import StabilityRule, Verdict, WindowFigures
from weir.perf.measurement.client_load import ClientLoad, ClientReading, client_limits
from weir.perf.measurement.distribution import Window
from weir.perf.measurement.loops import LoadLoop
from weir.perf.measurement.server_statistics import ServerCounters, ServerFigures

ReadCounters = Callable[[], Awaitable[ServerCounters]]
"""Reads the statistics of the model. Raises Unreachable."""

OnWindow = Callable[[Level, int, Window], None]
"""Called after each window with its number, from 1."""


class Timing(NamedTuple):
    """How long a level is measured: `warmup_s` that do not count, then windows of `window_s`.

    A window in which no request has ended says nothing: it goes on until one has, for `silence_s` at most.
    """

    warmup_s: float = 0.5
    window_s: float = 2.0
    rule: StabilityRule = StabilityRule()
    silence_s: float = 10.0


@dataclass(frozen=True)
class LevelResult:
    """What was measured at one level.

    `window` is the sum of the windows that count, `windows` how many they are. `is_stable`: they agree.
    `unanswered` requests were cancelled at the end. `server` is None where the server's statistics can't be read.
    `client_limits` are the reasons for which the client was the limit. `is_interrupted`: it was ended early.
    """

    level: Level
    window: Window
    windows: int
    is_stable: bool
    unanswered: int
    server: ServerFigures | None
    client: ClientReading
    client_limits: list[str]
    is_interrupted: bool = False

    @property
    def has_answers(self) -> bool:
        """Whether any request was answered."""
        return self.window.succeeded > 0


class _Windows:
    """The windows of a level so far, and the server's statistics before the first and after each."""

    def __init__(self, read_counters: ReadCounters) -> None:
        self.done: list[Window] = []
        self._read_counters = read_counters
        self._counters: list[ServerCounters | None] = []

    async def read(self) -> None:
        """Reads the server's statistics."""
        counters = None
        with contextlib.suppress(Unreachable):
            counters = await self._read_counters()
        self._counters.append(counters)

    @property
    def figures(self) -> list[WindowFigures]:
        """What is compared."""
        return [WindowFigures(window.per_s, window.latency.quantile_s(0.5)) for window in self.done]

    def last(self, count: int) -> tuple[Window, int, ServerFigures | None]:
        """The sum of the last `count` windows, how many there are, and what the server did meanwhile."""
        counted = self.done[-count:]
        total = Window(counted[0].started_s if counted else 0.0)
        for window in counted:
            total.merge(window)
        server = None
        if counted and len(self._counters) > len(counted):
            before, after = self._counters[-len(counted) - 1], self._counters[-1]
            if before is not None and after is not None:
                server = ServerFigures.between(before, after)
        return total, len(counted), server


async def measure_level(  # noqa: PLR0913 - the parts of a measurement
    level: Level,
    loop: LoadLoop,
    timing: Timing,
    read_counters: ReadCounters,
    stop: asyncio.Event,
    on_window: OnWindow,
) -> LevelResult:
    """Runs `loop` until the windows agree, or there are too many, or `stop` is set."""
    windows = _Windows(read_counters)
    verdict = Verdict.GO_ON
    async with asyncio.TaskGroup() as group:
        loop.start(group)
        await _sleep(timing.warmup_s, stop)
        await windows.read()
        client = ClientLoad()
        while verdict is Verdict.GO_ON and not stop.is_set():
            loop.window = window = Window(time.perf_counter())
            await _sleep(timing.window_s, stop)
            await _until_one_has_ended(window, timing.silence_s, stop)
            window.end(time.perf_counter())
            loop.window = Window(time.perf_counter())  # what ends while statistics are read counts in none
            await windows.read()
            windows.done.append(window)
            on_window(level, len(windows.done), window)
            verdict = timing.rule.decide(windows.figures)
            if window.failed and not any(one.succeeded for one in windows.done):
                verdict = Verdict.UNSTABLE  # more of it would be no news
        reading = client.stop_reading()
        unanswered = await loop.stop()
    total, count, server = windows.last(timing.rule.counted)
    return LevelResult(
        level=level,
        window=total,
        windows=count,
        is_stable=verdict is Verdict.STABLE,
        unanswered=unanswered,
        server=server,
        client=reading,
        client_limits=client_limits(reading, total.latency.quantile_s(0.5), total.send_delay.quantile_s(0.99)),
        is_interrupted=stop.is_set(),
    )


_LOOK_S = 0.01


async def _until_one_has_ended(window: Window, timeout_s: float, stop: asyncio.Event) -> None:
    until_s = time.perf_counter() + timeout_s
    while not (window.succeeded or window.failed or stop.is_set()) and time.perf_counter() < until_s:
        await _sleep(_LOOK_S, stop)


async def _sleep(seconds: float, stop: asyncio.Event) -> None:
    """Waits so long, or until `stop` is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()
