"""`TerminalRecord`: what became of one durable request, as the headers of its one record in stream RESULT.

The same headers go with the answer to the producer's reply subject. They are a public contract (docs/events.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import orjson


class Outcome(StrEnum):
    """How a durable request ended; each ends in exactly one of these."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """The model or a check refused it: the same request would fail again."""
    EXPIRED = "expired"
    """Its deadline passed, or it grew older than its queue keeps requests."""
    CANCELLED = "cancelled"
    DEAD_LETTERED = "dead-lettered"
    """It could not be done: it lies in stream DEAD with the reason, and can be replayed."""


class Attempt:
    """One try that came to nothing: when it ended (unix milliseconds), and why."""

    __slots__ = ("ended_ms", "reason")

    def __init__(self, ended_ms: int, reason: str) -> None:
        self.ended_ms = ended_ms
        self.reason = reason

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attempt) and (self.ended_ms, self.reason) == (other.ended_ms, other.reason)

    def __hash__(self) -> int:
        return hash((self.ended_ms, self.reason))


_MAX_REASON_LENGTH = 200
_MAX_HISTORY = 16


@dataclass(slots=True)
class TerminalRecord:
    """See the module. Times are unix milliseconds, 0 where there was none.

    `attempts` counts how often the request was begun with, `history` tells of those that came to nothing, oldest first.
    `digest` tells whether another request of the same id is the same one. `status` is the HTTP status of the answer.
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
    history: list[Attempt] = field(default_factory=list)

    def headers(self) -> list[tuple[str, str]]:
        """The headers that say so."""
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
        """The record that `headers` (names in lower case) tell of. Raises ValueError where they don't."""
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
            history=unpack_history(headers.get("weir-history", "[]")),
        )


def unpack_history(text: str) -> list[Attempt]:
    """The attempts that a header `Weir-History` tells of. Raises ValueError or TypeError for one that is none."""
    rows: Any = orjson.loads(text)
    if not isinstance(rows, list):
        raise ValueError("not a history")
    return [Attempt(int(ended_ms), str(reason)) for ended_ms, reason in rows]
