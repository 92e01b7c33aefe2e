"""Options of the server as a whole, its message bus and its log: Triton's, and Weir's own."""

from __future__ import annotations

from typing import Any

from weir.options.broker_options import BROKER_OPTIONS
from weir.options.forms import cache_setting
from weir.options.option import GATEWAY, ROLES, SCHEDULER, SERVE, WORKER, Option, switch
from weir.options.values import Checked, Choice, Integer, Number, Text, Verbosity

_EVERYWHERE = (SERVE, *ROLES)


def _server() -> tuple[Option, ...]:
    named = [
        Option(
            names=(f"--{role}-id",),
            value=Text("NAME"),
            shown_default="drawn",
            ours=True,
            help="Name of this process among its like.",
            panel="Server",
            commands=(role,),
        )
        for role in ROLES
    ]
    return (
        Option(
            names=("--id",),
            value=Text("NAME"),
            default="triton",
            help="The server's name in its metadata.",
            field="server_id",
            panel="Server",
            commands=(SERVE, GATEWAY),
        ),
        *named,
        switch("--strict-readiness", True, "Ready only when all models are.", "Server", (SERVE, GATEWAY)),
        Option(
            names=("--exit-timeout-secs",),
            value=Number(0),
            default=30.0,
            help="Time to finish running work when told to stop.",
            differs="Fractions of a second are taken too.",
            panel="Server",
            commands=_EVERYWHERE,
        ),
        switch(
            "--allow-client-shm",
            False,
            "Let clients put tensors into shared memory of this host.",
            "Server",
            (SERVE, GATEWAY, WORKER),
        ),
        Option(
            names=("--gateway-memory-byte-size",),
            value=Integer(0, metavar="BYTES"),
            default=0,
            shown_default="512 MiB, or a quarter of the memory of the container or machine if that is less",
            help="Memory that a gateway may hold of what clients have sent and have not read yet; beyond it requests are "
            "refused with 503. A connection has half of it, a client's address three quarters.",
            panel="Server",
            commands=(SERVE, GATEWAY),
            ours=True,
        ),
    )


def _cache() -> tuple[Option, ...]:
    return (
        Option(
            names=("--cache-config",),
            value=Checked("CACHE,KEY=VALUE", cache_setting),
            repeatable=True,
            help=(
                "Keep answers of models with `response_cache`: `local,size=BYTES` in each gateway, "
                "`nats,size=BYTES[,ttl=SECONDS]` in the message bus, for all of them; may be repeated."
            ),
            differs="`nats` in the place of `redis`, which is refused.",
            panel="Response cache",
            commands=(SERVE, GATEWAY, WORKER),
        ),
    )


def _log() -> tuple[Option, ...]:
    panel: dict[str, Any] = {"panel": "Log", "commands": _EVERYWHERE}
    return (
        Option(
            names=("--log-verbose",),
            value=Verbosity(),
            default=0,
            bare="1",
            help="1 and more: log details.",
            **panel,
        ),
        switch("--log-info", True, "Log what happens.", **panel),
        switch("--log-warning", True, "Log what may be wrong.", **panel),
        switch("--log-error", True, "Log what went wrong.", **panel),
        Option(
            names=("--log-format",),
            value=Choice(
                ("default", "ISO8601", "json"),
                "invalid argument for --log-format",
                exact=True,
                aliases={"text": "default"},
            ),
            default="default",
            help="default: one line an entry; ISO8601: that with the date; json: one object a line.",
            differs="json is Weir's own.",
            **panel,
        ),
        Option(
            names=("--log-file",), value=Text("FILE"), default="", shown_default="stderr", help="Log there.", **panel
        ),
        Option(
            names=("--event-log",),
            value=Text("FOLDER"),
            default="",
            shown_default="none",
            help="Record there what schedulers decide and why, for python -m scheduler.replay; tensors are not recorded.",
            panel="Log",
            ours=True,
            commands=(SERVE, SCHEDULER),
        ),
    )


SERVER_OPTIONS: tuple[Option, ...] = (
    *BROKER_OPTIONS,
    *_server(),
    *_cache(),
    *_log(),
)
"""Those of this module."""
