"""Models with any number of responses, from the model's process to a gateway's callback, also when callers cancel."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import nats
import pytest

from tests.support.clients.inference_caller import Caller, Heard, array_of, run_with_caller
from tests.support.models.zoo import write_streamer
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.wire.registry import Heartbeat
from weir.schemas.wire.statistics import VersionCounters, WorkerCounters, unpack_counters

ALONE = "streamer"  # a request at a time
TOGETHER = "together"  # waits for four
DEFAULT = "not_decoupled"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("streams")
    models = folder / "models"
    write_streamer(models, ALONE, "")
    delay = "dynamic_batching { preferred_batch_size: [4] max_queue_delay_microseconds: 300000 }"
    write_streamer(models, TOGETHER, delay)
    write_streamer(models, DEFAULT, "", decoupled=False)
    with Server(folder, models) as started:
        yield started
        wait_until(lambda: not asyncio.run(_held(started.nats_url)))


@pytest.fixture
def run(server: Server) -> Callable[[Callable[[Caller], Any]], Any]:
    """Runs a coroutine function with a caller."""
    return partial(run_with_caller, server.nats_url)


async def _held(nats_url: str) -> list[int]:
    """The batches that the worker holds, as it tells once a second."""
    client = await nats.connect(nats_url)
    try:
        beats = await client.subscribe("heartbeat.*")
        beat = Heartbeat.unpack((await beats.next_msg(5)).data)
    finally:
        await client.close()
    return [batch_id for batches in beat.batches.values() for batch_id in batches]


async def _statistics(nats_url: str, model: str) -> VersionCounters:
    client = await nats.connect(nats_url)
    try:
        answers = await client.subscribe("told")
        await client.publish("statistics.query", reply="told")
        while True:
            told = unpack_counters((await answers.next_msg(5)).data)
            if isinstance(told, WorkerCounters):
                return next(row for row in told.models if row.model == model)
    finally:
        await client.close()


def error_of(received: Heard) -> WeirError:
    error = received.outcomes[-1]
    assert isinstance(error, WeirError)
    return error


@pytest.mark.parametrize("in_thread", [False, True])
def test_none_one_and_many_responses(run: Callable[..., Any], in_thread: bool) -> None:
    async def ask(caller: Caller) -> None:
        for count in (0, 1, 30):
            for bare_end in (False, True):
                received = await caller.ask(ALONE, responses=count, in_thread=in_thread, bare_end=bare_end)
                await received.wait()
                assert received.numbers() == list(range(count))
                assert len(received.outcomes) == count + (bare_end or count == 0)

    run(ask)


def test_responses_of_a_batch_come_from_threads_in_any_order(run: Callable[..., Any], server: Server) -> None:
    async def ask(caller: Caller) -> None:
        before = await _statistics(server.nats_url, TOGETHER)
        received = [
            await caller.ask(TOGETHER, responses=20, in_thread=True, pause_ms=pause, size=pause + 1)
            for pause in (8, 1, 4, 0)
        ]
        await asyncio.gather(*(one.wait() for one in received))
        assert [one.numbers() for one in received] == [list(range(20))] * 4
        assert [array_of(one.outcomes[0], "CONTENT").size for one in received] == [9, 2, 5, 1]
        after = await _statistics(server.nats_url, TOGETHER)
        assert after.execution_count - before.execution_count == 1
        assert after.success[0] - before.success[0] == 4

    run(ask)


def test_the_instance_serves_others_while_streams_are_open(run: Callable[..., Any]) -> None:
    async def ask(caller: Caller) -> None:
        long = [await caller.ask(ALONE, responses=60, in_thread=True, pause_ms=10) for _ in range(10)]
        await asyncio.gather(*(one.wait(1) for one in long))
        short = await caller.ask(ALONE, responses=1)
        await short.wait()
        assert not any(one.is_over for one in long)
        await asyncio.gather(*(one.wait() for one in long))
        assert [one.numbers() for one in long] == [list(range(60))] * 10

    run(ask)


def test_large_responses(run: Callable[..., Any], server: Server) -> None:
    async def ask(caller: Caller) -> None:
        for in_thread in (False, True):
            received = await caller.ask(ALONE, responses=50, size=1_000_000, in_thread=in_thread)
            await received.wait()
            for number, outcome in enumerate(received.outcomes):
                content = array_of(outcome, "CONTENT")
                assert content.shape == (1, 1_000_000)
                assert (content == number).all()

    run(ask)
    # The gateway gives slots back as it reads, so fifty of them were never needed.
    assert server.segments()


def test_an_error_does_not_end_a_stream_but_a_failure_does(run: Callable[..., Any]) -> None:
    async def ask(caller: Caller) -> None:
        received = await caller.ask(ALONE, responses=3, error_at=1)
        await received.wait()
        error = received.outcomes[1]
        assert isinstance(error, WeirError)
        assert (error.code, error.message, received.numbers()) == (ErrorCode.NOT_FOUND, "error 1", [0, 2])

        received = await caller.ask(ALONE, responses=5, raise_at=3)
        await received.wait()
        assert received.numbers() == [0, 1, 2]
        assert error_of(received).code is ErrorCode.INTERNAL
        start = f"Failed to process the request(s) for model '{ALONE}_0', message: ValueError: asked to raise\n\nAt:\n"
        assert error_of(received).message.startswith(start)

    run(ask)


def test_a_failure_ends_each_request_of_its_batch_once_that_was_heard_of(run: Callable[..., Any]) -> None:
    async def ask(caller: Caller) -> None:
        received = [
            await caller.ask(TOGETHER, **plan)
            for plan in ({"responses": 2}, {"responses": 2, "end_never": True}, {"responses": 2, "raise_at": 1})
        ]
        received.append(await caller.ask(TOGETHER, responses=2))
        await asyncio.gather(*(one.wait() for one in received))
        # Nobody has heard anything of the last one: it is run again.
        assert [one.numbers() for one in received] == [[0, 1], [0, 1], [0], [0, 1]]
        assert [isinstance(one.outcomes[-1], WeirError) for one in received] == [False, True, True, False]

    run(ask)


@pytest.mark.parametrize("in_thread", [False, True])
def test_who_gives_up_is_heard_of_by_the_model(
    run: Callable[..., Any], server: Server, tmp_path: Path, in_thread: bool
) -> None:
    told = tmp_path / "cancelled"

    async def ask(caller: Caller) -> None:
        before = await _statistics(server.nats_url, ALONE)
        received = await caller.ask(ALONE, until_cancelled=str(told), in_thread=in_thread)
        await received.wait(3)
        assert received.pending is not None
        caller.inference.cancel(received.pending)
        count = len(received.outcomes)
        while (after := await _statistics(server.nats_url, ALONE)).failures == before.failures:
            await asyncio.sleep(0.05)
        assert int(told.read_text()) >= 3
        assert len(received.outcomes) == count
        assert after.failures["CANCELED"] == before.failures["CANCELED"] + 1
        assert after.success == before.success

    run(ask)


def test_a_gateway_that_stops_gives_up_its_streams(run: Callable[..., Any], tmp_path: Path) -> None:
    told = tmp_path / "cancelled"

    async def ask(caller: Caller) -> None:
        received = await caller.ask(ALONE, until_cancelled=str(told))
        await received.wait(2)
        await caller.inference.stop(0)
        assert (error_of(received).code, error_of(received).message) == (
            ErrorCode.UNAVAILABLE,
            "the server is stopping",
        )

    run(ask)
    wait_until(told.exists)


@pytest.mark.parametrize("in_thread", [False, True])
def test_the_process_dies_in_the_middle(run: Callable[..., Any], in_thread: bool) -> None:
    async def ask(caller: Caller) -> None:
        received = await caller.ask(ALONE, responses=5, kill_at=3, in_thread=in_thread)
        await received.wait()
        assert received.numbers() == [0, 1, 2]
        assert error_of(received).code is ErrorCode.UNAVAILABLE
        assert "the request may be sent again" in error_of(received).message
        again = await caller.ask(ALONE, responses=2)
        await again.wait()
        assert again.numbers() == [0, 1]

    run(ask)


def test_the_worker_dies_in_the_middle(run: Callable[..., Any], server: Server) -> None:
    async def ask(caller: Caller) -> None:
        received = [await caller.ask(ALONE, responses=1000, pause_ms=10, in_thread=True) for _ in range(3)]
        await asyncio.gather(*(one.wait(3) for one in received))
        os.kill(server.pids()["worker"], signal.SIGKILL)
        await asyncio.gather(*(one.wait() for one in received))
        for one in received:
            assert error_of(one).code is ErrorCode.UNAVAILABLE
            assert error_of(one).message.startswith("the model's worker was lost while it was streaming the response")
        again = await caller.ask(ALONE, responses=2)
        await again.wait()
        assert again.numbers() == [0, 1]

    run(ask)
    server.wait_ready()


def test_the_scheduler_dies_in_the_middle(run: Callable[..., Any], server: Server) -> None:
    """Its successor has the requests run again, for it can't know better: nobody may see two runs of a request."""

    async def ask(caller: Caller) -> None:
        received = [await caller.ask(ALONE, responses=150, pause_ms=10, in_thread=True) for _ in range(3)]
        await asyncio.gather(*(one.wait(3) for one in received))
        server.kill("scheduler")
        await asyncio.gather(*(one.wait() for one in received))
        assert [one.numbers() for one in received] == [list(range(150))] * 3

    run(ask)
    server.wait_ready()


