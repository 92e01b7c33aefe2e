"""What roles publish about themselves: the records of workers and their models, heartbeats, and the presence of processes.

A worker writes one `WorkerRecord` and one `ModelRecord` for each model to the registry bucket, and publishes heartbeats.
Every process publishes a `RoleRecord` for as long as it runs.
"""

# ruff: noqa: RUF012 - msgspec copies empty defaults for every record.

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.config.parameters import ModelNeeds, ResourceAmounts
from weir.schemas.core.errors import ErrorCode
from weir.schemas.wire.codec import MalformedMessage, NonNegative, Record

MAX_INSTANCES = 4096
"""Instances of one version on one worker; a record with more is malformed."""

MAX_LOAD_LENGTH = 64
"""Characters of `VersionRecord.load`."""

MAX_PROBLEM_LENGTH = 400
"""Characters of `VersionRecord.problem`."""

MAX_QUEUES = 65_536
"""Queues that one scheduler may own."""

UNLOADED = "unloaded"
"""The reason of a version that was unloaded on request. Such a version does not make the server unready."""

_Finite = Annotated[float, Meta(ge=0, le=1.7976931348623157e308)]
_InstanceNumber = Annotated[int, Meta(ge=0, lt=1 << 53)]


class ModelState(StrEnum):
    """State of one version of a model on one worker (Triton's model repository index)."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


class VersionRecord(msgspec.Struct, frozen=True):
    """One version on one worker: `reason` is why it is not READY, `instances` how many accept batches.

    Loading took `load_duration_s`. `load` is a digest of the files and the configuration that were loaded: equal on all
    workers that loaded the same. Where instances keep the state of sequences, `numbers` holds a number for each instance
    that no other instance of the worker ever has; elsewhere it is empty, and instances count from 0.

    A READY version with a `problem` cannot run for now, and has no instances. With `checks_readiness`, the model
    implements its own readiness check, which the worker runs on request (`weir.schemas.wire.model_control.ReadinessQuery`).
    """

    state: ModelState
    reason: str = ""
    instances: Annotated[int, Meta(ge=0, le=MAX_INSTANCES)] = 0
    load_duration_s: _Finite = 0.0
    load: Annotated[str, Meta(max_length=MAX_LOAD_LENGTH)] = ""
    numbers: tuple[_InstanceNumber, ...] = ()
    problem: Annotated[str, Meta(max_length=MAX_PROBLEM_LENGTH)] = ""
    checks_readiness: bool = False

    @property
    def instance_numbers(self) -> Sequence[int]:
        """The number of each instance."""
        return self.numbers or range(self.instances)

    @property
    def can_run(self) -> bool:
        """Whether the version is READY and can run now."""
        return self.state == ModelState.READY and not self.problem


class ModelRecord(Record, frozen=True):
    """One model on one worker. `config` is `ModelConfig` as a dictionary, None where it could not be read.

    `name` is the model's identity (`weir.schemas.core.names.model_identity`); `namespace` is that of its repository, ""
    without namespacing. `reason` is why it has no version. `written_ns` (unix time) orders the writes of one worker.

    `revision` is the last operation of the repository API that the worker has carried out on the model, `in_force` the
    operation that produced what it serves now. `error_code` (a number of `ErrorCode`, 0 for success) and `error` (Triton's
    text) are the result of the last operation.

    With `elsewhere`, the model is placed on other workers: failures in this record count only if no worker serves it.
    `rejected` is why the current files or configuration could not be loaded, while the previous ones are still served; ""
    where the current ones are served. `completed` are the fields of the configuration that its author left out.
    `stays_on_host` is why processes on other hosts can't call the model here, "" if they can.
    """

    name: str
    versions: dict[int, VersionRecord] = {}
    config: dict[str, Any] | None = None
    labels: dict[str, list[str]] = {}
    reason: str = ""
    written_ns: int = 0
    revision: int = 0
    in_force: int = 0
    error_code: int = 0
    error: str = ""
    namespace: str = ""
    elsewhere: bool = False
    rejected: str = ""
    completed: Annotated[list[str], Meta(max_length=256)] = []
    stays_on_host: Annotated[str, Meta(max_length=MAX_PROBLEM_LENGTH)] = ""

    def seen_from(self, is_same_host: bool) -> Self:
        """The record as it counts for a caller on the same host or on another one."""
        if is_same_host or not self.stays_on_host:
            return self
        state, reason = ModelState.UNAVAILABLE, self.stays_on_host
        versions = {n: msgspec.structs.replace(v, state=state, reason=reason) for n, v in self.versions.items()}
        return msgspec.structs.replace(self, versions=versions)

    @property
    def is_known(self) -> bool:
        """Whether the worker has the model, or why it failed. Another record only has the outcome of an operation on a
        name that no repository has, or that is unloaded and gone; its worker removes it at once.
        """
        return bool(self.versions or self.reason)

    @property
    def is_present(self) -> bool:
        """Whether the worker has the model or is to load it."""
        rows = self.versions.values()
        return bool(self.reason) or any(v.reason != UNLOADED and v.state != ModelState.UNLOADING for v in rows)

    @property
    def is_withdrawn(self) -> bool:
        """Whether the worker has unloaded the model, or failed to load it."""
        withdrawn = (ModelState.UNAVAILABLE, ModelState.UNLOADING)
        return bool(self.versions) and all(version.state in withdrawn for version in self.versions.values())

    @property
    def ready_versions(self) -> set[int]:
        """The versions that are READY; none where the configuration could not be read."""
        is_read = self.config is not None
        return {number for number, version in self.versions.items() if is_read and version.state == ModelState.READY}

    @property
    def is_unread(self) -> bool:
        """Whether a load that a client requested found a folder or a configuration that it couldn't read. As in Triton,
        that makes no model of the server, so the server is as ready as before.
        """
        return not self.versions and self.revision > 0 and self.error_code == ErrorCode.INTERNAL.number

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Self:
        """The record in `data`. Raises MalformedMessage, also for an invalid configuration."""
        record = super().unpack(data)
        for version in record.versions.values():
            if version.numbers and not len(set(version.numbers)) == len(version.numbers) == version.instances:
                raise MalformedMessage("not a ModelRecord: expected a different number for each instance")
        if record.config is not None:
            try:
                ModelConfig.model_validate(record.config)
            except ValueError as error:
                raise MalformedMessage(f"not a ModelRecord: {type(error).__name__}") from error
        return record


class ModelOffer(msgspec.Struct, frozen=True):
    """A model that a worker could hold: what it needs, and the last operation on it that the worker has read."""

    needs: ModelNeeds
    revision: NonNegative = 0


class WorkerRecord(Record, frozen=True):
    """One worker: `settled` once it has tried to load every model it should, `draining` once it accepts no new batches.

    `gpus` are the UUIDs of the GPUs whose memory it can map for clients. `capacity` is what it has for models, and `offers`
    are the models that declare needs which it could meet (`weir.schemas.config.parameters`). A worker that is `leaving`
    still accepts batches, until other workers serve the models that only it serves. `model_control_mode` is the
    worker's own, by Triton's names: loads and unloads on request are carried out by workers in mode "explicit".
    `unreadable` lists the model repositories that it cannot read, and why, where it loads all models of its
    repositories, and `never_read` those of them that it could not read even once. `outdated` lists those whose models are
    as they were when it could last read them: they serve on.
    `pid_namespace` and `started_ticks` identify its process together with `pid` (`weir.runtime.processes.state`).
    `link` is the address at which it accepts links of processes of its host (`weir.bus.links`), "" where it accepts
    none.
    """

    worker: str
    pid: int
    settled: bool = False
    draining: bool = False
    written_ns: int = 0
    gpus: list[str] = []
    capacity: ResourceAmounts = msgspec.field(default_factory=ResourceAmounts)
    offers: dict[str, ModelOffer] = {}
    leaving: bool = False
    model_control_mode: str = "none"
    unreadable: list[str] = []
    never_read: list[str] = []
    outdated: list[str] = []
    pid_namespace: NonNegative = 0
    started_ticks: NonNegative = 0
    link: Annotated[str, Meta(max_length=64)] = ""

    @property
    def takes_operations(self) -> bool:
        """Whether it loads and unloads models on request."""
        return self.model_control_mode == "explicit"


class Heartbeat(Record, frozen=True):
    """A worker's heartbeat: the ids of the batches it holds, by the scheduler that sent them."""

    worker: str
    batches: dict[str, list[int]]


