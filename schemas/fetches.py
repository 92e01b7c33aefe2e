"""The question for a piece of a payload on another host. The answer is the piece, or nothing where it has gone.

Instead of a piece the question may be for the address where the owner listens for readers itself.
"""

from __future__ import annotations

from typing import NamedTuple

from schemas.tensors import PayloadRef
from schemas.wire import WIRE_VERSION, MalformedMessage, pack, payload_ref, text, unpack

ADDRESS_QUESTION = bytes(pack((WIRE_VERSION, None)))
"""What is sent to the owner instead of a piece."""


class OwnerAddress(NamedTuple):
    """Where an owner listens for readers; `port` 0: nowhere.

    `secret` proves who may read; `certificate` is the fingerprint of the owner's, empty where connections are not
    encrypted.
    """

    host: str = ""
    port: int = 0
    secret: bytes = b""
    certificate: bytes = b""


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


def pack_address(address: OwnerAddress) -> bytes:
    """The answer to who asks for the address."""
    return bytes(pack((WIRE_VERSION, *address)))


def unpack_address(data: bytes) -> OwnerAddress:
    """The address. Raises MalformedMessage."""
    host, port, secret, certificate = unpack(data, 4)
    if type(port) is not int or not 0 <= port <= 0xFFFF or not type(secret) is type(certificate) is bytes:
        raise MalformedMessage("not the address of an owner of payloads")
    return OwnerAddress(text(host), port, secret, certificate)
