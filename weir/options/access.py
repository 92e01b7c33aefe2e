"""Options of who may do what. All are Weir's own."""

from __future__ import annotations

from typing import Any

from weir.options.option import CONSOLE, DURABLE, GATEWAY, SERVE, Option, switch
from weir.options.values import Text

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
