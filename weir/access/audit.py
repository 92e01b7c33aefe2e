"""`AuditEvent`: who did, or tried to do, what to which model. Doors give their events to the `Audits` of the gate.

Every refused request is an event, and every allowed one that changes the server or reads what belongs to others. Allowed
inference, metadata, statistics, health, metrics and reading in the console are none: the access log has them.

An event carries no secret and no payload. Its strings may come from clients: when the event is made they are bounded, and
all characters that could forge a line or control a terminal are replaced.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from weir.access.policy.actions import Action
from weir.access.principal import NOBODY, Principal

MAX_TEXT = 256
"""Characters of a string of an event. A longer one is cut and ends with "…"."""

MERGE_S = 1.0
"""Refusals of the same kind that follow the first one within this time are counted in its event."""

MAX_MERGING = 1000
"""Kinds of refusals that are counted at once; further ones are counted by door and action alone."""

TOO_MANY_KINDS = "too many different refusals within a second"
"""The reason of an event that counts the refusals beyond `MAX_MERGING` kinds."""

_NOT_AUDITED_IF_ALLOWED = frozenset(
    [
        Action.HEALTH,
        Action.METADATA,
        Action.INFER,
        Action.STATISTICS,
        Action.METRICS,
        Action.CONSOLE_READ,
    ]
)


_WORDS_NOT_AUDITED = frozenset(action.value for action in _NOT_AUDITED_IF_ALLOWED)


class AuditEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One decision of a door, or `count` equal ones. Frozen by convention: the recorder of a process keeps it.

    `time_s` is in Unix seconds, of the first of them. `operation` is the template of the route
    (`POST /v2/repository/models/{model}/load`), the gRPC method, the NATS subject without its model, or the console's
    action. `door` is "http", "grpc", "nats", "console", "sagemaker", "vertex", "metrics" or "durable". `principal`,
    `tenant`, `credential` and `proof` are those of a `Principal`. `version` is 0 for all versions. `client` is the address
    of the peer. `why` is the rule that allows the request, or what is missing.
    """

    time_s: float
    door: str
    action: str
    operation: str
    allowed: bool
    why: str = ""
    principal: str = ""
    tenant: str = ""
    credential: str = ""
    proof: str = NOBODY.proof.value
    model: str = ""
    version: int = 0
    request_id: str = ""
    client: str = ""
    count: int = 1

    def __post_init__(self) -> None:
        """Bounds the strings, and replaces what is not printable."""
        for name in _TEXTS:
            text = getattr(self, name)
            if text and (len(text) > MAX_TEXT or not text.isprintable()):
                setattr(self, name, printable(text))


_TEXTS = tuple(field.name for field in msgspec.structs.fields(AuditEvent) if field.type is str)


def printable(text: str, limit: int = MAX_TEXT) -> str:
    """At most `limit` characters of `text`, with "\N{REPLACEMENT CHARACTER}" in the place of each unprintable one."""
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    if text.isprintable():
        return text
    return "".join(ch if ch.isprintable() else "\N{REPLACEMENT CHARACTER}" for ch in text)


def event_of(  # noqa: PLR0913 - what a door knows of a request
    time_s: float,
    door: str,
    operation: str,
    principal: Principal,
    action: Action,
    *,
    allowed: bool,
    why: str = "",
    model: str = "",
    version: int = 0,
    request_id: str = "",
    client: str = "",
) -> AuditEvent:
    """The event of one decision about `principal`; the fields are those of `AuditEvent`."""
    return AuditEvent(
        time_s=time_s,
        door=door,
        action=action.value,
        operation=operation,
        allowed=allowed,
        why=why,
        principal=principal.name,
        tenant=principal.tenant,
        credential=principal.credential,
        proof=principal.proof.value,
        model=model,
        version=version,
        request_id=request_id,
        client=client,
    )


def is_audited(action: Action, allowed: bool) -> bool:
    """Whether a decision is an event. A door asks this first where most of its decisions are none, as for inference."""
    return not allowed or action not in _NOT_AUDITED_IF_ALLOWED


class Audits(Protocol):
    """Where the doors of a process record events. `record` never fails and never waits."""

    def record(self, event: AuditEvent) -> None:
        """Records `event`, unless it is none by `is_audited`."""


class NoAudit:
    """Drops all events: neither a policy nor `--audit-log` is set."""

    def record(self, event: AuditEvent) -> None:
        """Implements `Audits.record`."""


NO_AUDIT = NoAudit()


class AuditMerge:
    """Counts refusals of the same kind within `MERGE_S` in one event. Sans-IO; all times are those of the events.

    A client that tries again and again, or makes up models, can neither fill the log nor the memory of the process.
    """

    def __init__(self) -> None:
        self._merging: dict[tuple[str, ...], AuditEvent] = {}  # in the order of their times

    def add(self, event: AuditEvent) -> list[AuditEvent]:
        """Takes `event`. Returns what is complete now: allowed events at once, refusals once their time is over."""
        complete = self.expire(event.time_s)
        if event.allowed:
            if event.action not in _WORDS_NOT_AUDITED:
                complete.append(event)
            return complete
        key: tuple[str, ...] = event.principal, event.action, event.model, event.door, event.why
        merged = self._merging.get(key)
        if merged is None and len(self._merging) >= MAX_MERGING:
            key = event.door, event.action
            merged = self._merging.get(key)
            if merged is None:
                event = AuditEvent(
                    time_s=event.time_s,
                    door=event.door,
                    action=event.action,
                    operation="*",
                    allowed=False,
                    why=TOO_MANY_KINDS,
                    count=event.count,
                )
        if merged is None:
            self._merging[key] = event
        else:
            merged.count += event.count
        return complete

    def expire(self, now_s: float) -> list[AuditEvent]:
        """The events whose time is over at `now_s`, in Unix seconds. A clock that goes back ends all."""
        complete = []
        for key, event in list(self._merging.items()):
            if 0 <= now_s - event.time_s < MERGE_S:
                break
            complete.append(self._merging.pop(key))
        return complete

    def take_all(self) -> list[AuditEvent]:
        """All events that are still counting: the process ends."""
        events, self._merging = list(self._merging.values()), {}
        return events
