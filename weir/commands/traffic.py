"""`weir traffic`: splits the requests of a model among its versions, over HTTP at any gateway."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from weir.commands.completion import complete_model
from weir.commands.running_server import HttpUrl, LocalDataDir
from weir.commands.terminal import SectionedCommand, SectionedGroup, examples, print_json, seconds_of
from weir.errors import StartError
from weir.options.api_key import ApiKey
from weir.options.option import UsageError
from weir.schemas.core.names import model_path

if TYPE_CHECKING:
    from weir.commands.gateway_client import GatewayClient

traffic = typer.Typer(
    name="traffic",
    cls=SectionedGroup,
    no_args_is_help=True,
    help="Split the requests of a model among its versions.",
    epilog=examples("weir traffic set detector 1=90 2=10", "weir traffic show detector"),
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.", autocompletion=complete_model)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@traffic.command(
    "set",
    cls=SectionedCommand,
    epilog=examples("weir traffic set detector 1=90 2=10", "weir traffic set detector 1=1 2=1 --sticky=header:user-id"),
)
def set_weights(  # noqa: PLR0913 - options of a command
    model: Model,
    weights: Annotated[
        list[str], typer.Argument(metavar="VERSION=WEIGHT", help="Weights of versions, such as 1=90 2=10.")
    ],
    sticky: Annotated[
        str,
        typer.Option(
            metavar="SOURCE",
            help="header:NAME or parameter:NAME: requests with equal values there run on the same version.",
        ),
    ] = "",
    as_json: AsJson = False,
    url: HttpUrl = "",
    data_dir: LocalDataDir = None,
    api_key: ApiKey = "",
) -> None:
    """Split the requests that name no version by weight. Replaces what was set before."""
    from weir.schemas.config.traffic import TrafficRule, read_weights

    try:
        rule = TrafficRule(read_weights(" ".join(weights)), sticky)
    except ValueError as error:
        raise UsageError(str(error)) from error
    document = {"weights": {str(version): weight for version, weight in rule.weights.items()}, "sticky": rule.sticky}
    shown = request(url, data_dir, api_key, "PUT", _path(model), document)
    _show(shown, as_json)
    for row in shown["versions"]:
        if not row["ready"]:
            what = f"version {row['version']} of model '{model}' is not ready"
            typer.echo(f"warning: {what}: others get its share until it is loaded", err=True)


@traffic.command(
    cls=SectionedCommand,
    epilog=examples(
        "weir traffic show detector",
        "weir traffic show detector --json",
    ),
)
def show(
    model: Model, as_json: AsJson = False, url: HttpUrl = "", data_dir: LocalDataDir = None, api_key: ApiKey = ""
) -> None:
    """Show how the requests of a model are split."""
    _show(request(url, data_dir, api_key, "GET", _path(model)), as_json)


@traffic.command(cls=SectionedCommand, epilog=examples("weir traffic clear detector"))
def clear(
    model: Model, as_json: AsJson = False, url: HttpUrl = "", data_dir: LocalDataDir = None, api_key: ApiKey = ""
) -> None:
    """Remove what was set: the model's configuration applies, or the latest version gets all requests."""
    _show(request(url, data_dir, api_key, "DELETE", _path(model)), as_json)


@traffic.command(
    cls=SectionedCommand,
    epilog=examples(
        "weir traffic ramp detector 2 --over=30m",
        "weir traffic ramp detector 2 --over=12h --abort-if='error_rate>1%'",
    ),
)
def ramp(  # noqa: PLR0913 - options of a command
    model: Model,
    version: Annotated[int, typer.Argument(metavar="VERSION", min=1, help="The version whose share grows.")],
    over: Annotated[str, typer.Option(metavar="TIME", help="How long the ramp takes: 90s, 30m, 12h, 7d.")],
    to: Annotated[float, typer.Option(metavar="PERCENT", help="The share at the end.")] = 100.0,
    abort_if: Annotated[
        str,
        typer.Option(metavar="CONDITION", help="When to go back: error_rate>1%, p99>1.5x, p99>200ms, joined by 'or'."),
    ] = "",
    as_json: AsJson = False,
    url: HttpUrl = "",
    data_dir: LocalDataDir = None,
    api_key: ApiKey = "",
) -> None:
    """Raise the share of a version step by step, and go back when it is worse. The servers do it; this command returns."""
    document = {"version": version, "to": to, "over_s": seconds_of("--over", over), "abort_if": abort_if}
    _show(request(url, data_dir, api_key, "POST", f"{_path(model)}/ramp", document), as_json)


