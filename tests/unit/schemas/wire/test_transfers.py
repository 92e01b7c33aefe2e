"""Fetches of payloads and checkpoints of sequence states: split, joined, and malformed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.schemas.core.tensors import PayloadRef, Tensor
from weir.schemas.wire.codec import WIRE_VERSION, MalformedMessage, encode
from weir.schemas.wire.transfers import (
    ADDRESS_REQUEST,
    OwnerAddress,
    PayloadFetch,
    StatePiece,
    pack_pieces,
    pack_state,
    unpack_state,
)

REF = PayloadRef("segment", 0, 1, 64, 10)


@given(st.binary(max_size=50), st.integers(1, 20))
def test_the_pieces_of_a_state_are_the_state(state: bytes, piece_bytes: int) -> None:
    pieces = [StatePiece.unpack(data) for data in pack_pieces(7, state, piece_bytes)]
    assert b"".join(piece.content for piece in pieces) == state
    assert {(piece.number, piece.pieces) for piece in pieces} == {(7, len(pieces))}
    assert all(len(piece.content) <= piece_bytes for piece in pieces)


def test_a_state_has_its_tensors() -> None:
    tensors = [Tensor("A", "FP32", [1, 2], bytes(8)), Tensor("B", "BYTES", (1,), memoryview(b"\1\0\0\0x"))]
    unpacked = unpack_state(pack_state(tensors))
    assert [(t.name, t.datatype, list(t.shape), bytes(t.data)) for t in unpacked] == [  # type: ignore[arg-type]
        ("A", "FP32", [1, 2], bytes(8)),
        ("B", "BYTES", [1], b"\1\0\0\0x"),
    ]


@pytest.mark.parametrize(
    "value",
    [
        1,
        [1],
        [["A", "FP32", [1]]],
        [["A", "FP99", [1], b""]],
        [["A", "FP32", [-1], b""]],
        [["A", "FP32", [1], list(REF)]],
    ],
)
def test_malformed_states(value: object) -> None:
    with pytest.raises(MalformedMessage):
        unpack_state(encode(value))


@pytest.mark.parametrize("row", [[1, "2", b""], [1, 0, b""], [1, 2, "x"], [1, 2]])
def test_malformed_pieces(row: list[object]) -> None:
    with pytest.raises(MalformedMessage):
        StatePiece.unpack(encode([WIRE_VERSION, *row]))


def test_a_request_for_the_address_is_no_fetch() -> None:
    assert PayloadFetch.unpack(PayloadFetch(REF).pack()).piece == REF
    with pytest.raises(MalformedMessage):
        PayloadFetch.unpack(ADDRESS_REQUEST)


@pytest.mark.parametrize("row", [["h", 65_536, b"", b""], ["h", -1, b"", b""], ["h", 1, "", b""], [b"h", 1, b"", b""]])
def test_malformed_addresses(row: list[object]) -> None:
    with pytest.raises(MalformedMessage):
        OwnerAddress.unpack(encode([WIRE_VERSION, *row]))
