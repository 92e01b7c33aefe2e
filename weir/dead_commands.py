"""`weir dead`: its command lines; what they do is `weir.dead_letters`, imported when one is run."""

from __future__ import annotations

from typing import Annotated

import typer

from weir.help import SectionedCommand
from weir.named_broker import NamedBroker, asks_broker
from weir.options import UsageError

dead = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Model = Annotated[str, typer.Option(metavar="NAME", help="Those of this model only.")]
Letters = Annotated[
    list[str] | None, typer.Argument(metavar="ID|SEQ", help="Which: by the request's id, or by sequence.")
]


@dead.callback()
def _dead() -> None:
    """Durable requests that could not be done: look at them, replay them, throw them away."""


@dead.command(name="list", cls=SectionedCommand)
@asks_broker
def list_letters(
    broker: NamedBroker,
    model: Model = "",
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="How many at most.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """List dead letters, the newest first."""
    from weir.dead_letters import list_letters as run

    run(broker, model, limit, as_json)


@dead.command(cls=SectionedCommand)
@asks_broker
def show(
    broker: NamedBroker,
    letter: Annotated[str, typer.Argument(metavar="ID|SEQ", help="Which: by the request's id, or by sequence.")],
) -> None:
    """Show one: why it is dead, what was tried, its headers and its body."""
    from weir.dead_letters import show as run

    run(broker, letter)


@dead.command(cls=SectionedCommand)
@asks_broker
def replay(
    broker: NamedBroker,
    letters: Letters = None,
    model: Model = "",
    all_letters: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    new_id: Annotated[
        bool, typer.Option("--new-id", help="Under the id <id>.r<seq>, for one whose id has ended otherwise.")
    ] = False,
) -> None:
    """Publish them again as they were, under their ids, without their deadlines; what was published is dead no more."""
    if [bool(letters), bool(model), all_letters].count(True) != 1:
        raise UsageError("name the letters, or --model NAME, or --all")
    from weir.dead_letters import replay as run

    if not run(broker, letters or (), model, new_id):
        raise typer.Exit(1)


@dead.command(cls=SectionedCommand)
@asks_broker
def purge(
    broker: NamedBroker,
    letters: Letters = None,
    model: Model = "",
    older_than: Annotated[
        str, typer.Option(metavar="TIME", help="Those that have been dead for longer: 30m, 12h, 7d.")
    ] = "",
    all_letters: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
) -> None:
    """Throw them away, with their bodies in the object store. Their results go on saying that they are dead."""
    if [bool(letters), bool(model or older_than), all_letters].count(True) != 1:
        raise UsageError("name the letters, or --model NAME, --older-than TIME or both, or --all")
    from weir.dead_letters import purge as run
    from weir.dead_letters import read_age_s

    run(broker, letters or (), model, read_age_s(older_than) if older_than else 0.0, yes)
