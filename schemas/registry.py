"""What workers tell about themselves and their models: the values of the registry bucket, and heartbeats."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import msgpack

from schemas.messages import WIRE_VERSION, MalformedMessage


class ModelState(StrEnum):
    """State of one version of a model on one worker (Triton's model repository index)."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """One version on one worker: `reason` tells why it is not READY, `instances` how many take batches."""

    state: ModelState
    reason: str = ""
    instances: int = 0


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """One model on one worker. `config` is `ModelConfig` as a dictionary, None when it could not be read.

    `reason` tells why there is no version at all; `written_ns` (unix time) orders the writes of one worker.
    """

    name: str
    versions: dict[int, VersionRecord] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    labels: dict[str, list[str]] = field(default_factory=dict)
    reason: str = ""
    written_ns: int = 0


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One worker: `settled` once it has tried to load every model it should, `draining` once it takes no new batches."""

    worker: str
    pid: int
    settled: bool = False
    draining: bool = False
    written_ns: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A worker's sign of life: the ids of the batches it holds, by the scheduler that sent them."""

    worker: str
    batches: dict[str, list[int]]


def pack_record(record: ModelRecord | WorkerRecord | Heartbeat) -> bytes:
    """The record as a bus message."""
    return bytes(msgpack.packb([WIRE_VERSION, asdict(record)]))


def unpack_model_record(data: bytes) -> ModelRecord:
    """The record in a message. Raises MalformedMessage."""
    fields = _fields(data)
    try:
        versions = {
            int(version): VersionRecord(ModelState(row["state"]), row["reason"], row["instances"])
            for version, row in fields.pop("versions").items()
        }
        return ModelRecord(versions=versions, **fields)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MalformedMessage(f"not a model record: {error}") from error


def unpack_worker_record(data: bytes) -> WorkerRecord:
    """The record in a message. Raises MalformedMessage."""
    try:
        return WorkerRecord(**_fields(data))
    except TypeError as error:
        raise MalformedMessage(f"not a worker record: {error}") from error


def unpack_heartbeat(data: bytes) -> Heartbeat:
    """The heartbeat in a message. Raises MalformedMessage."""
    try:
        heartbeat = Heartbeat(**_fields(data))
        if not isinstance(heartbeat.worker, str) or not isinstance(heartbeat.batches, dict):
            raise TypeError("wrong types")
        return heartbeat
    except TypeError as error:
        raise MalformedMessage(f"not a heartbeat: {error}") from error


def _fields(data: bytes) -> dict[str, Any]:
    try:
        version, fields = msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not a record: {error}") from error
    if version != WIRE_VERSION or not isinstance(fields, dict):
        raise MalformedMessage("not a record of this wire version")
    return fields
