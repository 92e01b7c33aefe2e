"""One NATS client's request: its window, responses that wait for acknowledgements, and its headers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from tests.support.access.doors import open_gate
from weir.bus.nats.headers import parse_headers
from weir.calls.catalog import ServedModel
from weir.calls.request_headers import read_headers
from weir.gateway.nats import call as nats_call
from weir.gateway.nats.call import NatsCall, NatsRequest, requested_window
from weir.runtime.memory_ledger import MemoryLedger
from weir.runtime.offload import Offload
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError, internal
from weir.schemas.core.request_limits import RequestLimits
from weir.schemas.core.requests import InferResponse
from weir.schemas.core.tensors import Tensor
from weir.schemas.kserve.regions import no_regions

BODY = b'{"inputs":[]}'
STREAMS = {"name": "m", "model_transaction_policy": {"decoupled": True}}


class Caller:
    """A client with a window, and what it received: (headers, body, acknowledgement subject)."""

    max_payload_bytes = 1 << 20

    def __init__(
        self, window: int = 0, ledger: MemoryLedger | None = None, offload: Offload | None = None, body: bytes = BODY
    ) -> None:
        self.sent: list[tuple[dict[str, str], bytes, str]] = []
        self.cancellations = 0
        self.ended: list[NatsCall] = []
        self.ledger = ledger or MemoryLedger()
        served = ServedModel("m", ModelConfig.model_validate(STREAMS), [1], {})
        context = SimpleNamespace(
            gate=open_gate(),
            catalog=SimpleNamespace(resolve=lambda _name, _version: served),
            inference=SimpleNamespace(submit=lambda *_, **__: "pending", cancel=self._cancel),
            ledger=self.ledger,
            limits=RequestLimits(),
            offload=offload or Offload(),
            find_region=no_regions,
        )
        message = NatsRequest("m", "", {"weir-window": str(window)}, body)
        subjects = nats_call.ReplySubjects("reply", "flow")
        self.call = NatsCall(cast(Any, context), cast(Any, self), subjects, message, self.ended.append)
        self.call.open()

    def _cancel(self, _pending: object) -> None:
        self.cancellations += 1

    def publish(self, subject: str, data: bytes, reply: str, header_block: bytes) -> None:
        assert subject == "reply"
        assert len(header_block) + len(data) <= self.max_payload_bytes
        self.sent.append((parse_headers(header_block), data, reply))

    def on_response(self, size: int = 10, is_final: bool = False) -> None:
        output = Tensor("OUT", "UINT8", [size], bytes(size))
        if not self.ended:  # as the dispatcher does
            self.call.on_response(InferResponse("m", "1", "", [output], None), is_final)

    @property
    def error(self) -> str:
        return self.sent[-1][0].get("nats-service-error", "")


async def test_responses_wait_for_acknowledgements() -> None:
    caller = Caller(window=2)
    for number in range(5):
        caller.on_response(is_final=number == 4)
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


async def test_a_call_without_acknowledgements_ends_even_after_the_final_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nats_call, "ACKNOWLEDGEMENT_TIMEOUT_S", 0.01)
    caller = Caller(window=1)
    caller.on_response()
    caller.on_response(is_final=True)
    while not caller.ended:
        await asyncio.sleep(0.005)
    assert "acknowledged no response" in caller.error
    assert (caller.sent[-1][0]["weir-final"], len(caller.sent)) == ("true", 2)
    assert caller.ledger.total_bytes == 0


async def test_what_waits_of_all_requests_is_bounded_by_the_ledger() -> None:
    ledger = MemoryLedger(20_000)
    first, second = Caller(1, ledger, body=BODY.ljust(1000)), Caller(1, ledger)
    for caller in (first, first, first, second, second):
        caller.on_response(1000)
    assert 4000 < ledger.total_bytes == ledger.held_bytes["nats"] < 5000
    while not second.ended:
        second.on_response(1000)
    assert "fallen behind" in second.error
    assert not first.ended
    third = Caller(1, ledger, body=BODY.ljust(15_000))
    assert "too many unfinished requests" in third.error
    assert third.sent[0][0]["retry-after"] == "1"
    first.call.disconnected()
    assert (first.cancellations, ledger.total_bytes) == (1, 0)


async def test_an_error_of_any_length_and_text_fits_into_a_message() -> None:
    for text in ("x" * 2_000_000, "\0" * 2_000_000, "\r\n" * 100_000, "\ud800" * 100_000):
        caller = Caller()
        caller.call.reject(internal(text))
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
def test_a_malformed_header_is_rejected(name: str, value: str) -> None:
    def read() -> None:
        read_headers({name: value}, RequestLimits())
        requested_window({name: value})

    with pytest.raises(WeirError) as raised:
        read()
    assert raised.value.code is ErrorCode.INVALID_ARG
    assert len(raised.value.message) < 200
