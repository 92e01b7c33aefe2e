"""Options of durable requests and offline jobs: Weir's own, for Triton has neither."""

from __future__ import annotations

from typing import Any

from weir.options.forms import callback_prefix, tenant_limit, tenant_weight
from weir.options.option import GATEWAY, SERVE, Option
from weir.options.values import Checked, Integer, Number, Text

_OURS: dict[str, Any] = {"panel": "Durable requests and jobs", "commands": (SERVE, GATEWAY), "ours": True}

DURABLE_OPTIONS: tuple[Option, ...] = (
    Option(
        names=("--queue-max-messages",),
        value=Integer(1, metavar="COUNT"),
        default=1_000_000,
        help="Durable requests that may wait for one model; more are refused as they are published.",
        **_OURS,
    ),
    Option(
        names=("--queue-max-bytes",),
        value=Integer(1, metavar="BYTES"),
        default=8 << 30,
        help="Bytes of all durable requests that wait; more are refused as they are published.",
        **_OURS,
    ),
    Option(
        names=("--queue-max-age-secs",),
        value=Number(1),
        default=7 * 86400.0,
        help="Durable requests that have waited for longer end as expired.",
        **_OURS,
    ),
    Option(
        names=("--result-ttl-secs",),
        value=Number(1),
        default=86400.0,
        help="How long results of durable requests are kept.",
        **_OURS,
    ),
    Option(
        names=("--result-max-bytes",),
        value=Integer(1, metavar="BYTES"),
        default=8 << 30,
        help="Bytes of results that are kept; beyond it the oldest go.",
        **_OURS,
    ),
    Option(
        names=("--durable-attempts",),
        value=Integer(1, metavar="COUNT"),
        default=5,
        help="How often a durable request is begun that fails in a way that may pass, before it is dead-lettered.",
        **_OURS,
    ),
    Option(
        names=("--tenant-weight",),
        value=Checked("TENANT=WEIGHT", tenant_weight),
        repeatable=True,
        help="Share of a tenant's durable requests beside that of others, which is 1; may be repeated.",
        **_OURS,
    ),
    Option(
        names=("--tenant-limit",),
        value=Checked("TENANT=COUNT", tenant_limit),
        repeatable=True,
        help="Durable requests of a tenant (`*`: of each that is not named) that may wait for one model; may be repeated.",
        **_OURS,
    ),
    Option(
        names=("--callback-allow",),
        value=Checked("URL", callback_prefix),
        repeatable=True,
        help="Let answers be posted to URLs that begin with this one; without it to none; may be repeated.",
        **_OURS,
    ),
    Option(
        names=("--batch-root",),
        value=Text("FOLDER"),
        repeatable=True,
        field="batch_roots",
        help="Let offline jobs read and write files below this folder; without it they can't; may be repeated.",
        **_OURS,
    ),
    Option(
        names=("--nats-monitor",),
        value=Text("URL"),
        default="",
        shown_default="none",
        help="Monitoring URL of your NATS server, by which it is found out whether it syncs before it acknowledges.",
        **_OURS,
    ),
)
"""Those of this module."""
