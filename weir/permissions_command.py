"""`weir nats-permissions`: what each role may do at a nats-server, as that server's configuration."""

from __future__ import annotations

from typing import Annotated

import typer

from bus.live_layout import MAX_LIVE_STREAMS
from bus.permissions import USERS, nats_conf
from weir.options import UsageError


def nats_permissions(
    format: Annotated[
        str, typer.Option(metavar="FORMAT", help="nats-conf: the configuration of nats-server.")
    ] = "nats-conf",
    users: Annotated[
        list[str] | None, typer.Option(metavar="USER", help=f"Of {', '.join(USERS)}; may be repeated. Without: all.")
    ] = None,
    live_streams: Annotated[
        int, typer.Option(min=1, max=MAX_LIVE_STREAMS, help="How many streams of live requests there are.")
    ] = 1,
    repository: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A model repository in NATS; may be repeated. Without: models."),
    ] = None,
) -> None:
    """Print the users of nats-server with what each role must be allowed, and nothing else."""
    if format != "nats-conf":
        raise UsageError('Bad option: "--format". it must be nats-conf')
    wanted = [name for given in users or USERS for name in given.split(",")]
    unknown = [user for user in wanted if user not in USERS]
    if unknown:
        raise UsageError(f'Bad option: "--users". there is no user {unknown[0]}; there are {", ".join(USERS)}')
    typer.echo(nats_conf(wanted, live_streams, repository or ("models",)), nl=False)
