"""Options of who may do what, and of the logs about requests: who did what (audit log), every request (access log).

All are Weir's own.
"""

from __future__ import annotations

from typing import Any

from weir.options.option import CONSOLE, DURABLE, GATEWAY, SERVE, Option, switch
from weir.options.values import Integer, Text

_OURS: dict[str, Any] = {"panel": "Access", "ours": True}

ACCESS_POLICY_OPTIONS: tuple[Option, ...] = (
    Option(
        names=("--access-policy",),
        is_common=True,
        value=Text("FILE"),
        default="",
        shown_default="none: everybody may do everything",
        help="Policy of who may do what (YAML, docs/security.md). A change applies within a second; a bad one is logged, "
        "and the policy before it stays in force.",
        commands=(SERVE, GATEWAY, DURABLE, CONSOLE),
        **_OURS,
    ),
    Option(
        names=("--access-keys",),
        value=Text("FILE"),
        default="",
        shown_default="the keys are kept by the message broker",
        help="File of the keys that `weir key --file` makes. A change applies within a second.",
        commands=(SERVE, GATEWAY, DURABLE, CONSOLE),
        **_OURS,
    ),
    switch(
        "--require-access-policy",
        False,
        "Refuse to start without an access policy where a port can be reached from other hosts.",
        commands=(SERVE, GATEWAY, CONSOLE),
        **_OURS,
    ),
)
"""The options declared in this module."""

_OF_AUDIT: dict[str, Any] = {"panel": "Audit and access log", "ours": True}
_LOGS: dict[str, Any] = {"panel": "Audit and access log", "commands": (SERVE, GATEWAY), "ours": True}

_DEFAULT_AUDIT_BYTES = 64 << 20
_LEAST_AUDIT_BYTES = 1 << 20

REQUEST_LOG_OPTIONS: tuple[Option, ...] = (
    Option(
        names=("--access-log",),
        value=Text("FILE"),
        default="",
        shown_default="none",
        help="File for a line of JSON for each request over HTTP, gRPC and NATS, - for standard output.",
        **_LOGS,
    ),
    Option(
        names=("--audit-log",),
        value=Text("FILE"),
        default="",
        shown_default="none",
        help="File for audit events as lines of JSON, - for standard output: each refused request, and each allowed one "
        "that changes the server or reads what belongs to others. They are also kept in the broker, for `weir audit`.",
        commands=(SERVE, GATEWAY, DURABLE, CONSOLE),
        **_OF_AUDIT,
    ),
    Option(
        names=("--audit-max-bytes",),
        value=Integer(_LEAST_AUDIT_BYTES, metavar="BYTES"),
        default=_DEFAULT_AUDIT_BYTES,
        help="Maximum size of the audit events in the broker; beyond it, and after 30 days, the oldest are deleted. The "
        "broker reserves it.",
        commands=(SERVE, GATEWAY, DURABLE, CONSOLE),
        **_OF_AUDIT,
    ),
)
"""The options declared in this module."""
