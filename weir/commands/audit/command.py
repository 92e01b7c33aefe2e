"""The command `weir audit`, as typer reads it."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from weir.commands.running_server import BrokerTarget, with_broker_options
from weir.commands.terminal import moment_of


@with_broker_options
def audit(  # noqa: PLR0913 - options of a command
    broker: BrokerTarget,
    since: Annotated[
        str, typer.Option(metavar="TIME", help="Only events from then on: 90s, 30m, 12h, 7d ago, or a time (ISO 8601).")
    ] = "",
    until: Annotated[str, typer.Option(metavar="TIME", help="Only events up to then, in the same forms.")] = "",
    denied: Annotated[bool, typer.Option("--denied", help="Only what was refused.")] = False,
    principal: Annotated[str, typer.Option(metavar="NAME", help="Only events of this principal.")] = "",
    model: Annotated[str, typer.Option(metavar="GLOB", help="Only events about models whose names match.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Show who did what, or tried to: the events that gateways have recorded, oldest first."""
    from weir.commands.audit.events import Wanted, run

    since_s = moment_of("--since", since) if since else 0.0
    until_s = moment_of("--until", until) if until else math.inf
    run(broker, Wanted(since_s, until_s, denied, principal, model), as_json)
