"""By which a scheduler tells a gateway that requests of its were lost and are done again; one of `schemas.messages`.

Only of durable requests, whose attempts are told to their producers.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgpack

from schemas.wire import WIRE_VERSION, MalformedMessage

MAX_REASON_LENGTH = 200


def pack_lost_attempts(keys: Sequence[int], reason: str) -> bytes:
    """The message about the gateway's requests of these keys."""
    return bytes(msgpack.packb((WIRE_VERSION, list(keys), reason[:MAX_REASON_LENGTH])))


def unpack_lost_attempts(data: bytes) -> tuple[list[int], str]:
    """(keys, reason) of a message. Raises MalformedMessage."""
    try:
        wire_version, keys, reason = msgpack.unpackb(data)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not lost attempts: {error}") from error
    if wire_version != WIRE_VERSION or type(keys) is not list or type(reason) is not str:
        raise MalformedMessage("not lost attempts of this wire version")
    if not all(type(key) is int for key in keys):
        raise MalformedMessage("not lost attempts: expected integers")
    return keys, reason[:MAX_REASON_LENGTH]
