"""`weir status`: its command line; what it does is `weir.status`, imported when it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weir.named_broker import NamedBroker, asks_some_broker
from weir.options import UsageError
from weir.status.local_servers import data_home, local_servers

DEFAULT_URL = "nats://localhost:4222"
BARE = {"--watch": "2"}
"""What an option means that stands without a value."""


@asks_some_broker(f"that of a weir serve on this machine, else {DEFAULT_URL}")
def status(
    broker: NamedBroker,
    data_dir: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The data folder of a weir serve on this machine.")
    ] = None,
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
    url, said = _find(broker.url, data_dir)
    broker = broker._replace(url=url)
    from weir.status import watching

    code = watching.watch(broker, watch, as_json, show_all) if watch else watching.show(broker, as_json, show_all)
    if code == watching.UNREACHABLE and said:
        typer.echo(said, err=True)
    raise typer.Exit(code)


def _find(nats: str, data_dir: Path | None) -> tuple[str, str]:
    """The URL to ask, and what is to be said where nobody answers there."""
    if nats and data_dir is None:
        return nats, ""
    found = local_servers(data_dir)
    if len(found) == 1:
        return next(iter(found.values())), ""
    if len(found) > 1:
        told = ", ".join(f"--data-dir {folder}" for folder in found)
        raise UsageError(f"several servers of weir serve run here: choose one by {told}, or by --nats URL")
    if data_dir is not None:
        raise UsageError(f"no server of weir serve runs with data folder {data_dir}")
    return DEFAULT_URL, (
        f"No server of weir serve keeps its data below {data_home()}, so {DEFAULT_URL} was asked. A server that runs with "
        "another --data-dir, or with --http-port 0, tells its NATS URL when it starts: name it with --nats URL."
    )
