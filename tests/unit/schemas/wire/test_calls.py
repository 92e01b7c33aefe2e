"""Frames, responses and lost attempts: decoded whole, or without the rows that are malformed."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.tensors import Tensor
from weir.schemas.wire.calls import (
    MAX_REASON_LENGTH,
    Frame,
    LostAttempts,
    RequestEnvelope,
    pack_end,
    pack_error,
    pack_frame,
    pack_response,
    pack_responses,
    unpack_frame,
    unpack_responses,
)
from weir.schemas.wire.codec import WIRE_VERSION, MalformedMessage, encode

PART = RequestEnvelope(7, -1, 2, "3,4", 1, 1000, 0, "sequence", 3, "00-trace", b"body")


def test_a_frame_has_its_requests():
    gateway, rows = unpack_frame(Frame("gateway-1", [PART, PART]).pack())
    assert gateway == "gateway-1"
    assert rows == [PART, PART]


def test_a_request_of_an_older_gateway_lacks_the_last_fields():
    data = encode((WIRE_VERSION, "gateway-1", [PART[:11]]))
    assert unpack_frame(data) == ("gateway-1", [PART])


def test_a_request_of_nobody_has_the_row_that_an_older_scheduler_reads():
    owned = PART._replace(key=8, owner="key a", in_flight_limit=3, weight=2)
    data = pack_frame("gateway-1", [PART, owned])
    assert [len(row) for row in msgpack.unpackb(data)[2]] == [13, 16]
    assert unpack_frame(data) == ("gateway-1", [PART, owned])


@pytest.mark.parametrize(
    "change",
    [
        {"owner": 3},
        {"owner": None},
        {"in_flight_limit": -1},
        {"in_flight_limit": "3"},
        {"weight": 0},
        {"weight": 1.5},
        {"key": "7"},
        {"key": True},
        {"version": None},
        {"version": [1]},
        {"batch_size": 0},
        {"batch_size": -1},
        {"batch_size": 1.5},
        {"shape_key": 3},
        {"body": "text"},
        {"body": None},
        {"correlation_id": 1.5},
        {"lane": 3},
        {"lane": -1},
        {"lane": True},
        {"lane": "batch"},
        {"lane": [1]},
    ],
)
def test_a_malformed_request_is_left_out_of_its_frame(change: dict[str, Any]):
    data = Frame("gateway-1", [PART, PART._replace(**{"key": 8, **change}), PART]).pack()
    with pytest.raises(MalformedMessage):
        unpack_frame(data)
    malformed: list[int | None] = []
    assert unpack_frame(data, lambda key, _: malformed.append(key)) == ("gateway-1", [PART, PART])
    assert malformed == [None if "key" in change else 8]


@given(
    st.one_of(
        st.none(), st.integers(-9, 9), st.text(), st.lists(st.integers(-9, 9)), st.dictionaries(st.text(), st.none())
    )
)
def test_anything_else_is_a_malformed_request(row: Any):
    with pytest.raises(MalformedMessage):
        unpack_frame(msgpack.packb((WIRE_VERSION, "gateway-1", [row])))


@pytest.mark.parametrize(
    "message",
    [
        None,
        [],
        [WIRE_VERSION],
        [WIRE_VERSION, "gateway"],
        [WIRE_VERSION + 1, "gateway", []],
        [WIRE_VERSION, "gateway", {}],
        [WIRE_VERSION, "gateway", 3],
        [WIRE_VERSION, "", []],
        [WIRE_VERSION, "with blank", []],
        [WIRE_VERSION, b"bytes", []],
    ],
)
def test_malformed_frames(message: Any):
    with pytest.raises(MalformedMessage):
        unpack_frame(msgpack.packb(message))


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_malformed(data: bytes):
    try:
        unpack_frame(data)
    except MalformedMessage:
        pass


def test_responses_and_their_end() -> None:
    tensor = Tensor("A", "INT8", [2], b"\1\2")
    error = WeirError(ErrorCode.NOT_FOUND, "gone")
    rows = [
        pack_response(7, [tensor], {"a": 1}, is_final=False, run=("s.1", 4)),
        pack_error(7, error, is_final=False),
        pack_response(7, [tensor], None, is_final=False, timestamps={"QUEUE_START": 5}, run=("s.1", 4)),
        pack_end(7, run=("s.1", 4)),
        pack_end(8),
        pack_response(9, [tensor]),
    ]
    version, answers = unpack_responses(pack_responses(3, rows))
    assert version == 3
    assert [(answer.key, answer.is_final, answer.run, answer.number) for answer in answers] == [
        (7, False, "s.1", 4),
        (7, False, "", 0),
        (7, False, "s.1", 4),
        (7, True, "s.1", 4),
        (8, True, "", 0),
        (9, True, "", 0),
    ]
    assert answers[0].parameters == {"a": 1}
    assert answers[1].error is not None
    assert answers[1].error.message == "gone"
    assert answers[2].timestamps == {"QUEUE_START": 5}
    assert answers[3].outputs is None
    assert len(rows[-1]) == 3, "what is answered once carries nothing of this"


@pytest.mark.parametrize(
    "ending",
    [(1, None), (True, 5), (True, None, 5), (True, None, "run", "1")],
)
def test_responses_with_malformed_last_fields(ending: tuple[Any, ...]) -> None:
    with pytest.raises(MalformedMessage):
        unpack_responses(pack_responses(1, [(7, None, None, *ending)]))


def test_lost_attempts() -> None:
    lost = LostAttempts([1, 2], "its process died")
    assert LostAttempts.unpack(lost.pack()) == lost
    with pytest.raises(MalformedMessage):
        LostAttempts.unpack(LostAttempts([], "x" * (MAX_REASON_LENGTH + 1)).pack())


@pytest.mark.parametrize("fields", [(), ([1],), ([1], 5), ("12", "why"), (["1"], "why"), ([True], "why")])
def test_malformed_lost_attempts(fields: tuple[object, ...]) -> None:
    for data in (msgpack.packb((WIRE_VERSION, *fields)), msgpack.packb((WIRE_VERSION + 1, [1], "why")), b"\xc1", b""):
        with pytest.raises(MalformedMessage):
            LostAttempts.unpack(data)
