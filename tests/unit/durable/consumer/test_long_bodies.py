"""Durable requests whose bodies, or responses, a helper process reads and writes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import orjson
import pytest

from tests.support.gateway.durable_lane import OneLane, answer_with_input, body_of, one_lane
from weir.bus.naming import durable_subjects as subjects
from weir.runtime.offload import OFF_LOOP_BYTES, ReadingFailed
from weir.schemas.core.errors import WeirError, unavailable
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.kserve.response import MAX_WRITTEN_BYTES

LONG = OFF_LOOP_BYTES // 2 + 1000  # values of a body


def long_body(value: int, id: str = "") -> bytes:
    body = body_of(value, LONG)
    assert len(body) > OFF_LOOP_BYTES
    assert LONG * 8 > MAX_WRITTEN_BYTES
    return b'{"id":"%b",' % id.encode() + body[1:] if id else body


@pytest.fixture
async def lane() -> AsyncIterator[OneLane]:
    async with one_lane() as lane:
        yield lane
        lane.context.offload.close()


def answer_of(lane: OneLane, id: str) -> list[int]:
    stored = lane.broker.results[subjects.result("m", id)].data
    return list(orjson.loads(stored)["outputs"][0]["data"])


async def test_long_requests_are_answered_in_the_order_in_which_they_came(lane: OneLane) -> None:
    begun: list[str] = []

    def answer(request: InferRequest) -> InferResponse:
        begun.append(request.id or str(request.inputs[0].to_numpy()[0]))
        return answer_with_input(request)

    lane.model.answer = answer
    lane.deliver(long_body(1, "long"))
    lane.deliver(body_of(2), Nats_Msg_Id="short")
    lane.deliver(long_body(3), Nats_Msg_Id="named by its message")
    outcomes = await lane.settled("long", "short", "named by its message")
    assert set(outcomes.values()) == {"succeeded"}
    assert begun == ["long", "2", "3"]
    assert answer_of(lane, "long") == [1] * LONG
    assert answer_of(lane, "short") == [2]


async def test_a_long_object_is_read_and_what_is_no_request_is_dead_lettered(lane: OneLane) -> None:
    lane.broker.objects["object"] = long_body(4)
    lane.deliver(b"", Nats_Msg_Id="object", Weir_Object="object")
    lane.deliver(long_body(5)[:-2], Nats_Msg_Id="no JSON")
    assert await lane.settled("object", "no JSON") == {"object": "succeeded", "no JSON": "dead-lettered"}
    assert answer_of(lane, "object") == [4] * LONG


@pytest.mark.parametrize(
    ("failure", "status"),
    [(ReadingFailed("the process has died"), "500"), (unavailable("not read within 60 s"), "503")],
)
async def test_what_a_helper_process_fails_to_read_is_not_the_producers_error(
    lane: OneLane, monkeypatch: pytest.MonkeyPatch, failure: WeirError, status: str
) -> None:
    async def ask(*_: object) -> None:
        raise failure

    monkeypatch.setattr(lane.context.offload, "_ask", ask)
    lane.deliver(long_body(6), Nats_Msg_Id="unread")
    assert await lane.settled("unread") == {"unread": "dead-lettered"}
    assert lane.broker.results[subjects.result("m", "unread")].headers["weir-status"] == status


async def test_a_long_request_that_has_its_record_is_not_run_again(lane: OneLane) -> None:
    lane.deliver(long_body(1, "long"))
    await lane.settled("long")
    runs = lane.model._keys
    lane.begin(started_sequence=1000)
    lane.broker.acked.discard(2)
    lane.deliver(long_body(1, "long"))
    await lane.settled("long")
    assert lane.model._keys == runs
