"""Closed and open loops, on sessions whose answers the test times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import pytest

from tests.support.waiting import eventually
from weir.perf.clients.session import Answer, CallFailed, SampleRequest, Unreachable
from weir.perf.load.arrivals import ArrivalProcess, Arrivals
from weir.perf.load.levels import Level, Mode
from weir.perf.load.sequences import SequenceSource, SequenceStep
from weir.perf.load.stability import StabilityRule
from weir.perf.measurement.client_load import ClientReading, client_limits
from weir.perf.measurement.distribution import Window
from weir.perf.measurement.level import LevelResult, Timing, measure_level
from weir.perf.measurement.loops import ClosedLoop, LoadLoop, OpenLoop
from weir.perf.measurement.precise_timer import PreciseTimer
from weir.perf.measurement.server_statistics import ServerCounters
from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START


class FakeClient:
    """Sessions that answer after `service_s`, or fail with `error`; `calls` are (session, sample, step)."""

    def __init__(self, service_s: float = 0.0, error: Callable[[], Exception | None] = lambda: None) -> None:
        self.service_s = service_s
        self.error = error
        self.calls: list[tuple[int, int, SequenceStep | None]] = []
        self.sessions = self.in_flight = self.most_in_flight = self.closed = 0

    def load(self, samples: Sequence[SampleRequest]) -> None:
        raise NotImplementedError

    def session(self) -> FakeSession:
        self.sessions += 1
        return FakeSession(self, self.sessions)

    async def close(self) -> None:
        raise NotImplementedError


class FakeSession:
    def __init__(self, client: FakeClient, number: int) -> None:
        self.client = client
        self.number = number

    async def infer(self, sample: int, step: SequenceStep | None) -> Answer:
        client = self.client
        client.calls.append((self.number, sample, step))
        client.in_flight += 1
        client.most_in_flight = max(client.most_in_flight, client.in_flight)
        try:
            await asyncio.sleep(client.service_s)
        finally:
            client.in_flight -= 1
        if (error := client.error()) is not None:
            raise error
        now_s = time.perf_counter()
        return Answer((now_s,), now_s)

    async def close(self) -> None:
        self.client.closed += 1


async def run_until(loop: LoadLoop, condition: Callable[[], object], drain_s: float = 5.0) -> int:
    async with asyncio.TaskGroup() as group:
        loop.start(group)
        await eventually(condition)
        return await loop.stop(drain_s)


def open_loop(
    client: FakeClient, per_s: float, max_in_flight: int, sequences: SequenceSource | None = None
) -> OpenLoop:
    return OpenLoop(client, 1, sequences, False, Arrivals(per_s, ArrivalProcess.CONSTANT, 1), max_in_flight)


async def test_a_closed_loop_keeps_its_number_of_requests_in_flight() -> None:
    client = FakeClient(0.001)
    loop = ClosedLoop(client, 3, None, False, 4)
    unanswered = await run_until(loop, lambda: len(client.calls) >= 40)
    assert unanswered == 0
    assert (client.sessions, client.most_in_flight, client.in_flight, client.closed) == (4, 4, 0, 4)
    assert loop.window.succeeded == len(client.calls)
    assert [sample for _, sample, _ in client.calls[:6]] == [0, 1, 2, 0, 1, 2]


async def test_each_session_sends_one_sequence_after_the_other_and_ends_the_last_one() -> None:
    client = FakeClient(0.001)
    loop = ClosedLoop(client, 2, SequenceSource(3, 1), False, 2)
    await run_until(loop, lambda: len(client.calls) >= 20)
    by_sequence: dict[int | str, list[tuple[int, SequenceStep]]] = {}
    for session, sample, step in client.calls:
        assert step is not None
        assert sample in (step.number % 2, 0)
        by_sequence.setdefault(step.correlation_id, []).append((session, step))
    assert len(by_sequence) > 2
    for calls in by_sequence.values():
        assert len({session for session, _ in calls}) == 1
        assert [step.number for _, step in calls] == list(range(len(calls)))
        assert calls[0][1].flags & SEQUENCE_START
        assert calls[-1][1].flags & SEQUENCE_END  # also of those that the end of the level cut short


async def test_a_failed_step_begins_a_new_sequence() -> None:
    errors = iter([None, CallFailed("lost")])
    client = FakeClient(error=lambda: next(errors, None))
    loop = ClosedLoop(client, 1, SequenceSource(5, 1), False, 1)
    await run_until(loop, lambda: len(client.calls) >= 4)
    assert [(step.correlation_id, step.number) for _, _, step in client.calls[:4] if step] == [
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]


async def test_errors_are_counted_by_text() -> None:
    errors = iter([CallFailed("no"), None, CallFailed("no"), CallFailed("gone", is_connection=True)])
    loop = ClosedLoop(client := FakeClient(error=lambda: next(errors, None)), 1, None, False, 1)
    await run_until(loop, lambda: len(client.calls) >= 6)
    assert loop.window.errors == {"no": 2, "gone": 1}
    assert loop.window.succeeded == len(client.calls) - 3


async def test_an_open_loop_sends_by_the_clock() -> None:
    client = FakeClient(0.03)
    loop = open_loop(client, 200, 100)
    began_s = time.perf_counter()
    await run_until(loop, lambda: len(client.calls) >= 40)
    assert time.perf_counter() - began_s >= 39 / 200
    assert client.most_in_flight > 1  # it does not wait for answers


async def test_latency_of_an_open_loop_counts_from_when_a_request_was_due() -> None:
    """No coordinated omission: one slow server makes all requests that were due meanwhile slow."""
    client = FakeClient(0.02)
    loop = open_loop(client, 200, 1)
    began_s = time.perf_counter()
    await run_until(loop, lambda: len(client.calls) >= 20)
    assert client.most_in_flight == 1
    # The request number n is due at n * 5 ms, and answered at the earliest at (n + 1) * 20 ms.
    assert loop.window.latency.max_s >= 19 * 0.015 * 0.95
    assert loop.window.latency.quantile_s(0.5) >= 9 * 0.015 * 0.9
    # What the client delayed is counted from when the server was free, so it lies between the requests, not in them.
    answered_s = loop.window.succeeded * client.service_s
    assert loop.window.send_delay.sum_s <= time.perf_counter() - began_s - answered_s


async def test_requests_that_are_not_answered_in_time_are_cancelled_and_counted() -> None:
    client = FakeClient(60.0)
    loop = open_loop(client, 1000, 5)
    assert await run_until(loop, lambda: client.in_flight == 5, drain_s=0.01) == 5
    assert client.in_flight == 0
    assert client.closed == 5


async def test_sequences_of_an_open_loop_keep_their_order() -> None:
    client = FakeClient(0.002)
    await run_until(open_loop(client, 2000, 3, SequenceSource(4, 1)), lambda: len(client.calls) >= 30)
    numbers: dict[int | str, list[int]] = {}
    for _, _, step in client.calls:
        assert step is not None
        numbers.setdefault(step.correlation_id, []).append(step.number)
    assert all(found == list(range(len(found))) for found in numbers.values())


async def test_an_error_of_the_client_itself_is_not_hidden() -> None:
    client = FakeClient(error=lambda: ZeroDivisionError())
    with pytest.raises(ExceptionGroup):
        await run_until(ClosedLoop(client, 1, None, False, 1), lambda: False)


async def test_the_timer_is_never_early() -> None:
    timer = PreciseTimer()
    try:
        for wait_s in (0.0, -1.0, 0.0003, 0.001, 0.012):
            began_s = time.perf_counter()
            await timer.sleep(wait_s)
            assert time.perf_counter() - began_s >= wait_s
    finally:
        timer.close()


LEVEL = Level(Mode.CONCURRENCY, 1)


async def measured(
    client: FakeClient,
    timing: Timing,
    stop: asyncio.Event | None = None,
    on_window: Callable[[int], None] = lambda n: None,
) -> LevelResult:
    async def read_counters() -> ServerCounters:
        raise Unreachable("no statistics")

    def show(level: Level, number: int, window: Window) -> None:
        on_window(number)

    loop = ClosedLoop(client, 1, None, False, 1)
    return await measure_level(LEVEL, loop, timing, read_counters, stop or asyncio.Event(), show)


async def test_a_level_is_measured_until_its_windows_agree() -> None:
    result = await measured(FakeClient(0.01), Timing(0.0, 0.1, StabilityRule(1.0, 10)))
    assert result.is_stable
    assert result.windows == 3
    assert result.window.seconds >= 0.3
    assert result.server is None  # its statistics could not be read


async def test_a_window_goes_on_until_a_request_has_ended() -> None:
    result = await measured(FakeClient(0.05), Timing(0.0, 0.001, StabilityRule(1.0, 1)))
    assert result.windows == 1
    assert result.has_answers


async def test_a_window_without_any_end_ends_after_a_while() -> None:
    result = await measured(FakeClient(600.0), Timing(0.0, 0.001, StabilityRule(1.0, 1), silence_s=0.02))
    assert result.windows == 1
    assert not result.has_answers


async def test_a_level_that_never_settles_ends() -> None:
    numbers: list[int] = []
    result = await measured(FakeClient(), Timing(0.0, 0.01, StabilityRule(0.0, 5)), on_window=numbers.append)
    assert numbers == [1, 2, 3, 4, 5]
    assert not result.is_stable
    assert result.windows == 3


async def test_a_level_without_answers_ends_with_its_first_window() -> None:
    result = await measured(FakeClient(0.001, lambda: CallFailed("no")), Timing(0.0, 0.05, StabilityRule(0.1, 10)))
    assert result.windows == 1
    assert not result.has_answers
    assert set(result.window.errors) == {"no"}


async def test_an_interrupted_level_has_what_was_measured() -> None:
    stop = asyncio.Event()
    client = FakeClient(0.001)
    task = asyncio.create_task(measured(client, Timing(0.0, 60.0, StabilityRule()), stop))
    await eventually(lambda: len(client.calls) > 5)
    stop.set()
    result = await task
    assert result.is_interrupted
    assert result.window.succeeded > 3
    assert result.window.seconds > 0


@pytest.mark.parametrize(
    ("reading", "send_delay_s", "reasons"),
    [
        (ClientReading(0.5, 0.5, 1.0, 0.001), 0.001, []),
        (ClientReading(0.9, 1.1, 1.0, 0.0), 0.0, ["its event loop used 90% of a processor"]),
        (ClientReading(0.5, 0.5, 0.5, 0.003), 0.0, ["its event loop was late by 3.0 ms (p90)"]),
        (ClientReading(0.5, 0.5, 0.5, 0.0), 0.004, ["requests were sent 4.0 ms after they were due (p99)"]),
    ],
)
def test_the_client_says_when_it_was_the_limit(reading: ClientReading, send_delay_s: float, reasons: list[str]) -> None:
    assert client_limits(reading, 0.010, send_delay_s) == reasons


def test_lateness_that_is_small_beside_the_latency_is_no_limit() -> None:
    assert client_limits(ClientReading(0.5, 0.5, 0.5, 0.004), 0.1, 0.004) == []
