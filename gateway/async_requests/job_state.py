"""`JobState`: what is known of a request that is answered later, as its client is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import orjson

from bus.stored_messages import StoredMessage
from bus.subjects import untoken
from schemas.terminal import Outcome, TerminalRecord

_MAX_ERROR_LENGTH = 1024


class JobStatus(StrEnum):
    """What a job may be while it has no terminal record; with one, its status is the record's outcome."""

    QUEUED = "queued"
    RUNNING = "running"
    """Taken up by the model's gateway: its turn among others may still be to come."""


@dataclass(slots=True)
class JobState:
    """See the module. `record` is there when it is done, then with the message it lies in; `status` tells all others."""

    id: str
    model: str
    status: str
    version: str = ""
    accepted_ms: int = 0
    sequence: int = 0
    record: TerminalRecord | None = None
    message: StoredMessage | None = field(default=None, repr=False)

    @classmethod
    def of_record(cls, message: StoredMessage) -> JobState:
        """That of a message in RESULT. Raises ValueError for one that is no terminal record."""
        record = TerminalRecord.of(message.headers)
        return cls(
            record.id,
            record.model,
            record.outcome.value,
            record.version,
            record.accepted_ms,
            message.sequence,
            record,
            message,
        )

    @classmethod
    def of_request(cls, id: str, message: StoredMessage, taken: int) -> JobState:
        """That of a message in QUEUE, of which those up to the sequence `taken` have been taken up."""
        status = JobStatus.RUNNING if message.sequence <= taken else JobStatus.QUEUED
        model = untoken(message.subject.split(".")[1])
        version = message.headers.get("weir-model-version", "")
        return cls(id, model, status.value, version, message.stored_ms, message.sequence)

    @property
    def is_done(self) -> bool:
        """Whether there is a terminal record."""
        return self.record is not None

    @property
    def error(self) -> str:
        """Why it came to nothing; "" where it did not, or is not done."""
        if self.record is None or self.message is None or self.record.outcome is Outcome.SUCCEEDED:
            return ""
        try:
            told = orjson.loads(self.message.data)["error"]
        except (ValueError, KeyError, TypeError):
            told = ""
        return str(told)[:_MAX_ERROR_LENGTH] or self.record.outcome.value

    def document(self) -> dict[str, Any]:
        """What a client is told, in JSON."""
        document: dict[str, Any] = {"id": self.id, "model": self.model}
        if self.version:
            document["version"] = self.version
        document["status"] = self.status
        if self.accepted_ms:
            document |= {"accepted": iso_time(self.accepted_ms), "accepted_ms": self.accepted_ms}
        record = self.record
        if record is not None:
            document |= {"ended": iso_time(record.ended_ms), "ended_ms": record.ended_ms, "attempts": record.attempts}
            history = [
                {"ended": iso_time(attempt.ended_ms), "ended_ms": attempt.ended_ms, "reason": attempt.reason}
                for attempt in record.history
            ]
            document |= {"history": history, "result": f"/v2/jobs/{self.id}/result"}
            if self.error:
                document["error"] = self.error
        return document


def iso_time(unix_ms: int) -> str:
    """A time in ISO 8601, UTC, with milliseconds."""
    try:
        time = datetime.fromtimestamp(unix_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return ""
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
