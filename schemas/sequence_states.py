"""The checkpoint of a sequence's state: what a worker writes after some requests, and another one may go on from.

The tensors are packed once; what is larger than a message travels as several *pieces*, each of which names the request
after which the state was taken, so that pieces of different checkpoints are never put together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import msgpack

from schemas.tensors import Tensor
from schemas.wire import WIRE_VERSION, MalformedMessage, pack, unpack, unpack_tensors

BROKEN = -1
"""In the place of the number: nobody may go on from here, for a request failed that would have to run again."""


class StatePiece(NamedTuple):
    """One message of a checkpoint: the state after `number` requests, in `pieces` pieces, of which this has `content`."""

    number: int
    pieces: int
    content: bytes


def pack_state(tensors: Sequence[Tensor]) -> bytes:
    """The state's tensors as bytes."""
    return bytes(pack([(tensor.name, tensor.datatype, tensor.shape, tensor.data) for tensor in tensors]))


def unpack_state(data: bytes) -> list[Tensor]:
    """The tensors of a state. Raises MalformedMessage."""
    try:
        return unpack_tensors(msgpack.unpackb(data), _no_reference)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not a state: {error}") from error


def pack_pieces(number: int, state: bytes, piece_bytes: int) -> list[bytes]:
    """The messages of a checkpoint, with at most so many bytes of the state each."""
    contents = [state[start : start + piece_bytes] for start in range(0, len(state), piece_bytes)] or [b""]
    return [bytes(pack((WIRE_VERSION, number, len(contents), content))) for content in contents]


def unpack_piece(data: bytes) -> StatePiece:
    """One message of a checkpoint. Raises MalformedMessage."""
    number, pieces, content = unpack(data, 3)
    if type(number) is not int or type(pieces) is not int or type(content) is not bytes or pieces < 1:
        raise MalformedMessage("not a piece of a state")
    return StatePiece(number, pieces, content)


def _no_reference(*_: object) -> NoReturn:
    raise TypeError("a state lies in its checkpoint")
