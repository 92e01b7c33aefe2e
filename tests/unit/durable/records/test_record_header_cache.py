"""The short way to a record's headers says what the long one does."""

from __future__ import annotations

import pytest

from weir.bus.nats.connection import Message
from weir.bus.nats.headers import pack_headers, parse_headers
from weir.bus.nats.jetstream import DeliveryInfo
from weir.durable.records.recorder import MAX_KEPT, RecordHeaderCache
from weir.durable.requests.headers import DurableHeaders
from weir.durable.requests.request import DurableRequest
from weir.schemas.core.requests import Lane
from weir.schemas.wire.terminal import Outcome

ENDED_MS = 1_790_000_000_500


def a_request(model: str, id: str, tenant: str = "") -> DurableRequest:
    message = Message(f"event.{model}", "", b"body", "")
    delivery = DeliveryInfo(1, 7, 1_790_000_000_000_000_000, 0)
    request = DurableRequest.of(message, delivery, Lane.EVENT, (model, ""), lambda _: None)
    request.headers = DurableHeaders(id, tenant)
    request.name("")
    request.attempt_history.attempts = 1
    return request


@pytest.mark.parametrize("version", ["", "3"])
@pytest.mark.parametrize("tenant", ["", "acme"])
@pytest.mark.parametrize(("model", "id"), [("m", "a 1"), ("two\r\nlines", "ä"), ("m", "")])
def test_what_is_said_is_what_a_record_says(model: str, id: str, tenant: str, version: str) -> None:
    request = a_request(model, id, tenant)
    answer = [("Content-Type", "application/json")]
    record = request.record(Outcome.SUCCEEDED, 200, ENDED_MS)
    record.version = version
    expected = parse_headers(pack_headers([*record.headers(), *answer]))
    lines = RecordHeaderCache()
    for _ in range(2):  # packed, and known
        block = lines.of_success(request, version, answer, ENDED_MS)
        assert block is not None
        assert block.endswith(b"\r\n\r\n")
        assert parse_headers(b"NATS/1.0\r\n" + block) == expected


def test_what_is_not_ordinary_goes_the_long_way() -> None:
    request = a_request("m", "a")
    request.lost(ENDED_MS, "its worker was lost")
    assert RecordHeaderCache().of_success(request, "1", [], ENDED_MS) is None
    request = a_request("m", "a")
    request.responses = 1
    assert RecordHeaderCache().of_success(request, "1", [], ENDED_MS) is None


def test_many_tenants_leave_the_right_lines() -> None:
    lines = RecordHeaderCache()
    for number in [*range(MAX_KEPT * 2), 0]:
        block = lines.of_success(a_request("m", "a", f"t{number}"), "1", [], ENDED_MS)
        assert block is not None
        assert parse_headers(b"NATS/1.0\r\n" + block)["weir-tenant"] == f"t{number}"
