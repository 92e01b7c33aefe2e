"""Which subjects are Weir's, or the broker's: nothing that comes from outside may have us publish there."""

from __future__ import annotations

RESERVED_TOKENS = frozenset(
    {
        "abandoned",
        "ack",
        "batch",
        "cached",
        "cancel",
        "cuda-close",
        "cuda-open",
        "cuda-opened",
        "dead",
        "done",
        "drain",
        "drained",
        "durable",
        "durable-inbox",
        "event",
        "fetch",
        "fetched",
        "flow",
        "found",
        "heartbeat",
        "inbox",
        "infer",
        "live",
        "lost",
        "lost-attempts",
        "owner",
        "presence",
        "probe",
        "readiness",
        "ready",
        "release",
        "reply",
        "repository",
        "result",
        "statistics",
        "stored",
        "work",
    }
)
"""First tokens of the subjects of `bus.subjects` and `bus.durable_subjects`; a test keeps them in step."""

MAX_SUBJECT_LENGTH = 1024


def subject_problem(subject: str) -> str:
    """Why an answer can't be sent to `subject`, "" where it can: it must be a plain subject, and nobody's of ours."""
    if not subject or len(subject) > MAX_SUBJECT_LENGTH:
        return f"must have 1 to {MAX_SUBJECT_LENGTH} characters"
    if not subject.isprintable() or " " in subject or "\ufffd" in subject:
        return "must not hold spaces or control characters"
    tokens = subject.split(".")
    if not all(tokens):
        return "must not hold empty tokens"
    if "*" in subject or ">" in subject:
        return "must not hold wildcards"
    if subject[0] == "$" or tokens[0] in RESERVED_TOKENS:
        return f"must not begin with '{tokens[0]}', which is reserved"
    return ""
