"""The record of an offline job in bucket `jobs`: its specification and desired state, and its progress.

They are two keys with different writers: `<id>` is written by the gateway that a client asks to change the job,
`<id>.progress` by the one process that runs it. Both are JSON, whose fields and types msgspec validates.
"""

from __future__ import annotations

import secrets
import time
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from weir.calls.catalog import ServedModel
from weir.schemas.core.errors import WeirError, invalid

ID_PREFIX = "batch-"
"""The prefix of the ids of offline jobs."""

MAX_INPUTS = 10_000
"""Paths that one job may name; for more files, name their folder."""

MAX_COLUMNS = 1000
"""Columns that one job may choose."""

MAX_RECORD_BYTES = 768 << 10
"""Bytes of one entry in the bucket."""

_MAX_ERROR_LENGTH = 500
_MAX_VERSION_DIGITS = 19


class JobState(StrEnum):
    """The state of a job."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    SUCCEEDED = "succeeded"
    """All items are processed. Some may have failed: `failed` counts them, `error` has the first failure."""
    FAILED = "failed"
    """It ended early: its input can't be read, or too many items failed."""

    @property
    def is_final(self) -> bool:
        """Whether the job has ended."""
        return self in (JobState.CANCELLED, JobState.SUCCEEDED, JobState.FAILED)


class DesiredState(StrEnum):
    """What a client wants of a job."""

    RUN = "run"
    PAUSE = "pause"
    CANCEL = "cancel"


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The specification of a job. Paths are absolute. `max_failures` is how many items may fail, -1: all but one.

    An input format of "" is derived from the names, an output format of "" from the input. With `max_in_flight` 0 the
    server chooses how many items are in flight. `columns` are those that are read of Parquet files, all if it is empty:
    the results repeat those that are no input.
    """

    model: str
    version: str = ""
    inputs: tuple[str, ...] = msgspec.field(default=(), name="input")
    input_format: str = ""
    output: str = ""
    output_format: str = ""
    priority: int = 0
    max_in_flight: int = 0
    max_failures: int = -1
    columns: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """The fields as JSON, as in a request."""
        return {**msgspec.to_builtins(self), "input": list(self.inputs), "columns": list(self.columns)}

    @classmethod
    def of(cls, document: Any) -> JobSpec:
        """Parses a JSON document. Raises WeirError (INVALID_ARG)."""
        if not isinstance(document, dict):
            raise invalid("a job is described by a JSON object")
        spec = cls(**_checked_fields(document))
        if spec.version and not (spec.version.isdecimal() and len(spec.version) <= _MAX_VERSION_DIGITS):
            raise invalid(f"field 'version' of a job must be a number, not '{spec.version}'")
        if not (0 <= spec.priority < 2**32 and 0 <= spec.max_in_flight <= 50_000 and -1 <= spec.max_failures < 2**62):
            raise invalid("a number of the job is out of range")
        return spec


def _checked_fields(document: dict[str, Any]) -> dict[str, Any]:
    """The fields of a specification, each of its type. Raises WeirError (INVALID_ARG)."""
    unknown = document.keys() - _FIELDS.keys()
    if unknown:
        raise invalid(f"unknown field '{min(unknown)}' of a job; expected some of {', '.join(_FIELDS)}")
    fields: dict[str, Any] = {}
    for name, value in document.items():
        if name == "input":
            fields["inputs"] = _paths(value)
        elif name == "columns":
            fields["columns"] = _columns(value)
        elif type(value) is not _FIELDS[name]:
            raise invalid(f"field '{name}' of a job must be {'an integer' if _FIELDS[name] is int else 'a string'}")
        elif isinstance(value, str) and not _is_text(value):
            raise invalid(f"field '{name}' of a job is not valid text: it has a NUL character or is not valid Unicode")
        else:
            fields[name] = value
    if not all(map(_is_text, fields.get("inputs", ()))):
        raise invalid(
            "a path in field 'input' of a job is not valid text: it has a NUL character or is not valid Unicode"
        )
    for name, key in (("model", "model"), ("input", "inputs"), ("output", "output")):
        if not fields.get(key):
            raise invalid(f"a job needs field '{name}'")
    return fields


_FIELDS: dict[str, type] = {
    "model": str,
    "version": str,
    "input": list,
    "input_format": str,
    "output": str,
    "output_format": str,
    "priority": int,
    "max_in_flight": int,
    "max_failures": int,
    "columns": list,
}

NUMBER_FIELDS = tuple(name for name, kind in _FIELDS.items() if kind is int)
"""The numeric fields of a specification."""


def _is_text(value: str) -> bool:
    """Whether a text can be stored and can be a path."""
    try:
        return b"\0" not in value.encode()
    except UnicodeEncodeError:  # half of a pair
        return False


def _paths(value: Any) -> tuple[str, ...]:
    paths = [value] if isinstance(value, str) else value
    if not isinstance(paths, list) or not all(isinstance(path, str) and path for path in paths):
        raise invalid("field 'input' of a job must be a path or a list of paths")
    if len(paths) > MAX_INPUTS:
        raise invalid(f"a job takes at most {MAX_INPUTS} input paths: name the folder instead, or use a pattern")
    return tuple(paths)


def _columns(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) and name and _is_text(name) for name in value):
        raise invalid("field 'columns' of a job must be a list of names")
    if len(value) > MAX_COLUMNS:
        raise invalid(f"a job takes at most {MAX_COLUMNS} columns, got {len(value)}")
    return tuple(dict.fromkeys(value))


class JobEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The entry of a job: its specification and desired state. `round` counts its retries.

    `owner` is whose it is (`weir.access.principal.Principal.owner`), "" without an access policy.
    """

    id: str
    spec: JobSpec
    wanted: DesiredState = DesiredState.RUN
    round: int = 0
    created_ms: int = 0
    owner: str = ""

    def pack(self) -> bytes:
        """The value of key `<id>`. Raises WeirError (INVALID_ARG) if it is too large."""
        data = msgspec.json.encode(self)
        if len(data) > MAX_RECORD_BYTES:
            raise invalid("the job's input paths are too many: name their folder instead, or use a pattern")
        return data

    @classmethod
    def unpack(cls, data: bytes) -> JobEntry:
        """Parses a value. Raises ValueError."""
        entry = msgspec.json.decode(data, type=cls)
        try:
            JobSpec.of(entry.spec.document())
        except WeirError as error:
            raise ValueError(f"not a job: {error.message}") from error
        return entry