@traffic.command(
    cls=SectionedCommand,
    epilog=examples(
        "weir traffic shadow detector 2 --share=20 --compare",
        "weir traffic shadow detector 2 --share=0      # stop",
    ),
)
def shadow(  # noqa: PLR0913 - options of a command
    model: Model,
    version: Annotated[int, typer.Argument(metavar="VERSION", min=1, help="The version that runs the copies.")],
    share: Annotated[
        float, typer.Option(metavar="PERCENT", min=0.0, max=100.0, help="Share of live requests; 0 stops.")
    ],
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Compare the outputs with those of the live requests: weir traffic report."),
    ] = False,
    as_json: AsJson = False,
    url: HttpUrl = "",
    data_dir: LocalDataDir = None,
    api_key: ApiKey = "",
) -> None:
    """Run copies of live requests on a version, when it is idle, and drop or compare their outputs."""
    path = f"{_path(model)}/shadow"
    if share:
        document = {"version": version, "share": share, "compare": compare}
        _show(request(url, data_dir, api_key, "PUT", path, document), as_json)
    else:
        _show(request(url, data_dir, api_key, "DELETE", path), as_json)


@traffic.command(
    cls=SectionedCommand,
    epilog=examples(
        "weir traffic report detector",
        "weir traffic report detector --show=1",
    ),
)
def report(  # noqa: PLR0913 - options of a command
    model: Model,
    show: Annotated[
        int | None, typer.Option("--show", metavar="N", min=1, help="Show the Nth of the worst requests.")
    ] = None,
    as_json: AsJson = False,
    url: HttpUrl = "",
    data_dir: LocalDataDir = None,
    api_key: ApiKey = "",
) -> None:
    """Show how the outputs of copies differ from those of the live requests."""
    path = f"{_path(model)}/shadow"
    found = request(url, data_dir, api_key, "GET", path)
    if show is None:
        from weir.commands.gateway_client import option_of

        _print_report(found, as_json, option_of(url, data_dir))
        return
    if show > len(found["worst"]):
        raise StartError(f"model {model} has {len(found['worst'])} kept requests, so there is no number {show}")
    print_json(request(url, data_dir, api_key, "GET", f"{path}/{quote(found['worst'][show - 1]['sample'])}"))


def _print_report(found: dict[str, Any], as_json: bool, option: str) -> None:
    if as_json:
        print_json(found)
        return
    if not found["versions"]:
        hint = f"weir traffic shadow MODEL VERSION --share 20 --compare{option}"
        print(f"{found['model']}: no copies were compared: {hint}")
    for row in found["versions"]:
        print(
            f"{found['model']} version {row['version']}: {row['compared']} compared, {row['differing']} differ, "
            f"{row['mismatched']} can't be compared, {row['failed']} copies failed, {row['skipped']} skipped"
        )
        for name, output in row["outputs"].items():
            labels = ""
            if output["labels"]:
                labels = f"; {output['different_labels']} of {output['labels']} labels differ"
            print(
                f"  {name}: {output['differing']} of {output['values']} values differ, by up to "
                f"{float(output['largest_absolute']):.6g} ({float(output['largest_relative']):.4%}){labels}"
            )
    for number, worst in enumerate(found["worst"], 1):
        request_id = f", request {worst['request_id']}" if worst["request_id"] else ""
        print(f"  {number:>3}. version {worst['version']}{request_id}: {worst['difference']}")


