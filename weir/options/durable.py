"""Options of durable requests and offline jobs. All are Weir's own: Triton has neither."""

from __future__ import annotations

from typing import Any

from weir.options.option import DURABLE, GATEWAY, SERVE, Option, switch
from weir.options.secret import Secret, has_identity
from weir.options.values import Checked, Integer, Number, Text, callback_prefix, tenant_limit, tenant_weight

_OURS: dict[str, Any] = {"panel": "Durable requests and jobs", "commands": (SERVE, GATEWAY, DURABLE), "ours": True}

_OF_VOLUME = "{}, or {} of the volume of the embedded nats-server if that is less"

DURABLE_OPTIONS: tuple[Option, ...] = (
    switch(
        "--durable-consumer",
        True,
        "Run durable requests and offline jobs in this process. Turn it off in gateways beside a `weir durable`.",
        panel=_OURS["panel"],
        commands=(GATEWAY,),
        ours=True,
    ),
    Option(
        names=("--queue-max-messages",),
        value=Integer(1, metavar="COUNT"),
        default=1_000_000,
        help="Maximum number of durable requests waiting for one model; further ones are rejected when published.",
        **_OURS,
    ),
    Option(
        names=("--queue-max-bytes",),
        value=Integer(1, metavar="BYTES"),
        shown_default=_OF_VOLUME.format("8 GiB", "two fifths"),
        help="Maximum size of all waiting durable requests; further ones are rejected when published. The broker reserves "
        "it.",
        **_OURS,
    ),
    Option(
        names=("--queue-max-age-secs",),
        value=Number(1),
        default=7 * 86400.0,
        help="Maximum time a durable request waits; after that it ends as expired.",
        **_OURS,
    ),
    Option(
        names=("--result-ttl-secs",),
        value=Number(1),
        default=86400.0,
        help="Time for which results of durable requests are kept.",
        **_OURS,
    ),
    Option(
        names=("--result-max-bytes",),
        value=Integer(1, metavar="BYTES"),
        shown_default=_OF_VOLUME.format("8 GiB", "two fifths"),
        help="Maximum size of all stored results; beyond it the oldest are deleted. The broker reserves it.",
        **_OURS,
    ),
    Option(
        names=("--dead-max-bytes",),
        value=Integer(1, metavar="BYTES"),
        shown_default=_OF_VOLUME.format("1 GiB", "a twentieth"),
        help="Maximum size of all dead letters; beyond it the oldest are deleted. The broker reserves it.",
        **_OURS,
    ),
    Option(
        names=("--durable-attempts",),
        value=Integer(1, metavar="COUNT"),
        default=5,
        help="Attempts for a durable request that fails with a temporary error, before it is dead-lettered.",
        **_OURS,
    ),
    Option(
        names=("--tenant-weight",),
        value=Checked("TENANT=WEIGHT", tenant_weight),
        repeatable=True,
        help="Scheduling weight of a tenant's durable requests (default 1 for each tenant); may be repeated.",
        **_OURS,
    ),
    Option(
        names=("--tenant-limit",),
        value=Checked("TENANT=COUNT", tenant_limit),
        repeatable=True,
        help="Maximum number of a tenant's durable requests waiting for one model (`*`: each other tenant); may be "
        "repeated.",
        **_OURS,
    ),
    Option(
        names=("--callback-allow",),
        value=Checked("URL", callback_prefix),
        repeatable=True,
        help="Allow callbacks to URLs that begin with this prefix; without it none are allowed; may be repeated.",
        **_OURS,
    ),
    Option(
        names=("--batch-root",),
        is_common=True,
        value=Text("FOLDER"),
        repeatable=True,
        field="batch_roots",
        help="Allow offline jobs to read and write files below this folder; without it none may; may be repeated.",
        **_OURS,
    ),
    Option(
        names=("--nats-monitor",),
        value=Secret(Text("URL"), has_identity),
        default="",
        shown_default="none",
        help="Monitoring URL of your NATS server. Weir checks there that it syncs before it acknowledges.",
        **_OURS,
    ),
)
"""The options declared in this module."""
