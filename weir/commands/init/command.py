"""The command line of `weir init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weir.options import UsageError

_TENSOR = "NAME:DATATYPE:DIMS"


def init(  # noqa: PLR0913 - options of a command
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="An ONNX model, TorchScript, torch.export, AOTInductor or TensorRT plan."),
    ] = None,
    template: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Instead of FILE: python (a Python model) or backend (a backend of your own)."
        ),
    ] = "",
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the model. Default: that of the file.")] = "",
    repository: Annotated[
        Path, typer.Option(metavar="DIR", help="Model repository in which the folder is made.")
    ] = Path("models"),
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar=_TENSOR,
            help="An input, for TorchScript and AOTInductor, such as x:FP32:-1,4; may be repeated.",
        ),
    ] = None,
    outputs: Annotated[
        list[str] | None,
        typer.Option(
            "--output", metavar=_TENSOR, help="An output. Default: found by running the model; may be repeated."
        ),
    ] = None,
    max_batch_size: Annotated[
        int | None,
        typer.Option(metavar="COUNT", min=0, max=2**31 - 1, help="Largest batch, 0 for none. Default: from the file."),
    ] = None,
    link: Annotated[bool, typer.Option("--link", help="Make a hard link to the file instead of a copy.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the files of a model that exists.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing, and print what would be written.")] = False,
) -> None:
    """Make the folder of a model from its file: configuration, sample request, ready to serve."""
    from weir.commands.init.making import TEMPLATES, InitRequest, make
    from weir.commands.init.reading import GivenTensors, given_tensor

    if bool(file) == bool(template):
        raise UsageError("name the model's file, or give --template " + " or --template ".join(TEMPLATES))
    if template and template not in TEMPLATES:
        raise UsageError(f'Bad option: "--template". It must be one of {", ".join(TEMPLATES)}, not {template!r}.')
    if template and (inputs or outputs or link):
        raise UsageError("--template takes no --input, --output and --link: its files are yours to edit")
    given = GivenTensors(
        [given_tensor("--input", text) for text in inputs or ()],
        [given_tensor("--output", text) for text in outputs or ()],
    )
    request = InitRequest(
        file=file,
        template=template,
        name=name,
        repository=repository,
        given=given,
        max_batch_size=max_batch_size,
        links=link,
        replaces=force,
        is_dry=dry_run,
    )
    for line in make(request):
        typer.echo(line)
