"""Which subjects are Weir's, or the broker's: nothing that comes from outside may have us publish there.

Whoever sends a request names the subject of its answer, and the role that answers publishes there with its own permissions.
Every such subject passes `subject_problem`, or `may_answer`, which is the same check of a message's reply subject.
"""

from __future__ import annotations

import logging

from bus.nats_protocol import Message
from bus.subjects import role_inbox
from runtime.log_limiter import LogLimiter

_limiter = LogLimiter(logging.getLogger("weir.bus"))

RESERVED_TOKENS = frozenset(
    {
        *(role_inbox(role) for role in ("gateway", "scheduler", "worker", "admin")),
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
"""First tokens of the subjects of `bus.subjects` and `bus.durable_subjects`, and of the roles' own inboxes; a test keeps
them in step. Subjects of the broker (`$JS`, `$KV`, `$O`, `$SYS`, `$SRV`) all begin with `$`.
"""

MAX_SUBJECT_LENGTH = 1024

_SHOWN = 100  # characters of a subject in the log


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


def may_answer(message: Message, own: str = "") -> bool:
    """Whether the reply subject of `message` may be published on. False without one; one that is refused is logged.

    `own` is the beginning of Weir's own subjects for answers to such a question, allowed besides subjects of others.
    """
    reply = message.reply
    if not reply:
        return False
    if own and reply.startswith(own):
        return True
    problem = subject_problem(reply)
    if problem:
        _limiter.warning(
            "refused reply subject",
            "dropped a request on %r: its reply subject %r %s; nothing was published there",
            message.subject[:_SHOWN],
            reply[:_SHOWN],
            problem,
        )
    return not problem