def history(  # noqa: PLR0913 - options of a command
    model: Model,
    limit: Annotated[
        int, typer.Option(metavar="COUNT", min=1, max=1000, help="Maximum number of changes to list.")
    ] = 20,
    as_json: AsJson = False,
    url: HttpUrl = "",
    data_dir: LocalDataDir = None,
    api_key: ApiKey = "",
) -> None:
    """List the changes of a model, newest first: loads, unloads, traffic rules, ramps and rollbacks."""
    found = request(url, data_dir, api_key, "GET", f"{_model_path(model)}/history?limit={limit}")
    if as_json:
        print_json(found["changes"])
        return
    for change in found["changes"]:
        print(_change_line(change))
    if not found["changes"]:
        print(f"{model}: no changes are recorded")


def rollback(model: Model, url: HttpUrl = "", data_dir: LocalDataDir = None, api_key: ApiKey = "") -> None:
    """Undo the last change of a model that has not been undone."""
    found = request(url, data_dir, api_key, "POST", f"{_model_path(model)}/rollback")
    print(f"{model}: undone: {_change_line(found['undone'])}")
    for name, state in found["now"].items():
        print(f"{model}: now: {_STATES[name](state)}")


def _change_line(change: dict[str, Any]) -> str:
    import datetime

    at = datetime.datetime.fromtimestamp(change["at_ms"] / 1000).astimezone()
    what = change["kind"]
    if "undoes" in change:
        what += f" of {change['undoes']}"
    for name, show in _STATES.items():
        if f"{name}_after" in change:
            what += f": {show(change[f'{name}_before'])} -> {show(change[f'{name}_after'])}"
    by = f", by {change['by']}" if change.get("by") else ""
    notes = "".join(f", {change[field]}" for field in ("note", "error") if change.get(field))
    return f"{change['number']:>6}  {at:%Y-%m-%d %H:%M:%S}  {what}{notes}{by}"


def _traffic_text(state: dict[str, Any]) -> str:
    from weir.schemas.config.traffic import weights_text

    text = weights_text(state.get("weights", {})) or "no rule"
    return f"{text} ({state['sticky']})" if state.get("sticky") else text


def _load_text(state: dict[str, Any]) -> str:
    if not state.get("load"):
        return "not loaded"
    config = " with a configuration of its own" if state.get("config") or not state.get("is_kept", True) else ""
    files = f" with {state['files']} files" if state.get("files") else ""
    return f"loaded{config}{files}"


_STATES = {"traffic": _traffic_text, "load": _load_text}
"""How a state is printed, by its name in changes."""


def request(  # noqa: PLR0913 - the server, and the parts of a request
    url: str, data_dir: Path | None, api_key: str, method: str, path: str, document: Any = None
) -> dict[str, Any]:
    """The response of the server to one request, which says who makes it. Raises StartError with the reason."""
    from weir.commands.gateway_client import GatewayClient, call, client_of

    def make(address: str, hint: str = "") -> GatewayClient:
        return GatewayClient(address, hint, {"Weir-By": _author()})

    client = client_of(make, url, data_dir, api_key)
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
    return f"{_model_path(model)}/traffic"


def _model_path(model: str) -> str:
    if not model:
        raise StartError("the name of the model is empty")
    return model_path(model)


def _show(shown: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(shown)
        return
    sources = {"set": "set by an operator", "config": "from the model's configuration", "none": "no rule"}
    print(
        f"{shown['model']}: {sources[shown['source']]}" + (f", sticky by {shown['sticky']}" if shown["sticky"] else "")
    )
    if "ramp" in shown:
        found = shown["ramp"]
        print(
            f"  ramp of version {found['version']} to {found['to']:g} % over {found['over_s']:g} s: {found['state']}, "
            f"step {found['step']} of {found['steps']}" + (f": {found['reason']}" if found["reason"] else "")
        )
    if "shadow" in shown:
        compared = ", and are compared" if shown["shadow"]["compare"] else ""
        print(
            f"  copies of {shown['shadow']['share']:g} % of the live requests run on version "
            f"{shown['shadow']['version']}{compared}"
        )
    if not shown["versions"]:
        print("  requests that name no version run on the latest one")
    for row in shown["versions"]:
        state = "" if row["ready"] else "  not ready: the other versions get its share"
        print(f"  version {row['version']:>4}  weight {row['weight']:g}  share {row['share']:6.1%}{state}")
