"""`weir key` and `weir access check`: their arguments and options. What runs them is imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weir.access.policy.actions import Action
from weir.commands.completion import complete_model, matching
from weir.commands.running_server import BrokerChoice, only_local_server, with_broker_choice
from weir.commands.terminal import SectionedCommand, SectionedGroup, examples, seconds_of
from weir.options import UsageError

key = typer.Typer(
    name="key",
    cls=SectionedGroup,
    no_args_is_help=True,
    help="Make, list, revoke and replace the keys with which clients prove who they are.",
    epilog=examples("weir key create camera-7 --role=caller", "weir key list", "weir key revoke camera-7"),
)

access = typer.Typer(
    name="access",
    cls=SectionedGroup,
    no_args_is_help=True,
    help="Explain what the access policy lets a principal do.",
    epilog=examples("weir access check camera-7 infer detector", "weir access check --policy=access.yaml"),
)


@access.callback()
def _access() -> None:
    """Keeps `check` a command of its own; typer would make a lone command the group."""


File = Annotated[
    Path | None,
    typer.Option(
        "--file",
        metavar="FILE",
        help="The file of the keys, for servers with --access-keys. Default: that of the weir serve on this machine, else "
        "its message broker.",
    ),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the principal, for logs and limits.")]


@key.command(
    cls=SectionedCommand,
    epilog=examples(
        "weir key create camera-7 --role=caller",
        "weir key create ci --role=operator --expires=90d > ci.key",
        "weir key create camera-7 --role=caller --tenant=acme --file=keys.json",
    ),
)
@with_broker_choice
def create(  # noqa: PLR0913 - options of a command
    broker: BrokerChoice,
    name: Name,
    role: Annotated[list[str], typer.Option(metavar="ROLE", help="A role of the policy; may be repeated.")],
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Whose queues and stored results it shares.")] = "",
    expires: Annotated[
        str, typer.Option(metavar="TIME", help="When it expires: 12h, 90d. Default: it does not expire.")
    ] = "",
    file: File = None,
) -> None:
    """Make a key and print it, once: only its hash is kept."""
    from weir.commands.access.keys import create as run
    from weir.commands.access.stores import key_store

    lifetime_s = seconds_of("--expires", expires) if expires else 0.0
    run(key_store(broker, file), name, role, tenant, lifetime_s)


@key.command(name="list", cls=SectionedCommand, epilog=examples("weir key list", "weir key list --json"))
@with_broker_choice
def list_keys(
    broker: BrokerChoice,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    file: File = None,
) -> None:
    """List the keys: their ids, names, roles and times. A key itself can't be shown again."""
    from weir.commands.access.keys import list_keys as run
    from weir.commands.access.stores import key_store

    run(key_store(broker, file), as_json)


@key.command(cls=SectionedCommand, epilog=examples("weir key revoke camera-7", "weir key revoke 3f9c0a11d2"))
@with_broker_choice
def revoke(
    broker: BrokerChoice,
    name: Annotated[str, typer.Argument(metavar="NAME|ID", help="A key by its id, or all keys of a principal.")],
    file: File = None,
) -> None:
    """Revoke a key, or all keys of a principal. Every server refuses them within a second."""
    from weir.commands.access.keys import revoke as run
    from weir.commands.access.stores import key_store

    run(key_store(broker, file), name)


@key.command(
    cls=SectionedCommand, epilog=examples("weir key rotate camera-7", "weir key rotate ci --overlap=7d > ci.key")
)
@with_broker_choice
def rotate(
    broker: BrokerChoice,
    name: Name,
    overlap: Annotated[str, typer.Option(metavar="TIME", help="How long the old key stays valid: 10m, 7d.")] = "1h",
    file: File = None,
) -> None:
    """Make a second key with the roles of the valid one, and print it. The old one expires after a while."""
    from weir.commands.access.keys import rotate as run
    from weir.commands.access.stores import key_store

    run(key_store(broker, file), name, seconds_of("--overlap", overlap))


def _complete_action(incomplete: str) -> list[str]:
    return matching((action.value for action in Action), incomplete)


@access.command(
    cls=SectionedCommand,
    epilog=examples(
        "weir access check camera-7 infer detector",
        "weir access check @ci.key load --policy=access.yaml --file=keys.json",
        "weir access check anonymous health",
        "weir access check --policy=access.yaml      # is it valid?",
    ),
)
@with_broker_choice
def check(  # noqa: PLR0913 - options of a command
    broker: BrokerChoice,
    who: Annotated[
        str,
        typer.Argument(
            metavar="KEY", help="@FILE or -: a key or a token in a file or on stdin; a key's name or id; anonymous."
        ),
    ] = "",
    action: Annotated[
        str, typer.Argument(metavar="ACTION", help="An action of a policy.", autocompletion=_complete_action)
    ] = "",
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Name of the model.", autocompletion=complete_model)
    ] = "",
    version: Annotated[int, typer.Option(metavar="NUMBER", min=0, help="Version of the model; 0: all of them.")] = 0,
    policy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The policy. Default: that of the weir serve on this machine."),
    ] = None,
    file: File = None,
) -> None:
    """Explain a decision: the rule that allows it, or what is missing. Exit status: 0 allowed, 1 denied."""
    if who and not action:
        raise UsageError("name an action too, as in: weir access check camera-7 infer detector")
    if policy is None:
        if not who:
            raise UsageError("name a key and an action, or give --policy FILE to check a policy")
        server = only_local_server(broker.data_dir, "--policy FILE")
        if server is None:
            raise UsageError("no weir serve was found on this machine: give --policy FILE")
        if not server.access_policy:
            typer.echo("allowed: the server has no access policy")
            return
        policy = Path(server.access_policy)
    from weir.commands.access import check as checking

    if not who:
        checking.validate(policy)
        return
    from weir.commands.access.stores import key_store

    question = checking.Question(checking.action_of(action), model, str(version) if version else "")
    decider = checking.PolicyCheck(checking.read_policy(policy), policy.parent, lambda: key_store(broker, file).ring())
    raise typer.Exit(decider.run(who, question))
