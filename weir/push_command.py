"""`weir push`: its command line; what it does is `weir.pushing`, imported when it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weir.named_broker import NamedBroker, asks_broker
from weir.options import UsageError

DEFAULT_REPOSITORY = "models"
"""The repository that is meant where none is named."""


@asks_broker
def push(
    broker: NamedBroker,
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[MODEL_DIR]...", help="Folders of models, named as the models are.")
    ] = None,
    repository: Annotated[
        str, typer.Option(metavar="NAME", help="The repository, which workers know as nats://NAME.")
    ] = DEFAULT_REPOSITORY,
    delete: Annotated[
        list[str] | None, typer.Option(metavar="MODEL", help="Delete this model; may be repeated.")
    ] = None,
    list_models: Annotated[bool, typer.Option("--list", help="List the models that are there.")] = False,
) -> None:
    """Put folders of models into NATS, for workers that are started with --model-repository=nats://NAME."""
    if not (folders or delete or list_models):
        raise UsageError("there is nothing to do: name a folder of a model, --delete MODEL, or --list")
    from weir.pushing import run

    run(broker, repository, folders or (), delete or (), list_models)
