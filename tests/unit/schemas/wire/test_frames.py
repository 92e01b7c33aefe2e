"""Frames and completions: decoded whole, or without the rows that are malformed."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.schemas.wire.codec import WIRE_VERSION, MalformedMessage, encode
from weir.schemas.wire.messages import (
    BatchEnded,
    BatchLost,
    BatchNotRun,
    BatchRefused,
    BatchReleased,
    Completions,
    DirectRunReport,
    DirectRuns,
    Frame,
    NotRunReason,
    RequestEnvelope,
    unpack_completions,
    unpack_frame,
)

PART = RequestEnvelope(7, -1, 2, "3,4", 1, 1000, 0, "sequence", 3, "00-trace", b"body")


def test_a_frame_has_its_requests():
    gateway, rows = unpack_frame(Frame("gateway-1", [PART, PART]).pack())
    assert gateway == "gateway-1"
    assert rows == [PART, PART]


def test_a_request_of_an_older_gateway_lacks_the_last_fields():
    data = encode((WIRE_VERSION, "gateway-1", [PART[:11]]))
    assert unpack_frame(data) == ("gateway-1", [PART])


@pytest.mark.parametrize(
    "change",
    [
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


def test_completions_are_decoded_as_they_were_sent():
    dones = [
        BatchEnded(1, 250, [3]),
        BatchLost(2),
        BatchNotRun(3, NotRunReason.SLOW),
        BatchReleased(4, 5),
        BatchRefused(5, 7),
    ]
    assert unpack_completions(Completions("worker", dones).pack()) == (dones, ())
    runs = [DirectRuns("m", 1, [(2, 3)], 500)]
    assert unpack_completions(DirectRunReport("worker", dones, runs).pack()) == (dones, runs)


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


@pytest.mark.parametrize(
    "message",
    [
        None,
        [WIRE_VERSION, "worker"],
        [WIRE_VERSION + 1, "worker", [[1, 0, 5]]],
        [WIRE_VERSION, "worker", 3],
        [WIRE_VERSION, "worker", [3]],
        [WIRE_VERSION, "worker", [[9, 0]]],
        [WIRE_VERSION, "worker", [[2, 0, 99]]],
        [WIRE_VERSION, "worker", [["1", 0, 5]]],
        [WIRE_VERSION, "worker", [[1, None, 5]]],
        [WIRE_VERSION, "worker", [[1, 0, 5.0]]],
        [WIRE_VERSION, "worker", [[1, 0, 5], [[], 0, 5]]],
    ],
)
def test_malformed_completions(message: Any):
    with pytest.raises(MalformedMessage):
        unpack_completions(msgpack.packb(message))


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_malformed(data: bytes):
    for unpack in (unpack_frame, unpack_completions):
        try:
            unpack(data)
        except MalformedMessage:
            continue
