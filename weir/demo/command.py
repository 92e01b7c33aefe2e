"""The command `weir demo`. What it runs is imported with it, because it needs the extra `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEMO_FOLDER = Path(".weir/demo")
"""The default folder of what the demo makes, relative to the current folder."""

PASSES_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""The settings of the typer command: it passes options that it does not have on to `weir serve`."""


def demo(
    ctx: typer.Context,
    serve: Annotated[
        bool,
        typer.Option(
            "--serve", help="Serve the models on ports 8000, 8001, 8002 and 4222 until Ctrl-C, and do no more."
        ),
    ] = False,
    folder: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where the model repository, the log and the data folder are made.")
    ] = DEMO_FOLDER,
    seconds: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="Length of each measurement.")] = 3.5,
) -> None:
    """Classify files, hear speech and read a picture with real networks, show what batches give, and kill a worker.

    Needs the extra 'demo': pip install 'weir-serve[demo]'. Further options are passed on to weir serve.
    """
    from weir.demo.networks import check_extra

    check_extra()
    if serve:
        from weir.demo.serve import serve as run

        run(folder, ctx.args)
    else:
        from weir.demo.show import show

        show(folder, seconds, ctx.args)
