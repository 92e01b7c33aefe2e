"""What every message between roles is made of: msgpack arrays whose first element is the wire version.

Everything that arrives is untrusted: what is not as it must be raises `MalformedMessage`, or a `TypeError` or
`ValueError` that the message's own `unpack_*` turns into one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgpack

from schemas.datatypes import DATATYPES
from schemas.requests import Parameters
from schemas.tensors import ClientRef, CudaRegionRef, PayloadRef, Reference, RegionRef, Tensor

WIRE_VERSION = 1

packer = msgpack.Packer(use_bin_type=True, autoreset=True)
pack = packer.pack
"""The msgpack of a value; it copies the content of tensors once."""


class MalformedMessage(ValueError):
    """Bytes on a subject that are not the message the subject carries."""


def unpack(data: bytes, fields: int, optional: int = 0) -> list[Any]:
    """The first `fields` fields of a message, without its version; later ones are of a newer Weir.

    Up to `optional` more are returned where they are there.
    """
    try:
        message = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not msgpack: {error}") from error
    if not isinstance(message, list) or len(message) < fields + 1:
        raise MalformedMessage("not one of our messages")
    if message[0] != WIRE_VERSION:
        raise MalformedMessage(f"wire version {message[0]!r} is not {WIRE_VERSION}")
    return message[1 : fields + optional + 1]


def unpack_tensors(rows: Any, reference: Callable[..., Reference]) -> list[Tensor]:
    """Tensors of (name, datatype, shape, content) each; `reference` reads content that lies in shared memory."""
    tensors: list[Tensor] = []
    for name, datatype, shape, data in rows:
        if type(name) is not str or datatype not in DATATYPES or type(shape) is not list:
            raise TypeError("not a tensor")
        for dim in shape:
            if type(dim) is not int or dim < 0:
                raise TypeError("not the shape of a tensor")
        if isinstance(data, list):
            data = reference(*data)
        elif type(data) is not bytes:
            raise TypeError("not the content of a tensor")
        tensors.append(Tensor(name, datatype, shape, data))
    return tensors


def any_ref(*row: Any) -> Reference:
    """A place in a slot of ours, or in the memory of a client."""
    return payload_ref(*row) if len(row) == 5 else _client_ref(*row)


def _client_ref(place: Any, number: Any, offset: Any, size: Any) -> ClientRef:
    # What a client shares is named by a file and its inode, or by the handle of GPU memory and its device.
    if not type(number) is type(offset) is type(size) is int or min(number, offset, size) < 0:
        raise TypeError("not a place in a client's memory")
    if type(place) is bytes:
        return CudaRegionRef(place, number, offset, size)
    return RegionRef(text(place), number, offset, size)


def payload_ref(segment: Any, slot: Any, generation: Any, offset: Any, size: Any) -> PayloadRef:
    """A place in a payload slot."""
    if not type(slot) is type(generation) is type(offset) is type(size) is int:
        raise TypeError("not a reference to a payload")
    return PayloadRef(text(segment), slot, generation, offset, size)


def parameters_or_none(value: Any) -> Parameters | None:
    """Request or response parameters, where there are any."""
    if value is None or (type(value) is dict and all(type(key) is str for key in value)):
        return value
    raise MalformedMessage("not parameters")


def text(value: Any) -> str:
    """`value`, which must be text."""
    if not isinstance(value, str):
        raise MalformedMessage(f"expected text, got {type(value).__name__}")
    return value


def bin_header(size_bytes: int) -> bytes:
    """What stands before `size_bytes` bytes of content in msgpack's "bin" formats: packers offer no call for it alone."""
    if size_bytes < 1 << 8:
        return struct.pack(">BB", 0xC4, size_bytes)
    if size_bytes < 1 << 16:
        return struct.pack(">BH", 0xC5, size_bytes)
    return struct.pack(">BI", 0xC6, size_bytes)
