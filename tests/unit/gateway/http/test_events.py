"""A generate request takes any number of responses, at any time, and holds no more of them than its bound."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.access.doors import open_gate
from weir.calls.catalog import ServedModel
from weir.calls.in_flight import OnResponse
from weir.calls.inference import call as waiting
from weir.calls.inference.documents import Document
from weir.gateway.http.events import WRONG_COUNT, Event, EventCall
from weir.gateway.http.generate import GenerateCodec
from weir.http_server.asgi import CONNECTION_KEY
from weir.http_server.connection_memory import MEMORY_KEY, RequestMemory
from weir.runtime.memory_ledger import MemoryLedger
from weir.runtime.offload import Offload
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError, internal, not_found
from weir.schemas.core.request_limits import DEFAULT_LIMITS
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.core.tensors import Tensor
from weir.schemas.kserve.response import error_body
from weir.schemas.wire.calls import Caller

STREAMS = {"name": "m", "model_transaction_policy": {"decoupled": True}}
SERVED = ServedModel("m", ModelConfig.model_validate(STREAMS), [1], {})


class FakeInference:
    """Takes one request, to which the test responds."""

    def __init__(self) -> None:
        self.cancelled = 0
        self.answer: OnResponse = lambda _outcome, _is_final: None

    def submit(
        self, _request: InferRequest, on_response: OnResponse, traffic_key: str, served: ServedModel, caller: Caller
    ) -> Any:
        self.answer = on_response
        return object()

    def cancel(self, _pending: Any) -> None:
        self.cancelled += 1


def response(text: str) -> InferResponse:
    return InferResponse("m", "1", outputs=[Tensor.from_numpy("OUT", np.array([text], object), "BYTES")])


def event(text: str) -> Event:
    return Event(200, f'{{"OUT":"{text}","model_name":"m","model_version":"1"}}'.encode())


def call_of(inference: FakeInference, memory: RequestMemory | None = None, on_abort: Callable[[], Any] = int) -> Any:
    """A call that is submitted."""
    connection = SimpleNamespace(raw_headers=None, abort=on_abort)
    request = SimpleNamespace(headers={}, scope={CONNECTION_KEY: connection, MEMORY_KEY: memory})
    context = SimpleNamespace(gate=open_gate(), inference=inference, offload=Offload(), limits=DEFAULT_LIMITS)
    made = EventCall(context, GenerateCodec(), request, Document(SERVED, "m", "", b"{}"))  # type: ignore[arg-type]
    made.open()
    return made


def run(scenario: Callable[[FakeInference, EventCall], Awaitable[None]]) -> FakeInference:
    async def main() -> FakeInference:
        inference = FakeInference()
        await asyncio.wait_for(scenario(inference, call_of(inference)), 5)
        return inference

    return asyncio.run(main())


async def every(made: EventCall) -> list[Event]:
    events = []
    while (next_event := await made.next()) is not None:
        events.append(next_event)
    return events


def test_responses_come_in_order() -> None:
    async def scenario(inference: FakeInference, made: EventCall) -> None:
        reading = asyncio.create_task(every(made))
        for text in "abc":
            await asyncio.sleep(0)
            inference.answer(response(text), False)
        inference.answer(None, True)
        assert await reading == [event("a"), event("b"), event("c")]

    assert run(scenario).cancelled == 0


@pytest.mark.parametrize("texts", ["", "a", "abc"])
def test_an_end_with_and_without_a_response(texts: str) -> None:
    async def bare(inference: FakeInference, made: EventCall) -> None:
        for text in texts:
            inference.answer(response(text), False)
        inference.answer(None, True)
        assert await every(made) == [event(text) for text in texts]
        assert await made.next() is None

    async def with_answer(inference: FakeInference, made: EventCall) -> None:
        for number, text in enumerate(texts):
            inference.answer(response(text), number == len(texts) - 1)
        assert await every(made) == [event(text) for text in texts]

    run(bare)
    if texts:
        run(with_answer)


def test_an_error_is_an_event_with_its_status() -> None:
    async def scenario(inference: FakeInference, made: EventCall) -> None:
        inference.answer(response("a"), False)
        inference.answer(not_found("gone"), True)
        assert await every(made) == [event("a"), Event(404, b'{"error":"gone"}')]

    run(scenario)


def test_an_output_that_can_not_be_written_is_an_error() -> None:
    async def scenario(inference: FakeInference, made: EventCall) -> None:
        half = Tensor.from_numpy("OUT", np.zeros([2], np.float16), "FP16")
        inference.answer(InferResponse("m", "1", outputs=[half]), True)
        (told,) = await every(made)
        assert told.status == 400
        assert b"sending FP16 data via JSON is not supported" in told.body

    run(scenario)


WRONG = error_body(WRONG_COUNT)


@pytest.mark.parametrize(
    ("outcomes", "expected", "cancelled"),
    [
        ([(response("a"), True)], event("a"), 0),
        ([(response("a"), False), (None, True)], event("a"), 0),
        ([(internal("no"), True)], Event(500, b'{"error":"no"}'), 0),
        ([(None, True)], Event(200, WRONG), 0),
        ([(response("a"), False), (response("b"), True)], Event(200, WRONG), 0),
        ([(response("a"), False), (response("b"), False)], Event(200, WRONG), 1),
        ([(response("a"), False), (internal("no"), True)], Event(200, WRONG), 0),
        ([(not_found("no"), False), (response("b"), True)], Event(404, WRONG), 0),
    ],
)
def test_the_only_response(
    outcomes: list[tuple[InferResponse | WeirError | None, bool]], expected: Event, cancelled: int
) -> None:
    async def scenario(inference: FakeInference, made: EventCall) -> None:
        waiting = asyncio.create_task(made.single())
        for outcome in outcomes:
            await asyncio.sleep(0)
            inference.answer(*outcome)
        assert await waiting == expected

    assert run(scenario).cancelled == cancelled


def test_a_disconnect_cancels_the_request_once() -> None:
    async def scenario(inference: FakeInference, made: EventCall) -> None:
        inference.answer(response("a"), False)
        reading = asyncio.create_task(every(made))
        await asyncio.sleep(0)
        made.close()
        made.close()
        assert await reading == [event("a")]

    assert run(scenario).cancelled == 1


def test_a_disconnect_after_the_end_cancels_nothing() -> None:
    async def scenario(inference: FakeInference, made: EventCall) -> None:
        inference.answer(response("a"), True)
        made.close()

    assert run(scenario).cancelled == 0


def test_the_request_of_a_reader_that_falls_behind_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MAX_WAITING_BYTES", 10_000)
    overflows = []

    async def main() -> None:
        inference = FakeInference()
        made = call_of(inference, None, lambda: overflows.append(1))
        sent = 0
        while not inference.cancelled:
            inference.answer(response("x" * 100), False)
            sent += 1
            assert sent < 100
        assert sent > 20
        assert await made.next() is None

    asyncio.run(main())
    assert overflows == [1]


def test_responses_that_wait_for_their_reader_are_charged_and_bounded_by_the_ledger() -> None:
    ledger = MemoryLedger(10_000)
    account = ledger.account("reader")
    overflows = []

    async def main() -> None:
        inference = FakeInference()
        made = call_of(inference, RequestMemory(account), lambda: overflows.append(1))
        for _ in range(4):
            inference.answer(response("x" * 1000), False)
        assert 3 * 1000 < ledger.held_bytes["unsent"] < 4 * 1300  # the first one is on its way
        assert await made.next() == event("x" * 1000)
        while not inference.cancelled:
            inference.answer(response("x" * 1000), False)
            assert account.held_bytes <= 5_000
        account.close()

    asyncio.run(main())
    assert overflows == [1]
    assert ledger.refused == {"unsent": 1}


def test_one_large_response_is_no_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MAX_WAITING_BYTES", 100)

    async def scenario(inference: FakeInference, made: EventCall) -> None:
        inference.answer(response("x" * 1000), True)
        assert await every(made) == [event("x" * 1000)]

    assert run(scenario).cancelled == 0
