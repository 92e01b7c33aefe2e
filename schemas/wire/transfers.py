"""Messages about data that moves between hosts: fetches of payloads, and checkpoints of sequence states.

An `ADDRESS_REQUEST` requests the address at which the owner of payloads accepts links of other hosts. On such a link a
`PayloadFetch` requests a piece, and has a subject that its reader has chosen. The owner responds in order: with the piece
on that subject, and behind it, once the kernel has the piece, with an empty message on `KEPT`, or on `FREED` if the slot
was reused meanwhile. If it was reused before, the owner sends no piece.

A checkpoint is the state of a sequence after some of its requests, from which another worker can continue. Its tensors are
packed once and split into pieces that fit into a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from weir.schemas.core.tensors import PayloadRef, Tensor
from weir.schemas.wire.codec import WIRE_VERSION, Message, WireTensor, decode, encode

NOT_RESUMABLE = -1
"""The number of a checkpoint that no worker can continue from, since a request failed that would have to run again."""


class PayloadFetch(Message, frozen=True):
    """A request for a piece of a payload; `offset` and `size` are those of the piece."""

    piece: PayloadRef


ADDRESS_REQUEST = encode((WIRE_VERSION, None))
"""A request for the address at which the owner accepts links of other hosts."""

KEPT, FREED = "kept", "freed"
"""Subjects on links between hosts: whether the slot still had the payload when the piece had left."""


class OwnerAddress(Message, frozen=True):
    """Where a process accepts links of other hosts; `port` 0: nowhere.

    `secret` authenticates both ends. `certificate` is the fingerprint of the process's certificate, empty for links
    without TLS.
    """

    host: str = ""
    port: Annotated[int, Meta(ge=0, le=0xFFFF)] = 0
    secret: bytes = b""
    certificate: bytes = b""


class StatePiece(Message, frozen=True):
    """One message of a checkpoint: the state after `number` requests, in `pieces` pieces, of which this has `content`.

    `gateway` and `key` are those of the last of these requests. Between two checkpoints a message has the body of that
    request instead of the state, so that it can run again.
    """

    number: int
    pieces: Annotated[int, Meta(ge=1)]
    content: bytes
    gateway: str = ""
    key: int = 0


class _StateTensor(WireTensor, eq=False):
    data: bytes


def pack_state(tensors: Sequence[Tensor]) -> bytes:
    """The tensors of a state as bytes."""
    return encode(tensors)


def unpack_state(data: bytes) -> list[Tensor]:
    """The tensors of a state. Raises MalformedMessage."""
    tensors: list[Tensor] = decode(data, list[_StateTensor], "sequence state")
    return tensors


def pack_pieces(number: int, state: bytes, piece_bytes: int, gateway: str = "", key: int = 0) -> list[bytes]:
    """The messages of a checkpoint, with at most `piece_bytes` bytes of the state each."""
    contents = [state[start : start + piece_bytes] for start in range(0, len(state), piece_bytes)] or [b""]
    return [StatePiece(number, len(contents), content, gateway, key).pack() for content in contents]
