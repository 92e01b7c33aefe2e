"""`preserve_ordering`: a caller gets its responses in request order, whatever the instances do."""

from __future__ import annotations

import asyncio
import queue
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc

from tests.support.clients.inference_caller import Caller, Heard, array_of, run_with_caller
from tests.support.models.zoo import write_slow, write_streamer
from tests.support.servers.weir_server import Server
from weir.schemas.core.errors import WeirError
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import Tensor

ORDERED, UNORDERED, STREAMS = "ordered", "unordered", "ordered_streams"

REQUESTS = 2000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ordering")
    group = "instance_group [{ count: 2 kind: KIND_CPU }]"
    write_slow(folder / "models", ORDERED, f"dynamic_batching {{ preserve_ordering: true }} {group}")
    write_slow(folder / "models", UNORDERED, f"dynamic_batching {{ }} {group}")
    write_streamer(folder / "models", STREAMS, "dynamic_batching { preserve_ordering: true }")
    with Server(folder, folder / "models") as started:
        yield started
        assert started.in_flight() == 0


@pytest.fixture
def run(server: Server) -> Callable[[Callable[[Caller], Any]], Any]:
    """Runs a coroutine function with a caller."""
    return partial(run_with_caller, server.nats_url)


def delays() -> list[float]:
    """Milliseconds, mostly short."""
    drawn = random.Random(5)
    return [drawn.choice((0.0, 0.0, 0.5, 6.0)) for _ in range(REQUESTS)]


def inversions(order: list[int]) -> int:
    """How often an answer comes right after one to a later request."""
    return sum(later < earlier for earlier, later in pairwise(order))


async def values_heard(connected: Caller, model: str) -> list[int]:
    """The values of the answers to `REQUESTS` requests with values 0, 1, 2 and so on, in the order in which they came."""
    received: list[int] = []
    done = asyncio.Event()

    def on_response(outcome: Any, is_final: bool) -> None:
        assert is_final
        received.append(int(array_of(outcome, "VALUE_OUT")[0, 0]))
        if len(received) == REQUESTS:
            done.set()

    for value, delay_ms in enumerate(delays()):
        inputs = [
            Tensor.from_numpy("VALUE", np.array([[value]], np.int64), "INT64"),
            Tensor.from_numpy("DELAY_MS", np.array([[delay_ms]], np.float32), "FP32"),
        ]
        connected.inference.submit(InferRequest(model, inputs=inputs), on_response)
        if value % 10 == 9:
            await asyncio.sleep(0)  # several frames
    async with asyncio.timeout(20):
        await done.wait()
    return received


def test_answers_come_in_the_order_of_requests_from_two_instances(run: Any) -> None:
    async def test(connected: Caller) -> None:
        await (await connected.ask(STREAMS, responses=1)).wait()
        assert await values_heard(connected, ORDERED) == list(range(REQUESTS))
        without = await values_heard(connected, UNORDERED)
        assert sorted(without) == list(range(REQUESTS))
        assert inversions(without) > 0, "nothing would have been out of order anyway"

    run(test)


def test_a_grpc_stream_has_its_answers_in_order(server: Server) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with server.grpc() as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        for value, delay_ms in enumerate(delays()):
            tensors = []
            for name, datatype, array in (
                ("VALUE", "INT64", np.array([[value]], np.int64)),
                ("DELAY_MS", "FP32", np.array([[delay_ms]], np.float32)),
            ):
                tensors.append(tritonclient.grpc.InferInput(name, [1, 1], datatype))
                tensors[-1].set_data_from_numpy(array)
            client.async_stream_infer(ORDERED, tensors)
        got = [answers.get(timeout=20) for _ in range(REQUESTS)]
        client.stop_stream()
    assert [int(result.as_numpy("VALUE_OUT")[0, 0]) for result in got] == list(range(REQUESTS))


async def _two_streams(connected: Caller, first: dict[str, Any]) -> tuple[Heard, Heard, list[str]]:
    """Two requests, of which the second is answered at once; and who was told something, in order."""
    reply: list[str] = []
    streams = []
    for name, plan in (("first", first), ("second", {"responses": 3})):
        received = await connected.ask(STREAMS, in_thread=True, **plan)
        passed_on = received.on_response
        assert received.pending is not None

        def on_response(outcome: Any, is_final: bool, name: str = name, passed_on: Any = passed_on) -> None:
            reply.append(name)
            passed_on(outcome, is_final)

        received.pending.on_response = on_response
        streams.append(received)
    return streams[0], streams[1], reply


def test_a_stream_waits_for_the_end_of_the_one_before(run: Any) -> None:
    async def test(connected: Caller) -> None:
        first, second, reply = await _two_streams(connected, {"responses": 4, "pause_ms": 40})
        await second.wait()
        assert first.is_over
        assert (first.numbers(), second.numbers()) == ([0, 1, 2, 3], [0, 1, 2])
        assert reply == ["first"] * 4 + ["second"] * 3

    run(test)


def test_a_stream_that_fails_or_is_given_up_lets_the_next_one_go(run: Any, tmp_path: Path) -> None:
    async def test(connected: Caller) -> None:
        first, second, _ = await _two_streams(connected, {"responses": 2, "error_at": 0})
        await second.wait()
        assert isinstance(first.outcomes[0], WeirError)
        assert second.numbers() == [0, 1, 2]
        first, second, _ = await _two_streams(connected, {"until_cancelled": str(tmp_path / "sent")})
        await first.wait(2)
        assert not second.outcomes
        assert first.pending is not None
        connected.inference.cancel(first.pending)
        await second.wait()
        assert second.numbers() == [0, 1, 2]
        assert not first.is_over

    run(test)
