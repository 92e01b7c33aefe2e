"""Options of how many processes `weir serve` runs of each role, and on which processors. All are Weir's own."""

from __future__ import annotations

from typing import Any

from weir.options.option import GATEWAY, SERVE, Option
from weir.options.values import Integer, IntegerOrAuto

_OURS: dict[str, Any] = {"panel": "Processes", "commands": (SERVE,), "ours": True}

MAX_PROCESSES = 64
"""The most processes of one role."""

_COUNT = IntegerOrAuto(1, MAX_PROCESSES)

PROCESS_OPTIONS: tuple[Option, ...] = (
    Option(
        names=("--gateways",),
        is_common=True,
        value=_COUNT,
        default=1,
        help="Number of gateways. They share the ports, and the first one serves the metrics of all. auto: one for each "
        "four processors.",
        **_OURS,
    ),
    Option(
        names=("--schedulers",),
        value=_COUNT,
        default=1,
        help="Number of schedulers. They share the queues of models. auto: one for each eight processors.",
        **_OURS,
    ),
    Option(
        names=("--workers",),
        is_common=True,
        value=_COUNT,
        shown_default="one for each GPU, else one",
        help="Number of workers. Each loads all models, with all their instances. With several GPUs it is 1, or at least "
        "the number of GPUs: those beyond it use none. auto: one for each GPU, else one for each four processors.",
        **_OURS,
    ),
    Option(
        names=("--worker-processors",),
        value=IntegerOrAuto(0, 1 << 13),
        default=0,
        help="Number of processors that only workers use, each worker its own; all other processes share the rest. auto: "
        "those that gateways, schedulers and nats-server leave; 0: all processes share all processors.",
        **_OURS,
    ),
    Option(
        names=("--gateway-number",),
        value=Integer(0, MAX_PROCESSES - 1, metavar="NUMBER"),
        default=0,
        help="The number of this gateway among those of one `weir serve`. Those after number 0 serve no metrics: they "
        "report their counters to the gateway of number 0 with the same --durable-id.",
        panel="Server",
        commands=(GATEWAY,),
        ours=True,
    ),
)
"""The options declared in this module."""
