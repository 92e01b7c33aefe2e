"""`weir status`: its command line; what it does is `weir.status`, imported when it is asked for."""

from __future__ import annotations

from typing import Annotated

import typer

from weir.named_broker import NamedBroker, asks_broker

BARE = {"--watch": "2"}
"""What an option means that stands without a value."""


@asks_broker
def status(
    broker: NamedBroker,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object (docs/status.md).")] = False,
    watch: Annotated[
        float | None,
        typer.Option(
            metavar="[SECONDS]", min=0.5, help="Go on until interrupted, and look so often (every 2 seconds)."
        ),
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Show all models, queues and processes.")] = False,
) -> None:
    """Show the whole cluster. The exit status says how it is: 0 healthy, 1 something needs a human, 2 unreachable."""
    from weir.status import watching

    raise typer.Exit(
        watching.watch(broker, watch, as_json, show_all) if watch else watching.show(broker, as_json, show_all)
    )