Role = Literal["gateway", "durable", "scheduler", "worker", "console"]


class RoleRecord(Record, frozen=True, kw_only=True):
    """One process: its role and id, its host (`bus.identity.host`, and the name of the host), its release, when it started
    (unix time), and whether it has left. A process that is `draining` leaves soon, and receives nothing new.

    `urls` are the addresses of a gateway or a console. `durability` ("yes", "no", "unknown") is whether the broker writes
    to disk what it acknowledges, as the gateway measured. `stalled` are the streams that acknowledge nothing. `queues` are
    those a scheduler owns: model, partition, and the epoch since which it owns them; one that `keeps_models` runs with
    `--scale-to-zero`. `loop_lag_s` is the greatest lag
    of the event loop in the last 10 s.
    """

    role: Role
    id: Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9_=-]+\Z")]
    host: Annotated[str, Meta(max_length=64)]
    host_name: Annotated[str, Meta(max_length=256)] = ""
    pid: NonNegative
    version: Annotated[str, Meta(max_length=64)] = ""
    since_ms: Annotated[int, Meta(ge=0, lt=1 << 53)]
    leaving: bool = False
    draining: bool = False
    urls: Annotated[list[Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] = []
    durability: Annotated[str, Meta(max_length=16)] = ""
    stalled: Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=16)] = []
    queues: Annotated[list[tuple[str, int, int]], Meta(max_length=MAX_QUEUES)] = []
    keeps_models: bool = False
    loop_lag_s: _Finite = 0.0

    def differs_from(self, other: RoleRecord | None) -> bool:
        """Whether any field differs but `loop_lag_s`, a measurement that always changes."""
        return other is None or msgspec.structs.replace(self, loop_lag_s=other.loop_lag_s) != other
