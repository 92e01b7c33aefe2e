"""`ComposeProject`: a compose project merged as by `docker compose -f FIRST -f SECOND`, and checks of its commands.

It implements the merging and interpolation that the files in `compose/` use: mappings are merged, lists too except for
commands and health checks, and `${NAME}`, `${NAME:-default}` and `${NAME:?error}` are interpolated. `rejection` parses
a command line of a manifest with Weir's own parser.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import typer.main
import yaml

from weir.commands.app import app
from weir.commands.option_commands import read_values, with_implied_values
from weir.options import UsageError, options_of

ROOT = Path(__file__).parents[3]
COMPOSE = ROOT / "compose"

PROJECTS = {
    "one machine": ("compose.yaml",),
    "one machine with GPUs": ("compose.yaml", "gpu.yaml"),
    "one machine, watched": ("compose.yaml", "monitoring.yaml"),
    "roles apart": ("roles.yaml",),
    "roles apart, watched": ("roles.yaml", "monitoring.yaml"),
}
"""What the files are meant to be used as."""

_REPLACED = {"command", "entrypoint", "test"}
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


class ComposeProject:
    """`files` in `compose/`, with `environment` for their variables. `document` is all of it."""

    def __init__(self, files: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self.document: dict[str, Any] = {}
        for name in files:
            with (COMPOSE / name).open() as file:
                read = yaml.safe_load(file)
            self.document = _merged(self.document, filled_in(read, environment))

    @property
    def services(self) -> dict[str, dict[str, Any]]:
        """The services by name."""
        return self.document["services"]


class Mount(NamedTuple):
    """One entry of `volumes` of a service: what is mounted, and where."""

    source: str
    target: str

    @classmethod
    def of(cls, entry: str | Mapping[str, Any]) -> Mount:
        """Of the short syntax or the long one."""
        if isinstance(entry, str):
            return cls(*entry.split(":")[:2])
        return cls(entry["source"], entry["target"])


def example_environment() -> dict[str, str]:
    """What `compose/example.env` sets."""
    lines = (COMPOSE / "example.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def filled_in(value: Any, environment: Mapping[str, str]) -> Any:
    """`value` with variables in the place of their names. Raises KeyError for one that must be set and isn't."""
    if isinstance(value, dict):
        return {key: filled_in(item, environment) for key, item in value.items()}
    if isinstance(value, list):
        return [filled_in(item, environment) for item in value]
    if not isinstance(value, str):
        return value

    def one(found: re.Match[str]) -> str:
        name, kind, text = found.groups()
        if environment.get(name):
            return environment[name]
        if kind == "-":
            return text
        raise KeyError(f"{name}: {text}")

    return _VARIABLE.sub(one, value)


def _merged(first: Any, second: Any, key: str = "") -> Any:
    if isinstance(first, dict) and isinstance(second, dict):
        return {name: _merged(first.get(name), second.get(name), name) for name in {**first, **second}}
    if isinstance(first, list) and isinstance(second, list) and key not in _REPLACED:
        return first + [item for item in second if item not in first]
    return first if second is None else second


_WRONG_USAGE = typer.BadParameter.__mro__[1]
"""What typer raises for a command line that it doesn't take."""


def rejection(arguments: Sequence[str]) -> str | None:
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
