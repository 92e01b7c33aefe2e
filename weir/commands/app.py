"""The `weir` command line: the typer application and the sub-commands with short command lines.

`weir status`, `push` and `dead` are declared here. What runs a command (`weir.commands.status`, `weir.commands.push`,
`weir.commands.serve`, …) is imported when it runs, so that other commands and every help start faster.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from weir import __version__
from weir.bus.naming.live_queues import MAX_LIVE_STREAMS
from weir.bus.naming.permissions import USERS, check_broker_users, nats_conf
from weir.commands import roles as role_commands
from weir.commands.access.command import access, key
from weir.commands.audit.command import audit
from weir.commands.batch_jobs.batch import batch
from weir.commands.completion import complete_model
from weir.commands.infer.command import infer
from weir.commands.init.command import init
from weir.commands.option_commands import OptionCommand, command, with_implied_values
from weir.commands.perf.command import perf
from weir.commands.roles import hide_secrets
from weir.commands.running_server import BrokerTarget, with_broker_options
from weir.commands.terminal import SectionedCommand, SectionedGroup, examples, seconds_of
from weir.commands.traffic import history, rollback, traffic
from weir.demo.command import PASSES_OPTIONS, demo
from weir.errors import StartError
from weir.options import BACKENDS, ROLES, SERVE, UsageError
from weir.options.platforms import platform_arguments
from weir.runtime.readiness import announce_failure

BARE = {"--watch": "2"}
"""The values of options given without one."""

OF_OPTION_TABLE = frozenset((SERVE, BACKENDS, *ROLES, demo.__name__))
"""Commands with options of the option table; `weir demo` passes them on. Others have options of the same names."""


def _serve(values: dict[str, Any]) -> None:
    from weir.commands.serve import serve

    serve(main, values)


def _backends(values: dict[str, Any]) -> None:
    from weir.commands.backends import backends

    backends(values)


@with_broker_options
def status(
    broker: BrokerTarget,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object (docs/status.md).")] = False,
    watch: Annotated[
        float | None,
        typer.Option(
            metavar="[SECONDS]", min=0.5, help="Repeat at this interval until interrupted (default 2 seconds)."
        ),
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Show all models, queues and processes.")] = False,
    nats_url: Annotated[
        bool,
        typer.Option(
            "--nats-url",
            help="Print only the URL of the broker, with the user and the password of the weir serve on this machine.",
        ),
    ] = False,
) -> None:
    """Show the state of the cluster. Exit status: 0 healthy, 1 warnings, 2 broker unreachable, 3 down."""
    if nats_url:
        typer.echo(broker.url_for_clients())
        return
    from weir.commands.status import watch as watching

    raise typer.Exit(
        watching.watch(broker, watch, as_json, show_all) if watch else watching.show(broker, as_json, show_all)
    )


def doctor(
    data_dir: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The data folder whose disk is measured. Default: that of weir serve."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check whether this machine has what Weir needs, and say what to do. Exit status: 1 if there is a problem, else 0."""
    from weir.commands.doctor.run import run

    raise typer.Exit(run(data_dir, as_json))


@with_broker_options
def top(
    broker: BrokerTarget,
    every: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.5, max=60.0, help="Interval of readings and of the display.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table and exit, as without a terminal.")] = False,
) -> None:
    """Show the load of all models, live: rates, latencies, queues, batches and utilization."""
    from weir.commands.top.run import run

    raise typer.Exit(run(broker, every, once))


DEFAULT_REPOSITORY = "models"
"""The default repository."""


@with_broker_options
def push(
    broker: BrokerTarget,
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="MODEL_DIR", help="Folders of models; a folder's name is the model's name."),
    ] = None,
    repository: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the repository; workers use it as nats://NAME.")
    ] = DEFAULT_REPOSITORY,
    delete: Annotated[
        list[str] | None, typer.Option(metavar="MODEL", help="Delete this model; may be repeated.")
    ] = None,
    list_models: Annotated[bool, typer.Option("--list", help="List the models in the repository.")] = False,
) -> None:
    """Store folders of models in NATS, for workers started with --model-repository=nats://NAME."""
    if not (folders or delete or list_models):
        raise UsageError("nothing to do: name a model folder, or give --delete MODEL or --list")
    from weir.commands.push import run

    run(broker, repository, folders or (), delete or (), list_models)


