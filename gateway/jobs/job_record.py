"""What is kept of each offline job in bucket `jobs`: what is wanted of it, and how far it is.

They are two keys, for they have different writers: `<id>` is written by whoever is asked to do something about the job,
`<id>.progress` by the one gateway that runs it. Both are JSON, and checked when they are read.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

import orjson

from schemas.errors import WeirError, invalid

ID_PREFIX = "batch-"
"""What ids of offline jobs begin with."""

MAX_INPUTS = 10_000
"""Paths that one job may name; of more files, their folder is to be named."""

MAX_RECORD_BYTES = 768 << 10
"""What one entry may take in the bucket."""

_MAX_ERROR_LENGTH = 500
_MAX_VERSION_DIGITS = 19


class JobState(StrEnum):
    """Where a job is."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    SUCCEEDED = "succeeded"
    """It is through; items may have failed, which its counts tell, and its `error` why the first one did."""
    FAILED = "failed"
    """It could not go on: its input can't be read, or too many items failed, or all."""

    @property
    def is_final(self) -> bool:
        """Whether nothing more becomes of the job by itself."""
        return self in (JobState.CANCELLED, JobState.SUCCEEDED, JobState.FAILED)


class Wanted(StrEnum):
    """What a job is to do."""

    RUN = "run"
    PAUSE = "pause"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What a job was asked to be. Paths are absolute. `max_failures` is how many items may fail, -1: all but one.

    A format of "" is found out from the input's names, or is that of the input. `max_in_flight` of 0 leaves it to the
    gateway how many items it has in flight.
    """

    model: str
    version: str = ""
    inputs: tuple[str, ...] = ()
    input_format: str = ""
    output: str = ""
    output_format: str = ""
    priority: int = 0
    max_in_flight: int = 0
    max_failures: int = -1

    def document(self) -> dict[str, Any]:
        """The fields as they are asked with."""
        fields = asdict(self)
        fields["input"] = list(fields.pop("inputs"))
        return fields

    @classmethod
    def of(cls, document: Any) -> JobSpec:
        """The specification in a JSON document. Raises WeirError (INVALID_ARG) with the reason."""
        if not isinstance(document, dict):
            raise invalid("a job is described by a JSON object")
        unknown = document.keys() - _FIELDS.keys()
        if unknown:
            raise invalid(f"unknown field '{min(unknown)}' of a job; there are {', '.join(_FIELDS)}")
        fields: dict[str, Any] = {}
        for name, value in document.items():
            if name == "input":
                fields["inputs"] = _paths(value)
            elif type(value) is not _FIELDS[name]:
                raise invalid(f"field '{name}' of a job must be {'an integer' if _FIELDS[name] is int else 'a string'}")
            else:
                fields[name] = value
        if not all(
            map(_is_text, [value for value in fields.values() if type(value) is str] + [*fields.get("inputs", ())])
        ):
            raise invalid("a text of the job has characters that are none")
        for name, key in (("model", "model"), ("input", "inputs"), ("output", "output")):
            if not fields.get(key):
                raise invalid(f"a job needs field '{name}'")
        spec = cls(**fields)
        if spec.version and not (spec.version.isdecimal() and len(spec.version) <= _MAX_VERSION_DIGITS):
            raise invalid(f"field 'version' of a job must be a number, not '{spec.version}'")
        if not (0 <= spec.priority < 2**32 and 0 <= spec.max_in_flight <= 50_000 and -1 <= spec.max_failures < 2**62):
            raise invalid("a number of the job is out of range")
        return spec


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
}

NUMBER_FIELDS = tuple(name for name, kind in _FIELDS.items() if kind is int)
"""The fields of a specification that are numbers."""


def _is_text(value: str) -> bool:
    """Whether it can be stored, and be a path."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEntry:
    """A job as it was asked for: `round` counts how often it was to be tried again."""

    id: str
    spec: JobSpec
    wanted: Wanted = Wanted.RUN
    round: int = 0
    created_ms: int = 0

    def pack(self) -> bytes:
        """The value of key `<id>`. Raises WeirError (INVALID_ARG) when it is too large."""
        data = orjson.dumps({**asdict(self), "spec": self.spec.document()})
        if len(data) > MAX_RECORD_BYTES:
            raise invalid("the job's input paths are too many: name their folder instead, or use a pattern")
        return data

    @classmethod
    def unpack(cls, data: bytes) -> JobEntry:
        """The entry in a value. Raises ValueError for what is none."""
        try:
            fields = orjson.loads(data)
            fields["spec"] = JobSpec.of(fields["spec"])
            fields["wanted"] = Wanted(fields["wanted"])
            entry = cls(**fields)
        except (WeirError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a job: {type(error).__name__}") from error
        if type(entry.id) is not str or type(entry.round) is not int or type(entry.created_ms) is not int:
            raise ValueError("not a job: wrong types")
        return entry


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    """How far a job is. Times are unix milliseconds, 0 for not yet; `total` is -1 until it is known.

    `done` counts items with an outcome, `failed` those of them that failed. `rate` is items/s of late, `left_s` the time
    left, -1 where it can't be told. `note` tells what the job waits for, `error` why it ended, or why items failed.
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
        return orjson.dumps(asdict(self))

    @classmethod
    def unpack(cls, data: bytes) -> JobProgress:
        """The progress in a value. Raises ValueError for what is none."""
        try:
            fields = orjson.loads(data)
            fields["state"] = JobState(fields["state"])
            progress = cls(**fields)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a job's progress: {type(error).__name__}") from error
        if not all(type(getattr(progress, name)) is int for name in _WHOLE_NUMBERS) or not all(
            type(getattr(progress, name)) is str for name in ("owner", "note", "error")
        ):
            raise ValueError("not a job's progress: wrong types")
        if not all(type(number) in (int, float) for number in (progress.rate, progress.left_s)):
            raise ValueError("not a job's progress: wrong types")
        return progress

    def ended(self, state: JobState, error: str = "") -> JobProgress:
        """The same, when the job has come to its end."""
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


_WHOLE_NUMBERS = ("round", "total", "done", "failed", "started_ms", "ended_ms", "updated_ms")


@dataclass(frozen=True, slots=True)
class Job:
    """Both together."""

    entry: JobEntry
    progress: JobProgress

    @property
    def id(self) -> str:
        """The job's id."""
        return self.entry.id

    @property
    def state(self) -> JobState:
        """Where it is, with what is wanted of it since."""
        progress, wanted = self.progress, self.entry.wanted
        if progress.round < self.entry.round or (progress.state is JobState.PAUSED and wanted is Wanted.RUN):
            state = JobState.QUEUED
        else:
            state = progress.state
        if wanted is Wanted.CANCEL and not state.is_final:
            return JobState.CANCELLING
        return state

    @property
    def needs_runner(self) -> bool:
        """Whether somebody has to do something about it."""
        state = self.state
        return not state.is_final and not (state is JobState.PAUSED and self.entry.wanted is Wanted.PAUSE)

    def told(self) -> dict[str, Any]:
        """What is told of it over HTTP."""
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
    """An id that no other job has."""
    return f"{ID_PREFIX}{secrets.token_hex(8)}"


def unix_ms() -> int:
    """Now."""
    return time.time_ns() // 1_000_000
