"""Options of the logs about requests: who did what (audit log), and every request (access log). All are Weir's own."""

from __future__ import annotations

from typing import Any

from weir.options.option import GATEWAY, SERVE, Option
from weir.options.values import Integer, Text

_OURS: dict[str, Any] = {"panel": "Audit and access log", "commands": (SERVE, GATEWAY), "ours": True}

_DEFAULT_AUDIT_BYTES = 64 << 20
_LEAST_AUDIT_BYTES = 1 << 20

REQUEST_LOG_OPTIONS: tuple[Option, ...] = (
    Option(
        names=("--access-log",),
        value=Text("FILE"),
        default="",
        shown_default="none",
        help="File for a line of JSON for each request over HTTP, gRPC and NATS, - for standard output.",
        **_OURS,
    ),
    Option(
        names=("--audit-log",),
        value=Text("FILE"),
        default="",
        shown_default="none",
        help="File for audit events as lines of JSON, - for standard output: each refused request, and each allowed one "
        "that changes the server or reads what belongs to others. They are also kept in the broker, for `weir audit`.",
        **_OURS,
    ),
    Option(
        names=("--audit-max-bytes",),
        value=Integer(_LEAST_AUDIT_BYTES, metavar="BYTES"),
        default=_DEFAULT_AUDIT_BYTES,
        help="Maximum size of the audit events in the broker; beyond it, and after 30 days, the oldest are deleted. The "
        "broker reserves it.",
        **_OURS,
    ),
)
"""The options declared in this module."""
