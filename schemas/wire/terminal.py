"""`TerminalRecord`: the outcome of one durable request, as the headers of its record in stream RESULT.

The response on the producer's reply subject has the same headers. They are a public contract (docs/events.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import orjson


class Outcome(StrEnum):
    """How a durable request ended; each has exactly one outcome."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """The model or a check rejected it: the same request would fail again."""
    EXPIRED = "expired"
    """Its deadline passed, or it grew older than its queue keeps requests."""
    CANCELLED = "cancelled"
    DEAD_LETTERED = "dead-lettered"
    """It could not be run: stream DEAD holds it with the reason, and it can be replayed."""


class Attempt(NamedTuple):
    """A failed attempt: when it ended (unix milliseconds), and why."""

    ended_ms: int
    reason: str


_MAX_REASON_LENGTH = 200
_MAX_HISTORY = 16


@dataclass(slots=True)
class TerminalRecord:
    """The outcome of one durable request. Times are unix milliseconds, 0 for none.

    `attempts` counts the started attempts, `history` has the failed ones, oldest first. Equal `digest`s mean that another
    request with the same id has the same content. `status` is the HTTP status of the response. `model_digest` changes with
    the files and the configuration of the version that responded.
    """

    id: str
    model: str
    outcome: Outcome
    version: str = ""
    attempts: int = 0
    accepted_ms: int = 0
    ended_ms: int = 0
    status: int = 200
    tenant: str = ""
    digest: str = ""
    model_digest: str = ""
    history: list[Attempt] = field(default_factory=list)

    def headers(self) -> list[tuple[str, str]]:
        """The record as headers."""
        headers = [
            ("Weir-Id", self.id),
            ("Weir-Model", self.model),
            ("Weir-Outcome", self.outcome.value),
            ("Weir-Attempts", str(self.attempts)),
            ("Weir-Accepted-Ms", str(self.accepted_ms)),
            ("Weir-Ended-Ms", str(self.ended_ms)),
            ("Weir-Status", str(self.status)),
        ]
        if self.version:
            headers.append(("Weir-Model-Version", self.version))
        if self.model_digest:
            headers.append(("Weir-Model-Digest", self.model_digest))
        if self.tenant:
            headers.append(("Weir-Tenant", self.tenant))
        if self.digest:
            headers.append(("Weir-Digest", self.digest))
        if self.history:
            rows = [(a.ended_ms, a.reason[:_MAX_REASON_LENGTH]) for a in self.history[-_MAX_HISTORY:]]
            headers.append(("Weir-History", orjson.dumps(rows).decode()))
        return headers

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> TerminalRecord:
        """The record in `headers` (names in lower case). Raises ValueError for headers without one."""
        return cls(
            id=headers.get("weir-id", ""),
            model=headers.get("weir-model", ""),
            outcome=Outcome(headers.get("weir-outcome", "")),
            version=headers.get("weir-model-version", ""),
            attempts=int(headers.get("weir-attempts", "0")),
            accepted_ms=int(headers.get("weir-accepted-ms", "0")),
            ended_ms=int(headers.get("weir-ended-ms", "0")),
            status=int(headers.get("weir-status", "200")),
            tenant=headers.get("weir-tenant", ""),
            digest=headers.get("weir-digest", ""),
            model_digest=headers.get("weir-model-digest", ""),
            history=unpack_history(headers.get("weir-history", "[]")),
        )


def unpack_history(text: str) -> list[Attempt]:
    """The attempts in a header `Weir-History`. Raises ValueError or TypeError for a malformed one."""
    rows: Any = orjson.loads(text)
    if not isinstance(rows, list):
        raise ValueError("not a history")
    return [Attempt(int(ended_ms), str(reason)) for ended_ms, reason in rows]
