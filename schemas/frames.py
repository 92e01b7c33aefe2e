"""Frames, batches and done messages as a scheduler reads and writes them: plain rows instead of named tuples.

The messages are those of `schemas.messages`. A scheduler handles every request of the cluster and looks at few of the
facts of each, so here nothing is built per request but what msgpack builds anyway, and only what is relied on is
checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from schemas.wire import WIRE_VERSION, MalformedMessage

_pack = msgpack.Packer(use_bin_type=True, autoreset=True).pack
_unpack = msgpack.unpackb

_is_name = re.compile(r"[!-)+-=?-~]+", re.ASCII).fullmatch  # printable, and neither `*` nor `>`
_INTEGERS = (int, int, int)

Row = Sequence[Any]
"""One request of a frame: the fields of `schemas.messages.Part`, in order, not checked yet."""


def unpack_frame_rows(data: bytes) -> tuple[str, list[Row]]:
    """(gateway, rows) of a frame. Raises MalformedMessage; `gateway` is safe to be part of a subject."""
    try:
        wire_version, gateway, rows = _unpack(data)
        if wire_version == WIRE_VERSION and type(rows) is list and _is_name(gateway):
            return gateway, rows
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not a frame: {error}") from error
    raise MalformedMessage("not a frame of this wire version")


def pack_batch_rows(
    scheduler: str,
    batch_id: int,
    model: str,
    version: int,
    instance: int,
    rows: Sequence[Row],
    acks: Sequence[str],
    is_series: bool = False,
    epoch: int = 0,
    partition: int = 0,
) -> bytes:
    """A batch message; each row holds the fields of a `schemas.messages.BatchEntry`, of which the last three may lack."""
    message = (WIRE_VERSION, scheduler, batch_id, model, version, instance, rows, acks, is_series)
    return bytes(_pack((*message, epoch, partition)))


def unpack_done_rows(data: bytes, on_malformed: Callable[[MalformedMessage], None] | None = None) -> list[Row]:
    """The fields of a `schemas.messages.Done` for each batch in a done message. Raises MalformedMessage.

    With `on_malformed` a row that is none is passed over, and told to it: the message speaks of the batches of many models.
    """
    try:
        wire_version, _, rows = _unpack(data)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not a done message: {error}") from error
    if wire_version != WIRE_VERSION or type(rows) is not list:
        raise MalformedMessage("not a done message of this wire version")
    try:
        for row in rows:
            batch_id, outcome, busy_us, rescheduled = row
            if (type(batch_id), type(outcome), type(busy_us)) != _INTEGERS:
                raise TypeError("expected integers")
            if type(rescheduled) is not list or (rescheduled and not all(type(row) is int for row in rescheduled)):
                raise TypeError("expected rows")
    except (ValueError, TypeError) as error:
        malformed = MalformedMessage(f"not a done message: {error}")
        if on_malformed is None:
            raise malformed from error
        on_malformed(malformed)
        return [row for row in rows if _is_done(row)]
    return rows


def _is_done(row: Any) -> bool:
    try:
        unpack_done_rows(_pack((WIRE_VERSION, "", (row,))))
    except MalformedMessage:
        return False
    return True