def nats_permissions(
    format: Annotated[
        str, typer.Option(metavar="FORMAT", help="nats-conf: a nats-server configuration file.")
    ] = "nats-conf",
    users: Annotated[
        list[str] | None,
        typer.Option(metavar="USER", help=f"One of {', '.join(USERS)}; may be repeated. Default: all."),
    ] = None,
    user: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Also a user of a client, who may publish requests on subjects of its own only, so that an access policy "
            "can name it (broker_users); may be repeated.",
        ),
    ] = None,
    live_streams: Annotated[
        int,
        typer.Option(metavar="COUNT", min=1, max=MAX_LIVE_STREAMS, help="That of --live-streams of the server."),
    ] = 1,
    repository: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A model repository in NATS; may be repeated. Default: models."),
    ] = None,
) -> None:
    """Print the users of a nats-server, with the minimal permissions that each role needs."""
    if format != "nats-conf":
        raise UsageError('Bad option: "--format". It must be nats-conf.')
    wanted = [name for given in users or USERS for name in given.split(",")]
    unknown = [user for user in wanted if user not in USERS]
    if unknown:
        raise UsageError(f'Bad option: "--users". Unknown user {unknown[0]}. Choose from: {", ".join(USERS)}.')
    try:
        check_broker_users(user or ())
    except ValueError as error:
        raise UsageError(f'Bad option: "--user". {error}.') from error
    typer.echo(nats_conf(wanted, live_streams, repository or ("models",), user or ()), nl=False)


dead = typer.Typer(
    cls=SectionedGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog=examples("weir dead list --model=detector", "weir dead show 17", "weir dead replay 17"),
)

Model = Annotated[
    str, typer.Option(metavar="NAME", help="Only dead letters of this model.", autocompletion=complete_model)
]
Letters = Annotated[
    list[str] | None, typer.Argument(metavar="ID|SEQ", help="Dead letter, by request id or by sequence number.")
]


@dead.callback()
def _dead() -> None:
    """List, show, replay or purge dead letters, which are durable requests that failed for good."""


