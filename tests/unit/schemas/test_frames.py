"""The rows of `schemas.frames` against the messages of `schemas.messages`: one wire, two ways to read it."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.frames import pack_batch_rows, unpack_done_rows, unpack_frame_rows
from schemas.messages import BatchEntry, BatchMessage, Done, Part, pack_batch, pack_done, pack_frame
from schemas.wire import WIRE_VERSION, MalformedMessage

PART = Part(7, -1, 2, "3,4", 1, 1000, 0, "sequence", 3, "00-trace", b"body")


def test_the_rows_of_a_frame_are_its_parts():
    gateway, rows = unpack_frame_rows(pack_frame("gateway-1", [PART, PART]))
    assert gateway == "gateway-1"
    assert [Part(*row) for row in rows] == [PART, PART]


def test_a_batch_of_rows_is_the_batch_message():
    entries = [BatchEntry("g", 1, 50, b"x"), BatchEntry("h", 2, 0, b"")]
    batch = BatchMessage("scheduler", 9, "model", 1, 0, entries, ["ack"])
    assert pack_batch_rows("scheduler", 9, "model", 1, 0, entries, ["ack"]) == pack_batch(batch)


def test_the_rows_of_a_done_message_are_its_dones():
    dones = [Done(1, 0, 250, []), Done(2, 1, 0, [3])]
    assert [Done(*row) for row in unpack_done_rows(pack_done("worker", dones))] == dones


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
def test_what_is_no_frame_is_malformed(message: Any):
    with pytest.raises(MalformedMessage):
        unpack_frame_rows(msgpack.packb(message))


@pytest.mark.parametrize(
    "message",
    [
        None,
        [WIRE_VERSION, "worker"],
        [WIRE_VERSION + 1, "worker", [[1, 0, 5]]],
        [WIRE_VERSION, "worker", 3],
        [WIRE_VERSION, "worker", [3]],
        [WIRE_VERSION, "worker", [[1, 0]]],
        [WIRE_VERSION, "worker", [["1", 0, 5]]],
        [WIRE_VERSION, "worker", [[1, None, 5]]],
        [WIRE_VERSION, "worker", [[1, 0, 5.0]]],
        [WIRE_VERSION, "worker", [[1, 0, 5], [[], 0, 5]]],
    ],
)
def test_what_is_no_done_message_is_malformed(message: Any):
    with pytest.raises(MalformedMessage):
        unpack_done_rows(msgpack.packb(message))


@given(st.binary(max_size=200))
def test_bytes_are_read_or_malformed(data: bytes):
    for unpack in (unpack_frame_rows, unpack_done_rows):
        try:
            unpack(data)
        except MalformedMessage:
            continue
