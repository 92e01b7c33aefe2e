"""One NATS client's request: its window, what waits for acknowledgements, and what its headers may say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import orjson
import pytest

from bus.headers import parse_headers
from calls.catalog import ServedModel
from gateway.nats_door import call as nats_call
from gateway.nats_door.call import NatsCall
from gateway.nats_door.discovery import Endpoint
from gateway.nats_door.door import NatsDoor
from gateway.nats_door.window import window_of
from gateway.request_headers import read_headers
from runtime.memory_ledger import MemoryLedger
from schemas.errors import ErrorCode, WeirError, internal
from schemas.model_config import ModelConfig
from schemas.request_limits import RequestLimits
from schemas.requests import InferRequest, InferResponse
from schemas.tensors import Tensor

STREAMS = {"name": "m", "model_transaction_policy": {"decoupled": True}}


class Caller:
    """A caller with a window, and what it was sent: (headers, body, where to acknowledge)."""

    max_payload_bytes = 1 << 20

    def __init__(self, window: int = 0, ledger: MemoryLedger | None = None) -> None:
        self.sent: list[tuple[dict[str, str], bytes, str]] = []
        self.given_up = 0
        self.ended: list[NatsCall] = []
        self.ledger = ledger or MemoryLedger()
        self.call = NatsCall(self, "reply", "flow", self.ledger.account("nats"), self.ended.append)  # type: ignore[arg-type]
        self.call.begin(InferRequest("m"), ServedModel("m", ModelConfig.model_validate(STREAMS), [1], {}), window)
        self.call.give_up = self._give_up

    def _give_up(self) -> None:
        self.given_up += 1

    def publish(self, subject: str, data: bytes, reply: str, header_block: bytes) -> None:
        assert subject == "reply"
        assert len(header_block) + len(data) <= self.max_payload_bytes
        self.sent.append((parse_headers(header_block), data, reply))

    def answer(self, size: int = 10, is_final: bool = False) -> None:
        output = Tensor("OUT", "UINT8", [size], bytes(size))
        self.call.answer(InferResponse("m", "1", "", [output], None), is_final)

    @property
    def error(self) -> str:
        return self.sent[-1][0].get("nats-service-error", "")


async def test_answers_wait_for_acknowledgements_and_leave_no_trace() -> None:
    caller = Caller(window=2)
    for number in range(5):
        caller.answer(is_final=number == 4)
    assert len(caller.sent) == 2
    assert caller.ledger.total_bytes > 0
    for arrived in (3, 4, 5):
        assert not caller.ended
        caller.call.acknowledged()
        assert len(caller.sent) == arrived
    assert [headers["weir-final"] for headers, _, _ in caller.sent] == ["false"] * 4 + ["true"]
    assert [reply for _, _, reply in caller.sent] == ["flow"] * 4 + [""]
    assert caller.ended == [caller.call]
    assert caller.ledger.total_bytes == 0


async def test_who_acknowledges_nothing_is_given_up_also_after_the_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_call, "ACKNOWLEDGEMENT_PATIENCE_S", 0.01)
    caller = Caller(window=1)
    caller.answer()
    caller.answer(is_final=True)
    async with asyncio.timeout(5):
        while not caller.ended:
            await asyncio.sleep(0.005)
    assert "acknowledged no answer" in caller.error
    assert (caller.sent[-1][0]["weir-final"], len(caller.sent)) == ("true", 2)
    assert caller.ledger.total_bytes == 0


async def test_what_waits_of_all_requests_is_bounded_by_the_ledger() -> None:
    ledger = MemoryLedger(20_000)
    first, second = Caller(1, ledger), Caller(1, ledger)
    first.call.hold_body(1000)
    for caller in (first, first, first, second, second):
        caller.answer(1000)
    assert 7000 < ledger.total_bytes == ledger.held_bytes["nats"] < 9000
    while not second.ended:
        second.answer(1000)
    assert "fallen behind" in second.error
    assert not first.ended
    with pytest.raises(WeirError, match="too many unfinished requests") as raised:
        Caller(1, ledger).call.hold_body(9900)
    assert raised.value.retry_after_s == 1
    first.call.gone()
    assert (first.given_up, ledger.total_bytes) == (1, 0)


async def test_an_error_of_any_length_and_text_fits_into_a_message() -> None:
    for text in ("x" * 2_000_000, "\0" * 2_000_000, "\r\n" * 100_000, "\ud800" * 100_000):
        caller = Caller()
        caller.call.refuse(internal(text))
        headers, body, _ = caller.sent[0]
        assert headers["nats-service-error-code"] == "500"
        assert orjson.loads(body)["error"]
        assert caller.ended


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weir-priority", "9" * 5000),
        ("weir-priority", str(1 << 63)),
        ("weir-window", "9" * 5000),
        ("weir-window", "\u0664"),
        ("weir-sequence-start", "yes"),
        ("weir-deadline-ms", "1" * 5000),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(name: str, value: str) -> None:
    def read() -> None:
        read_headers({name: value}, RequestLimits())
        window_of({name: value})

    with pytest.raises(WeirError) as raised:
        read()
    assert raised.value.code is ErrorCode.INVALID_ARG
    assert len(raised.value.message) < 200


async def test_at_a_stop_each_caller_is_told_that_it_is_the_end() -> None:
    bus = StoppingBus()
    door = NatsDoor(bus, "gateway", cast(Any, None))  # type: ignore[arg-type]
    await door.start()
    caller = Caller(window=1)
    door._calls[1] = caller.call
    await door.stop()
    assert bus.subscribed == {"flow.gateway.*"}
    caller.answer()
    caller.answer(is_final=True)
    await door.close(0.01)
    assert caller.error == "the server is stopping"
    assert len(caller.sent) == 2
    assert caller.ledger.total_bytes == 0


async def test_a_stop_waits_for_who_acknowledges_and_not_for_who_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_call, "STOPPING_PATIENCE_S", 0.2)
    door = NatsDoor(StoppingBus(), "gateway", cast(Any, None))  # type: ignore[arg-type]
    gone, slow = Caller(window=1), Caller(window=1)
    for number, caller in enumerate((gone, slow)):
        caller.call._on_end = partial(door._on_end, number, Endpoint("infer", "infer.*"))
        door._calls[number] = caller.call
        for answer in range(5):
            caller.answer(is_final=answer == 4)
    closing = asyncio.create_task(door.close(20))
    while len(slow.sent) < 5:
        await asyncio.sleep(0.1)
        slow.call.acknowledged()
    await asyncio.wait_for(closing, 10)
    assert (gone.error, len(gone.sent)) == ("the server is stopping", 2)
    assert slow.error == ""


class StoppingBus:
    """A bus that notes who listens, and of which the broker goes away."""

    def __init__(self) -> None:
        self.subscribed: set[str] = set()

    async def subscribe(self, subject: str, *_: object, **__: object) -> Callable[[], None]:
        self.subscribed.add(subject)
        return lambda: self.subscribed.discard(subject)

    async def flush(self) -> None:
        raise ConnectionError
