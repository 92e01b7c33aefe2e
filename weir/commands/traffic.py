"""`weir traffic`: splits the requests of a model among its versions, over HTTP at any gateway."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from weir.errors import StartError
from weir.options.option import UsageError
from weir.running_server import DEFAULT_HTTP
from weir.terminal import SectionedCommand

if TYPE_CHECKING:
    from weir.commands.gateway_client import GatewayClient

traffic = typer.Typer(
    name="traffic",
    no_args_is_help=True,
    help="Split the requests of a model among its versions.",
)

Url = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="WEIR_URL",
        metavar="HOST:PORT",
        help=f"The server's HTTP address. Default: that of the weir serve on this machine, else {DEFAULT_HTTP}.",
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", metavar="FOLDER", help="Data folder of a weir serve on this machine, to select its server."
    ),
]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@traffic.command("set", cls=SectionedCommand)
def set_weights(  # noqa: PLR0913 - options of a command
    model: Model,
    weights: Annotated[
        list[str], typer.Argument(metavar="VERSION=WEIGHT...", help="Weights of versions, such as 1=90 2=10.")
    ],
    sticky: Annotated[
        str,
        typer.Option(
            metavar="SOURCE",
            help="header:NAME or parameter:NAME: requests with equal values there run on the same version.",
        ),
    ] = "",
    as_json: AsJson = False,
    url: Url = "",
    data_dir: DataDir = None,
) -> None:
    """Split the requests that name no version by weight. Replaces what was set before."""
    from schemas.config.traffic import TrafficRule, read_weights

    try:
        rule = TrafficRule(read_weights(" ".join(weights)), sticky)
    except ValueError as error:
        raise UsageError(str(error)) from error
    document = {"weights": {str(version): weight for version, weight in rule.weights.items()}, "sticky": rule.sticky}
    _show(request(url, data_dir, "PUT", _path(model), document), as_json)


@traffic.command(cls=SectionedCommand)
def show(model: Model, as_json: AsJson = False, url: Url = "", data_dir: DataDir = None) -> None:
    """Show how the requests of a model are split."""
    _show(request(url, data_dir, "GET", _path(model)), as_json)


@traffic.command(cls=SectionedCommand)
def clear(model: Model, as_json: AsJson = False, url: Url = "", data_dir: DataDir = None) -> None:
    """Remove what was set: the model's configuration applies, or the latest version gets all requests."""
    _show(request(url, data_dir, "DELETE", _path(model)), as_json)


def request(url: str, data_dir: Path | None, method: str, path: str, document: Any = None) -> dict[str, Any]:
    """The response of the server to one request, which says who makes it. Raises StartError with the reason."""
    from weir.commands.gateway_client import GatewayClient, call, client_of

    def make(address: str, hint: str = "") -> GatewayClient:
        return GatewayClient(address, hint, {"Weir-By": _author()})

    client = client_of(make, url, data_dir)
    return dict(call(client, client.request, method, path, document))


def _author() -> str:
    import getpass
    import socket

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user id has no name
        user = "unknown"
    return f"{user}@{socket.gethostname()}".encode("ascii", "replace").decode()


def _path(model: str) -> str:
    if not model:
        raise StartError("the name of the model is empty")
    return f"/v2/models/{quote(model, safe='')}/traffic"


def _show(shown: dict[str, Any], as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps(shown, indent=2))
        return
    sources = {"set": "set by an operator", "config": "from the model's configuration", "none": "no rule"}
    print(
        f"{shown['model']}: {sources[shown['source']]}" + (f", sticky by {shown['sticky']}" if shown["sticky"] else "")
    )
    if not shown["versions"]:
        print("  requests that name no version run on the latest one")
    for row in shown["versions"]:
        state = "" if row["ready"] else "  not ready: the other versions get its share"
        print(f"  version {row['version']:>4}  weight {row['weight']:g}  share {row['share']:6.1%}{state}")
