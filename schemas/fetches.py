"""The question for a piece of a payload on another host. The answer is the piece, or nothing where it has gone."""

from __future__ import annotations

from schemas.tensors import PayloadRef
from schemas.wire import WIRE_VERSION, MalformedMessage, pack, payload_ref, unpack


def pack_fetch(piece: PayloadRef) -> bytes:
    """The question; its `offset` and `size` are those of the piece."""
    return bytes(pack((WIRE_VERSION, piece)))


def unpack_fetch(data: bytes) -> PayloadRef:
    """The piece that is asked for. Raises MalformedMessage."""
    (piece,) = unpack(data, 1)
    try:
        return payload_ref(*piece)
    except TypeError as error:
        raise MalformedMessage(f"not a piece of a payload: {error}") from error
