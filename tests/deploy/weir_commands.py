"""Whether command lines of manifests are such that Weir takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer.main

from weir.cli import app
from weir.commands import read_values, with_implied_values
from weir.options import UsageError, options_of

_WRONG_USAGE = typer.BadParameter.__mro__[1]
"""What typer raises for a command line that it doesn't take."""


def refusal(arguments: Sequence[str]) -> str | None:
    """What `weir ARGUMENTS` would be refused with before it does anything; None if it would be run."""
    name, *given = with_implied_values(list(arguments))
    group: Any = typer.main.get_command(app)
    command = group.commands.get(name)
    if command is None:
        return f"there is no `weir {name}`"
    try:
        context = command.make_context(name, given)
        read_values(options_of(name), context.params)
    except (_WRONG_USAGE, UsageError) as error:  # type: ignore[misc]
        return str(error)
    return None
