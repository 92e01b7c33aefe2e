"""Options of overload and of scaling to zero: Weir's own, for Triton's workers are never away."""

from __future__ import annotations

from typing import Any

from weir.options.option import SCHEDULER, SERVE, Option, switch
from weir.options.values import Number

_OURS: dict[str, Any] = {"panel": "Overload and scaling", "commands": (SERVE, SCHEDULER), "ours": True}

SCALING_OPTIONS: tuple[Option, ...] = (
    Option(
        names=("--max-queue-wait-secs",),
        value=Number(0),
        default=0.0,
        help=(
            "Refuse live requests at once that would wait in the queue for longer; 0 for never. A model's parameter "
            "`weir_max_queue_wait_us` holds instead."
        ),
        **_OURS,
    ),
    switch(
        "--scale-to-zero",
        False,
        "Take requests for models whose workers have all gone: they wait until one is back. Such models stay known, also "
        "when everything is restarted, until they are unloaded or nobody has served them for a week.",
        _OURS["panel"],
        _OURS["commands"],
        ours=True,
    ),
    Option(
        names=("--scale-from-zero-patience-secs",),
        value=Number(0),
        default=30.0,
        help="How long a request waits while no worker serves its model, before it is refused.",
        **_OURS,
    ),
)
"""Those of this module."""
