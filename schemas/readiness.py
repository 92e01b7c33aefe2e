"""How a worker is asked whether a model that has a say in it is ready, and what it answers."""

from __future__ import annotations

import msgpack

from schemas.wire import WIRE_VERSION, MalformedMessage


def pack_readiness_question(model: str, version: int) -> bytes:
    """The message that asks."""
    return bytes(msgpack.packb([WIRE_VERSION, model, version]))


def unpack_readiness_question(data: bytes) -> tuple[str, int]:
    """(identity of the model, version) in a message. Raises MalformedMessage."""
    try:
        wire_version, model, version = msgpack.unpackb(data)
        if wire_version != WIRE_VERSION or type(model) is not str or type(version) is not int:
            raise TypeError("wrong types")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"no question for readiness: {type(error).__name__}") from error
    return model, version


def pack_readiness(is_ready: bool) -> bytes:
    """The message that answers."""
    return bytes(msgpack.packb([WIRE_VERSION, is_ready]))


def unpack_readiness(data: bytes) -> bool:
    """The answer in a message. Raises MalformedMessage."""
    try:
        wire_version, is_ready = msgpack.unpackb(data)
        if wire_version != WIRE_VERSION or type(is_ready) is not bool:
            raise TypeError("wrong types")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not an answer about readiness: {type(error).__name__}") from error
    return is_ready
