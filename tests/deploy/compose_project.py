"""`ComposeProject`: a project of compose files, put together as `docker compose -f FIRST -f SECOND` puts it together.

As much of the merging and interpolation as the files in `compose/` use: mappings are joined, lists too but for commands and
health checks, `${NAME}`, `${NAME:-default}` and `${NAME:?error}` are filled in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
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