@dead.command(
    name="list",
    cls=SectionedCommand,
    epilog=examples("weir dead list", "weir dead list --model=detector --limit=500 --json"),
)
@with_broker_options
def list_letters(
    broker: BrokerTarget,
    model: Model = "",
    limit: Annotated[int, typer.Option(metavar="COUNT", min=1, max=100_000, help="Maximum number to list.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """List dead letters, newest first."""
    from weir.commands.dead_letters import list_letters as run

    run(broker, model, limit, as_json)


@dead.command(cls=SectionedCommand, epilog=examples("weir dead show 17", "weir dead show order-4711"))
@with_broker_options
def show(
    broker: BrokerTarget,
    letter: Annotated[str, typer.Argument(metavar="ID|SEQ", help="Dead letter, by request id or by sequence number.")],
) -> None:
    """Show one dead letter: its reason, attempts, headers and body."""
    from weir.commands.dead_letters import show as run

    run(broker, letter)


@dead.command(
    cls=SectionedCommand,
    epilog=examples("weir dead replay 17 18", "weir dead replay --model=detector", "weir dead replay --all"),
)
@with_broker_options
def replay(
    broker: BrokerTarget,
    letters: Letters = None,
    model: Model = "",
    all_letters: Annotated[bool, typer.Option("--all", help="All dead letters.")] = False,
    new_id: Annotated[
        bool, typer.Option("--new-id", help="Use the new id <id>.r<seq>, for requests whose id has another result.")
    ] = False,
) -> None:
    """Publish dead letters again, with their ids and without their deadlines, and remove them from the dead letters."""
    if [bool(letters), bool(model), all_letters].count(True) != 1:
        raise UsageError("name the dead letters, or give --model NAME or --all")
    from weir.commands.dead_letters import replay as run

    if not run(broker, letters or (), model, new_id):
        raise typer.Exit(1)


@dead.command(
    cls=SectionedCommand,
    epilog=examples("weir dead purge 17", "weir dead purge --model=detector --older-than=7d --yes"),
)
@with_broker_options
def purge(  # noqa: PLR0913 - options of a command
    broker: BrokerTarget,
    letters: Letters = None,
    model: Model = "",
    older_than: Annotated[
        str, typer.Option(metavar="TIME", help="Only dead letters older than this: 30m, 12h, 7d.")
    ] = "",
    all_letters: Annotated[bool, typer.Option("--all", help="All dead letters.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete dead letters and their bodies in the object store. Their result records remain."""
    if [bool(letters), bool(model or older_than), all_letters].count(True) != 1:
        raise UsageError("name the dead letters, or give --model NAME, --older-than TIME or both, or --all")
    from weir.commands.dead_letters import purge as run

    age_s = seconds_of("--older-than", older_than) if older_than else 0.0
    run(broker, letters or (), model, age_s, yes)


app = typer.Typer(
    name="weir",
    cls=SectionedGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=examples(
        "weir init detector.onnx      # make models/detector from an ONNX file",
        "weir serve models            # serve it, and open http://localhost:8080",
        "weir infer detector          # send it a request, and print the response",
    ),
)
app.command(
    cls=OptionCommand,
    epilog=examples("weir serve models", "weir serve models --http-address=0.0.0.0 --model-control-mode=poll"),
)(
    command(
        SERVE,
        "Serve the models of a folder, a Triton model repository, over HTTP, gRPC and NATS, with a console.",
        _serve,
        positional="model_repository",
    )
)
app.command(cls=OptionCommand, epilog=examples("weir backends", "weir backends --backend-directory=backends --json"))(
    command(BACKENDS, "List the backends, what each can run on this machine, and why not the rest.", _backends)
)
for _role in ROLES:
    app.command(cls=OptionCommand, rich_help_panel="One role alone", epilog=role_commands.EXAMPLES[_role])(
        command(_role, role_commands.HELP[_role], functools.partial(role_commands.run_role, _role))
    )
app.command(
    cls=SectionedCommand,
    epilog=examples(
        "weir init detector.onnx",
        "weir init classifier.pt --input=x:FP32:-1,4 --repository=/srv/models",
        "weir init --template=python --name=greeter",
    ),
)(init)
app.command(
    cls=SectionedCommand,
    epilog=examples(
        "weir infer detector",
        "weir infer translator --input 'TEXT=Guten Tag' --input BEAMS=4",
        "weir infer detector --data=models/detector/sample.json --json",
    ),
)(infer)
app.command(
    cls=SectionedCommand,
    epilog=examples(
        "weir push models/detector",
        "weir push --repository=staging models/detector models/classifier",
        "weir push --list",
    ),
)(push)
app.command(
    cls=SectionedCommand,
    epilog=examples("weir status", "weir status --watch 5 --all", "weir status --json"),
)(status)
app.command(cls=SectionedCommand, epilog=examples("weir top", "weir top --once", "weir top --every=5"))(top)
app.command(
    cls=SectionedCommand,
    epilog=examples(
        "weir perf detector --concurrency=1,8,64",
        "weir perf detector --rate=100:1000:100 --batch-size=4 --json",
        "weir perf detector --protocol=grpc --shape=IMAGE:3,224,224",
    ),
)(perf)
app.command(
    cls=SectionedCommand,
    epilog=examples(
        "weir audit --since=1h --denied",
        "weir audit --principal=alice --model='resnet*' --json",
    ),
)(audit)
app.command(cls=SectionedCommand, epilog=examples("weir doctor", "weir doctor --json"))(doctor)
app.command(
    cls=SectionedCommand,
    epilog=examples(
        "weir nats-permissions > weir.conf      # for the configuration of nats-server",
        "weir nats-permissions --users=producer,admin",
        "weir nats-permissions --user=camera-7 --user=orders   # of a policy",
    ),
)(nats_permissions)
app.command(
    cls=SectionedCommand,
    context_settings=PASSES_OPTIONS,
    epilog=examples("weir demo", "weir demo --serve --http-port=9000"),
)(demo)
app.add_typer(batch)
app.add_typer(dead, name="dead")
app.add_typer(traffic)
app.add_typer(key)
app.add_typer(access)
app.command(cls=SectionedCommand, epilog=examples("weir history detector", "weir history detector --limit=100 --json"))(
    history
)
app.command(cls=SectionedCommand, epilog=examples("weir rollback detector"))(rollback)


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
    """Weir serves Triton model repositories to Triton clients, with a durable queue between clients and models."""


def with_all_values(arguments: Sequence[str]) -> list[str]:
    """The command line with the implied value added to each option that may be given without one."""
    if arguments[:1] == [status.__name__]:
        return with_implied_values(arguments, BARE)
    return with_implied_values(arguments) if arguments and arguments[0] in OF_OPTION_TABLE else list(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. Exit statuses: 0 success, 1 start failed or stop forced, 2 wrong usage, 3 too many restarts."""
    hide_secrets()
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        given = with_all_values(given)
        if given[:1] == [SERVE]:
            given[1:1] = platform_arguments(os.environ)
        app(given, prog_name="weir")
    except (StartError, UsageError) as error:
        announce_failure(str(error))
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, StartError) else 2)
