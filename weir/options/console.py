"""Options of the console, the web page of a cluster. All are Weir's own."""

from __future__ import annotations

from typing import Any

from weir.console import DEFAULT_PORT
from weir.options.option import CONSOLE, SERVE, Option, switch
from weir.options.values import Integer, Text

_OURS: dict[str, Any] = {"panel": "Console", "commands": (SERVE, CONSOLE), "ours": True}

CONSOLE_OPTIONS: tuple[Option, ...] = (
    switch(
        "--allow-console",
        True,
        "Serve the console, a web page with the state, the load and the requests of the cluster.",
        panel="Console",
        ours=True,
    ),
    Option(
        names=("--console-address",),
        is_common=True,
        value=Text("ADDRESS"),
        default="127.0.0.1",
        help="Address to listen on. Without an access policy who reaches it sees all it shows.",
        **_OURS,
    ),
    Option(
        names=("--console-port",),
        is_common=True,
        value=Integer(0, 65535, metavar="PORT"),
        shown_default=f"{DEFAULT_PORT}, or a free one where that is taken; none with --http-port=0",
        help="Port of the console; 0 selects a free one.",
        **_OURS,
    ),
    switch(
        "--console-allow-changes",
        False,
        "Let the console change the cluster: load models, split traffic, submit and cancel jobs, replay dead letters.",
        is_common=True,
        **_OURS,
    ),
)
"""The options declared in this module."""