class JobProgress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The progress of a job. Times are unix milliseconds, 0 for not yet; `total` is -1 until it is known.

    `done` counts items with an outcome, `failed` those of them that failed. `rate` is the recent rate in items/s, `left_s`
    the estimated time left, -1 if unknown. `note` describes what the job waits for, `error` why it ended or why items
    failed.
    """

    round: int = 0
    state: JobState = JobState.QUEUED
    total: int = -1
    done: int = 0
    failed: int = 0
    rate: float = 0.0
    left_s: float = -1.0
    started_ms: int = 0
    ended_ms: int = 0
    updated_ms: int = 0
    owner: str = ""
    note: str = ""
    error: str = ""

    def pack(self) -> bytes:
        """The value of key `<id>.progress`."""
        return msgspec.json.encode(self)

    @classmethod
    def unpack(cls, data: bytes) -> JobProgress:
        """Parses a value. Raises ValueError."""
        return msgspec.json.decode(data, type=cls)

    def ended(self, state: JobState, error: str = "") -> JobProgress:
        """The progress of the job once it has ended in `state`."""
        now_ms = unix_ms()
        return replace(
            self,
            state=state,
            error=error[:_MAX_ERROR_LENGTH],
            note="",
            left_s=0.0,
            ended_ms=now_ms,
            updated_ms=now_ms,
        )


class Job(NamedTuple):
    """A job: its entry and its progress."""

    entry: JobEntry
    progress: JobProgress

    @property
    def id(self) -> str:
        """The id of the job."""
        return self.entry.id

    @property
    def state(self) -> JobState:
        """The state, derived from the progress and the desired state."""
        progress, wanted = self.progress, self.entry.wanted
        if progress.round < self.entry.round or (progress.state is JobState.PAUSED and wanted is DesiredState.RUN):
            state = JobState.QUEUED
        else:
            state = progress.state
        if wanted is DesiredState.CANCEL and not state.is_final:
            return JobState.CANCELLING
        return state

    @property
    def needs_runner(self) -> bool:
        """Whether a process must run it."""
        state = self.state
        return not state.is_final and not (state is JobState.PAUSED and self.entry.wanted is DesiredState.PAUSE)

    def to_dict(self) -> dict[str, Any]:
        """The job as the JSON of the HTTP API."""
        progress = self.progress
        return {
            "id": self.id,
            "kind": "batch",
            "state": self.state.value,
            "wanted": self.entry.wanted.value,
            **self.entry.spec.document(),
            "total": None if progress.total < 0 else progress.total,
            "done": progress.done,
            "failed": progress.failed,
            "rate_per_s": round(progress.rate, 3),
            "left_s": None if progress.left_s < 0 else round(progress.left_s, 1),
            "created_ms": self.entry.created_ms,
            "started_ms": progress.started_ms,
            "ended_ms": progress.ended_ms if self.state.is_final else 0,
            "updated_ms": progress.updated_ms,
            "owner": progress.owner,
            "note": progress.note,
            "error": progress.error,
        }


def new_job_id() -> str:
    """A new unique id."""
    return f"{ID_PREFIX}{secrets.token_hex(8)}"


def unix_ms() -> int:
    """The current time in unix milliseconds."""
    return time.time_ns() // 1_000_000


def check_model(model: ServedModel) -> None:
    """Raises WeirError (INVALID_ARG) for a model that jobs can't run."""
    if model.config.is_decoupled:
        raise invalid(
            f"model '{model.name}' is decoupled: decoupled models are not supported in batch jobs, because each item may "
            "have one response only"
        )
    if model.config.sequence_batching is not None:
        raise invalid(
            f"model '{model.name}' has sequence batching: it is not supported in batch jobs, whose items are independent"
        )
