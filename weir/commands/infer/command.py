"""The command line of `weir infer`."""

from __future__ import annotations

from typing import Annotated

import typer

from weir.commands.completion import complete_model
from weir.commands.running_server import HttpUrl, LocalDataDir
from weir.options import UsageError
from weir.options.api_key import ApiKey


def infer(  # noqa: PLR0913 - options of a command
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.", autocompletion=complete_model)],
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="NAME=VALUE",
            help="An input: text, a number, or JSON such as [1,2] or [[1,2],[3,4]]; may be repeated. The other inputs are "
            "made up.",
        ),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="Send this KServe request in JSON, such as a sample.json of weir init; - is stdin."
        ),
    ] = "",
    version: Annotated[
        str, typer.Option(metavar="NUMBER", help="Version of the model. Default: the server's choice.")
    ] = "",
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Longest wait for a part of the response.")
    ] = 60.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each response as one line of JSON, with all values.")
    ] = False,
    url: HttpUrl = "",
    data_dir: LocalDataDir = None,
    api_key: ApiKey = "",
) -> None:
    """Send a request to a model and print the response, or each response of a decoupled model.

    The server may be Weir or Triton. Exit status: 0 the model answered, 1 it did not, 2 wrong usage.
    """
    if inputs and data:
        raise UsageError("--input and --data exclude each other")
    if version and not (version.isascii() and version.isdecimal()):
        raise UsageError(f"--version must be a number, not {version!r}")
    from weir.commands.infer.run import InferOptions, run

    run(InferOptions(model, version, tuple(inputs or ()), data, timeout, as_json), url, data_dir, api_key)
