"""By which a scheduler tells a worker that callers of requests it runs have given up; one of `schemas.messages`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgpack

from schemas.wire import WIRE_VERSION, MalformedMessage


class AbandonedRequests(NamedTuple):
    """Requests of one batch, and the gateway that took them."""

    batch_id: int
    gateway: str
    keys: list[int]


def pack_abandoned(scheduler: str, batches: Sequence[AbandonedRequests]) -> bytes:
    """The message about requests in these batches of `scheduler`."""
    return bytes(msgpack.packb((WIRE_VERSION, scheduler, batches)))


def unpack_abandoned(data: bytes) -> tuple[str, list[AbandonedRequests]]:
    """(scheduler, its batches) of a message. Raises MalformedMessage."""
    try:
        wire_version, scheduler, rows = msgpack.unpackb(data)
        batches = [AbandonedRequests(*row) for row in rows]
        for batch_id, gateway, keys in batches:
            if (type(batch_id), type(gateway), type(keys)) != (int, str, list):
                raise TypeError("wrong types")
            if not all(type(key) is int for key in keys):
                raise TypeError("expected integers")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not what was abandoned: {error}") from error
    if wire_version != WIRE_VERSION or type(scheduler) is not str:
        raise MalformedMessage("not what was abandoned, in this wire version")
    return scheduler, batches
