"""How a worker gets leave to unload: it asks the scheduler again and again, until nothing is left that it must run.

The scheduler keeps nothing between two questions but which versions it has let go; so either may be restarted.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import msgpack

from schemas.wire import WIRE_VERSION, MalformedMessage


class DrainMessage(NamedTuple):
    """A question: `worker` unloads these versions of `model`. An answer: it may unload these, the others are needed.

    An answer speaks for the requests of one `partition` of the model.
    """

    worker: str
    model: str
    versions: list[int]
    partition: int = 0


def pack_drain(worker: str, model: str, versions: Collection[int], partition: int = 0) -> bytes:
    """The message that asks, or answers."""
    return bytes(msgpack.packb([WIRE_VERSION, worker, model, sorted(versions), *([partition] if partition else ())]))


def unpack_drain(data: bytes) -> DrainMessage:
    """The question or answer in a message. Raises MalformedMessage."""
    try:
        version, worker, model, versions, *more = msgpack.unpackb(data)
        partition = more[0] if len(more) == 1 else 0
        fits = version == WIRE_VERSION and type(worker) is type(model) is str and type(versions) is list
        if (
            not fits
            or len(more) > 1
            or type(partition) is not int
            or not all(type(number) is int for number in versions)
        ):
            raise TypeError("wrong types")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not about draining: {type(error).__name__}") from error
    return DrainMessage(worker, model, versions, partition)
