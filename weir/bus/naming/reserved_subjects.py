"""The subjects of Weir and of the broker, on which no message from outside may make a role publish.

A request names the subject of its response, and the role that responds publishes there with its own permissions. Every such
subject is checked by `subject_problem`, or by `may_reply_to`, the same check for the reply subject of a message.
"""

from __future__ import annotations

import logging
from typing import Protocol

from weir.bus.naming.subjects import role_inbox
from weir.runtime.log_limiter import LogLimiter

_limiter = LogLimiter(logging.getLogger("weir.bus"))

RESERVED_TOKENS = frozenset(
    {
        *(role_inbox(role) for role in ("gateway", "scheduler", "worker", "admin", "console")),
        "abandoned",
        "ack",
        "api",
        "audit",
        "batch",
        "by",
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
        "heartbeat",
        "history",
        "inbox",
        "infer",
        "kv",
        "limits",
        "live",
        "lost",
        "lost-attempts",
        "observe",
        "observed",
        "owner",
        "peers",
        "presence",
        "probe",
        "readiness",
        "sequence-reports",
        "sequences",
        "ready",
        "release",
        "reply",
        "repository",
        "result",
        "statistics",
        "stored",
        "traffic",
        "work",
    }
)
"""First tokens of the subjects of `weir.bus.naming.subjects` and `weir.bus.naming.durable_subjects`, and of the roles'
inboxes.

A test compares them. Subjects of the broker (`$JS`, `$KV`, `$O`, `$SYS`, `$SRV`) all begin with `$`.
"""

MAX_SUBJECT_LENGTH = 1024

_SHOWN = 100  # characters of a subject in the log


class Request(Protocol):
    """A message with a reply subject (`weir.bus.nats.protocol.Message`)."""

    @property
    def subject(self) -> str:
        """The subject it was published on."""

    @property
    def reply(self) -> str:
        """The subject of its reply, "" for none."""


def subject_problem(subject: str) -> str:
    """Why no response may be published on `subject`, "" where one may: it must be plain and not reserved."""
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


def may_reply_to(message: Request, own: str = "") -> bool:
    """Whether a response may be published on the reply subject of `message`. False without one; a rejected one is logged.

    `own` is the prefix of Weir's own reply subjects for such requests, which are allowed as well.
    """
    reply = message.reply
    if not reply:
        return False
    if own and reply.startswith(own):
        return True
    problem = subject_problem(reply)
    if problem:
        _limiter.warning(
            "rejected reply subject",
            "dropped a request on %r: its reply subject %r %s; nothing was published there",
            message.subject[:_SHOWN],
            reply[:_SHOWN],
            problem,
        )
    return not problem
