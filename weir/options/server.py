"""Options of the server, the message bus, logging, overload and scaling: Triton's and Weir's own."""

from __future__ import annotations

from typing import Any

from weir.options.broker import BROKER_OPTIONS
from weir.options.option import DURABLE, GATEWAY, ROLES, SCHEDULER, SERVE, WORKER, Option, switch
from weir.options.values import Checked, Choice, Integer, Number, Text, Verbosity, cache_setting

_EVERYWHERE = (SERVE, *ROLES)


def _server() -> tuple[Option, ...]:
    named = [
        Option(
            names=(f"--{role}-id",),
            value=Text("NAME"),
            shown_default="random",
            ours=True,
            help="Unique name of this process within its role.",
            panel="Server",
            commands=(role,),
        )
        for role in ROLES
        if role != DURABLE
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
        Option(
            names=("--durable-id",),
            value=Text("NAME"),
            shown_default="random",
            ours=True,
            help="Name of the counters of a `weir durable` process. The gateway with the same name reports them as its "
            "own.",
            panel="Server",
            commands=(GATEWAY, DURABLE),
        ),
        switch(
            "--strict-readiness",
            True,
            "Report ready only when all models are ready.",
            panel="Server",
            commands=(SERVE, GATEWAY),
        ),
        Option(
            names=("--exit-timeout-secs",),
            value=Number(0),
            default=30.0,
            help="Time to finish running requests after a stop signal.",
            differs="Fractions of a second are accepted.",
            panel="Server",
            commands=_EVERYWHERE,
        ),
        switch(
            "--allow-client-shm",
            False,
            "Allow clients to pass tensors in shared memory of this host.",
            is_common=True,
            panel="Server",
            commands=(SERVE, GATEWAY, DURABLE, WORKER),
        ),
        Option(
            names=("--client-shm-prefix",),
            value=Text("NAME"),
            repeatable=True,
            help="With `--allow-client-shm`, allow only objects of system shared memory whose names begin with this; "
            "without it clients may name any object that the server may read and write; may be repeated.",
            panel="Server",
            commands=(SERVE, GATEWAY),
            ours=True,
        ),
        Option(
            names=("--gateway-memory-byte-size",),
            value=Integer(0, metavar="BYTES"),
            default=0,
            shown_default="512 MiB, or a quarter of what the container's memory leaves beside the process if that is less",
            help="Memory a gateway may use for request bodies and unread responses; beyond it requests are rejected "
            "with 503. One connection may use half of it, one client address three quarters. `weir serve` divides it "
            "among its gateways.",
            panel="Server",
            commands=(SERVE, GATEWAY, DURABLE),
            ours=True,
        ),
    )


def _cache() -> tuple[Option, ...]:
    return (
        Option(
            names=("--cache-config",),
            is_common=True,
            value=Checked("CACHE,KEY=VALUE", cache_setting),
            repeatable=True,
            help=(
                "Cache responses of models with `response_cache`: `local,size=BYTES` in each gateway, "
                "`nats,size=BYTES[,ttl=SECONDS]` in the message bus, shared by all gateways; may be repeated."
            ),
            differs="`nats` replaces `redis`, which is rejected.",
            panel="Response cache",
            commands=(SERVE, GATEWAY, DURABLE, WORKER),
        ),
    )


def _log() -> tuple[Option, ...]:
    panel: dict[str, Any] = {"panel": "Log", "commands": _EVERYWHERE}
    return (
        Option(
            names=("--log-verbose",),
            is_common=True,
            value=Verbosity(),
            default=0,
            bare="1",
            help="1 or more: log details.",
            **panel,
        ),
        switch("--log-info", True, "Log informational messages.", **panel),
        switch("--log-warning", True, "Log warnings.", **panel),
        switch("--log-error", True, "Log errors.", **panel),
        Option(
            names=("--log-format",),
            is_common=True,
            value=Choice(
                ("default", "ISO8601", "json"),
                "invalid argument for --log-format",
                exact=True,
                aliases={"text": "default"},
            ),
            default="default",
            help="default: one line per entry; ISO8601: the same with the date; json: one JSON object per line.",
            differs="json is Weir's own.",
            **panel,
        ),
        Option(
            names=("--log-file",),
            value=Text("FILE"),
            default="",
            shown_default="stderr",
            help="File to log to.",
            **panel,
        ),
    )


SERVER_OPTIONS: tuple[Option, ...] = (
    *BROKER_OPTIONS,
    *_server(),
    *_cache(),
    *_log(),
)
"""The options declared in this module."""


_OURS: dict[str, Any] = {"panel": "Overload and scaling", "commands": (SERVE, SCHEDULER), "ours": True}

SCALING_OPTIONS: tuple[Option, ...] = (
    Option(
        names=("--max-queue-wait-secs",),
        value=Number(0),
        default=0.0,
        help=(
            "Reject a live request at once if its estimated queue wait exceeds this; 0: never. A model's parameter "
            "`weir_max_queue_wait_us` overrides it."
        ),
        **_OURS,
    ),
    switch(
        "--scale-to-zero",
        False,
        "Accept requests for models that no worker serves any more; they wait until a worker serves the model again. "
        "Such models are remembered, across restarts too, until they are unloaded or have not been served for a week.",
        **_OURS,
    ),
    Option(
        names=("--scale-from-zero-patience-secs",),
        value=Number(0),
        default=30.0,
        help="Time a request waits while no worker serves its model, before it is rejected.",
        **_OURS,
    ),
)
"""The options declared in this module."""
