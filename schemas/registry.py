"""What workers tell about themselves and their models: the values of the registry bucket, and heartbeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import msgpack

from schemas.model_config import ModelConfig
from schemas.placement import MAX_AMOUNT, MAX_RESOURCES, Amounts, ModelNeeds
from schemas.wire import WIRE_VERSION, MalformedMessage

MAX_INSTANCES = 4096
"""Instances of one version on one worker; a record that tells of more is not believed."""


MAX_LOAD_LENGTH = 64
"""Characters of `VersionRecord.load`."""

MAX_PROBLEM_LENGTH = 400
"""Characters of `VersionRecord.problem`."""

UNLOADED = "unloaded"
"""The reason of a version that was unloaded on request: it keeps nobody from being ready."""


class ModelState(StrEnum):
    """State of one version of a model on one worker (Triton's model repository index)."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """One version on one worker: `reason` tells why it is not READY, `instances` how many take batches.

    `load_duration_s` is how long it took until it was READY. `load` stands for the files and the configuration that were
    loaded: equal on all workers that have the same. Where instances keep the state of sequences each has a number of its
    own among `numbers`, which no other instance of the worker ever has; elsewhere there are none, and they count from 0 on.

    A READY version with a `problem` can't run anything for the time being, and says why; it has no instances then. With
    `asks` its model has a say in whether it is ready, and the worker is to be asked (`schemas.readiness`).
    """

    state: ModelState
    reason: str = ""
    instances: int = 0
    load_duration_s: float = 0.0
    load: str = ""
    numbers: tuple[int, ...] = ()
    problem: str = ""
    asks: bool = False

    @property
    def instance_numbers(self) -> Sequence[int]:
        """The number of each instance."""
        return self.numbers or range(self.instances)


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """One model on one worker. `config` is `ModelConfig` as a dictionary, None when it could not be read.

    `reason` tells why there is no version at all; `written_ns` (unix time) orders the writes of one worker.

    `revision` is the last operation of the repository API that the worker has carried out on the model, `in_force` the
    one by which it has what it serves now. `error_code` and `error` tell how the last one failed: a number of
    `ErrorCode` (0: it did not) and Triton's text.

    `name` is the model's identity (`schemas.model_identity`); `namespace` is the one it lies in, "" without namespacing.

    With `elsewhere` the model is not for this worker, which others may be: what the record says of failures counts only
    where all workers say so.

    `rejected` says why the model's files or configuration as they are now could not be loaded, while what was loaded before
    them serves on; "" where what serves is what is there.
    """

    name: str
    versions: dict[int, VersionRecord] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    labels: dict[str, list[str]] = field(default_factory=dict)
    reason: str = ""
    written_ns: int = 0
    revision: int = 0
    in_force: int = 0
    error_code: int = 0
    error: str = ""
    namespace: str = ""
    elsewhere: bool = False
    rejected: str = ""


@dataclass(frozen=True, slots=True)
class Offer:
    """A model that a worker could hold: what it needs, and the last operation on it that the worker knows of."""

    needs: ModelNeeds
    revision: int = 0


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One worker: `settled` once it has tried to load every model it should, `draining` once it takes no new batches.

    `gpus` are the UUIDs of the GPUs in whose memory it can take clients' tensors. `capacity` is what it has for models, and
    `offers` are those among them that declare what they need and that it could hold (`schemas.placement`). One that is
    `leaving` still takes batches, until other workers have what only it has. `model_control_mode` is its own, as Triton
    names them: who asks for loads and unloads learns from it which workers carry them out. `unreadable` says which of its
    model repositories it can't read, and why, where it loads all models that they hold.
    """

    worker: str
    pid: int
    settled: bool = False
    draining: bool = False
    written_ns: int = 0
    gpus: list[str] = field(default_factory=list)
    capacity: Amounts = field(default_factory=Amounts)
    offers: dict[str, Offer] = field(default_factory=dict)
    leaving: bool = False
    model_control_mode: str = "none"
    unreadable: list[str] = field(default_factory=list)

    @property
    def takes_operations(self) -> bool:
        """Whether it loads and unloads models when it is asked to."""
        return self.model_control_mode == "explicit"


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
        rows = fields.pop("versions").items()
        record = ModelRecord(versions={int(version): _unpack_version(row) for version, row in rows}, **fields)
        if record.config is not None:
            ModelConfig.model_validate(record.config)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MalformedMessage(f"not a model record: {type(error).__name__}") from error
    labels = record.labels
    if not (
        _are(str, record.name, record.reason, record.error, record.namespace, record.rejected)
        and _are(int, record.written_ns, record.revision, record.in_force, record.error_code)
        and _are(bool, record.elsewhere)
        and isinstance(labels, dict)
        and all(isinstance(names, list) and _are(str, output, *names) for output, names in labels.items())
    ):
        raise MalformedMessage("not a model record: wrong types")
    return record


def _unpack_version(row: dict[str, Any]) -> VersionRecord:
    version = VersionRecord(
        ModelState(row["state"]),
        row["reason"],
        row["instances"],
        row.get("load_duration_s", 0.0),
        row.get("load", ""),
        tuple(row.get("numbers", ())),
        row.get("problem", ""),
        row.get("asks", False),
    )
    if not (
        _are(str, version.reason, version.load, version.problem)
        and len(version.load) <= MAX_LOAD_LENGTH
        and len(version.problem) <= MAX_PROBLEM_LENGTH
        and _are(bool, version.asks)
        and _are(int, version.instances, *version.numbers)
        and 0 <= version.instances <= MAX_INSTANCES
        and len(set(version.numbers)) == len(version.numbers)
        and len(version.numbers) in (0, version.instances)
        and all(0 <= number < 1 << 53 for number in version.numbers)
        and _are(float, version.load_duration_s)
        and 0 <= version.load_duration_s < float("inf")
    ):
        raise TypeError("wrong types")
    return version


def unpack_worker_record(data: bytes) -> WorkerRecord:
    """The record in a message. Raises MalformedMessage."""
    fields = _fields(data)
    try:
        fields["capacity"] = _unpack_amounts(fields.get("capacity", {}))
        fields["offers"] = {name: _unpack_offer(row) for name, row in fields.get("offers", {}).items()}
        record = WorkerRecord(**fields)
    except (TypeError, KeyError, AttributeError) as error:
        raise MalformedMessage(f"not a worker record: {error}") from error
    if not (
        _are(str, record.worker, record.model_control_mode)
        and _are(int, record.pid, record.written_ns)
        and _are(bool, record.settled, record.draining, record.leaving)
        and _are(str, *record.offers)
        and isinstance(record.gpus, list)
        and _are(str, *record.gpus)
        and isinstance(record.unreadable, list)
        and _are(str, *record.unreadable)
    ):
        raise MalformedMessage("not a worker record: wrong types")
    return record


def _unpack_offer(row: dict[str, Any]) -> Offer:
    needs, revision = row["needs"], row["revision"]
    workers = needs["workers"]
    if not (_are(int, revision, workers) and revision >= 0 and 0 <= workers <= MAX_AMOUNT):
        raise TypeError("wrong types")
    return Offer(ModelNeeds(_unpack_amounts(needs["takes"]), workers), revision)


def _unpack_amounts(row: dict[str, Any]) -> Amounts:
    amounts = Amounts(**row)
    resources = amounts.resources
    counts = [amounts.memory_bytes, *resources.values()]
    if not (_are(int, *counts) and _are(str, *resources) and all(0 <= count <= MAX_AMOUNT for count in counts)):
        raise TypeError("wrong types")
    if len(resources) > MAX_RESOURCES:
        raise TypeError("more resources than a worker can have")
    return amounts


def unpack_heartbeat(data: bytes) -> Heartbeat:
    """The heartbeat in a message. Raises MalformedMessage."""
    try:
        heartbeat = Heartbeat(**_fields(data))
        if not all(_are(str, scheduler) and _are(int, *ids) for scheduler, ids in heartbeat.batches.items()):
            raise TypeError("wrong types")
        if not _are(str, heartbeat.worker):
            raise TypeError("wrong types")
        return heartbeat
    except (TypeError, AttributeError) as error:
        raise MalformedMessage(f"not a heartbeat: {error}") from error


def _are(kind: type, *values: object) -> bool:
    return all(type(value) is kind for value in values)


def _fields(data: bytes) -> dict[str, Any]:
    try:
        version, fields = msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not a record: {error}") from error
    if version != WIRE_VERSION or not isinstance(fields, dict) or not _are(str, *fields):
        raise MalformedMessage("not a record of this wire version")
    return fields
