"""The `weir` command: its sub-commands, and how it ends when it can't start."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from telemetry.readiness import announce_failure
from weir import __version__, backends_command, role_commands, serve_command
from weir.batch_commands import batch
from weir.commands import command, with_implied_values
from weir.dead_commands import dead
from weir.help import SectionedCommand
from weir.hidden_secrets import hide_secrets
from weir.options import BACKENDS, ROLES, SERVE, UsageError
from weir.permissions_command import nats_permissions
from weir.push_command import push
from weir.start_error import StartError
from weir.status_command import BARE, status

app = typer.Typer(name="weir", no_args_is_help=True, pretty_exceptions_enable=False)
app.command(cls=SectionedCommand)(command(SERVE, serve_command.HELP, lambda values: serve_command.serve(main, values)))
app.command(cls=SectionedCommand)(command(BACKENDS, backends_command.HELP, backends_command.backends))
for _role in ROLES:
    app.command(cls=SectionedCommand, rich_help_panel="One role alone")(
        command(_role, role_commands.HELP[_role], functools.partial(role_commands.run_role, _role))
    )
app.command(cls=SectionedCommand)(push)
app.command(cls=SectionedCommand)(status)
app.command(cls=SectionedCommand)(nats_permissions)
app.add_typer(batch)
app.add_typer(dead, name="dead")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weir {__version__}")
        raise typer.Exit


@app.callback()
def _weir(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Weir serves Triton model repositories to Triton clients, with a durable queue in between."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, then exit: 0 done, 1 not started or stopped by force, 2 wrong usage, 3 died too often."""
    hide_secrets()
    typed = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # The options of `weir batch` are not those of the table, though one is called the same.
        if typed[:1] == [status.__name__]:
            typed = with_implied_values(typed, BARE)
        elif typed[:1] != [batch.info.name]:
            typed = with_implied_values(typed)
        app(typed, prog_name="weir")
    except (StartError, UsageError) as error:
        announce_failure(str(error))
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, StartError) else 2)