def test_the_broker_dies_in_the_middle(run: Callable[..., Any], server: Server) -> None:
    """What was on its way is lost with it: a stream is whole, or ends with an error, but has no gap."""

    async def ask(caller: Caller) -> None:
        received = [await caller.ask(ALONE, responses=100, pause_ms=pause, in_thread=True) for pause in (5, 10, 20)]
        await asyncio.gather(*(one.wait(3) for one in received))
        await asyncio.to_thread(server.kill, "nats")
        await asyncio.gather(*(one.wait() for one in received))
        for one in received:
            assert one.numbers() == list(range(len(one.numbers())))
            if len(one.numbers()) < 100:
                assert error_of(one).code is ErrorCode.UNAVAILABLE

    run(ask)
    server.wait_ready()


@pytest.mark.parametrize("plan", [{}, {"bare_end": True}, {"end_never": True}, {"in_thread": True, "pause_ms": 20}])
def test_a_sender_in_a_model_that_is_not_decoupled(run: Callable[..., Any], plan: dict[str, Any]) -> None:
    async def ask(caller: Caller) -> None:
        received = await caller.ask(DEFAULT, responses=1, **plan)
        await received.wait()
        assert received.numbers() == [0]

    run(ask)


def test_giving_up_reaches_a_model_that_is_not_decoupled_and_what_waits_behind_it(
    run: Callable[..., Any], server: Server, tmp_path: Path
) -> None:
    told, never_told = tmp_path / "cancelled", tmp_path / "never"

    async def ask(caller: Caller) -> None:
        before = await _statistics(server.nats_url, DEFAULT)
        running = await caller.ask(DEFAULT, until_cancelled=str(told), silent=True)
        staged = await caller.ask(DEFAULT, until_cancelled=str(never_told), silent=True)
        async with asyncio.timeout(10):
            while not told.with_name("cancelled.begun").exists():
                await asyncio.sleep(0.01)
        for received in (staged, running):
            assert received.pending is not None
            caller.inference.cancel(received.pending)
            await caller.flush()
        answered = await caller.ask(DEFAULT, responses=1)
        await answered.wait()
        assert told.exists()
        assert not never_told.exists()
        after = await _statistics(server.nats_url, DEFAULT)
        assert after.failures["CANCELED"] - before.failures["CANCELED"] in (1, 2)
        assert after.success[0] - before.success[0] == 1
        assert not staged.outcomes
        assert not running.outcomes

    run(ask)


def test_responses_are_counted_by_their_number(run: Callable[..., Any], server: Server) -> None:
    async def ask(caller: Caller) -> dict[int, Any]:
        received = await caller.ask(TOGETHER, responses=2, bare_end=True, error_at=1)
        await received.wait()
        return (await _statistics(server.nats_url, TOGETHER)).responses

    responses = run(ask)
    first, second, third = (responses[index] for index in range(3))
    assert first["success"][0] >= 1
    assert second["fail"][0] >= 1
    assert third["empty_response"][0] >= 1
    assert third["compute_output"][0] <= third["compute_infer"][0]
