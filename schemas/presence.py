"""What a process tells of itself, again and again, for as long as it is there."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.wire import WIRE_VERSION, MalformedMessage

Role = Literal["gateway", "scheduler", "worker"]
Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9_=-]+$")]
"""Part of a subject."""
Queue = Annotated[tuple[str, int, int], Field(strict=False)]

MAX_QUEUES = 65_536
"""Queues that one scheduler may tell to own."""


class RoleRecord(BaseModel):
    """One process: its role and id, on which host (`bus.identity.host`, and the name that people know it by), of which
    release, since when (unix time), and whether it is leaving; one that is `draining` is about to, and is given nothing
    more.

    `urls` are where a gateway is asked, and `durability` ("yes", "no", "unknown") is whether what the broker acknowledges
    is on disk, as it found out. `queues` are those of live requests that a scheduler owns: model, partition, and the epoch
    from which on it does; one that `keeps_models` runs with `--scale-to-zero`. `loop_lag_s` is the greatest lag of its
    event loop in the last 10 s.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, defer_build=True)

    role: Role
    id: Name
    host: Annotated[str, Field(max_length=64)]
    host_name: Annotated[str, Field(max_length=256)] = ""
    pid: Annotated[int, Field(ge=0)]
    version: Annotated[str, Field(max_length=64)] = ""
    since_ms: Annotated[int, Field(ge=0, lt=1 << 53)]
    leaving: bool = False
    draining: bool = False
    urls: Annotated[list[Annotated[str, Field(max_length=512)]], Field(max_length=16)] = []
    durability: Annotated[str, Field(max_length=16)] = ""
    queues: Annotated[list[Queue], Field(max_length=MAX_QUEUES)] = []
    keeps_models: bool = False
    loop_lag_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    def differs_from(self, other: RoleRecord | None) -> bool:
        """Whether anything but the measured `loop_lag_s`, which changes all the time, differs."""
        return other is None or self.model_copy(update={"loop_lag_s": other.loop_lag_s}) != other


def pack_role(record: RoleRecord) -> bytes:
    """The record as a bus message."""
    return bytes(msgpack.packb([WIRE_VERSION, record.model_dump()]))


def unpack_role(data: bytes) -> RoleRecord:
    """The record in a message. Raises MalformedMessage."""
    try:
        version, fields = msgpack.unpackb(data)
        if version != WIRE_VERSION:
            raise MalformedMessage("not a process's record of this wire version")
        return RoleRecord.model_validate(_known(fields))
    except (ValueError, TypeError, ValidationError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not a process's record: {type(error).__name__}") from error


def _known(fields: Any) -> dict[str, Any]:
    if not isinstance(fields, dict):
        raise TypeError("not a map")
    return fields
