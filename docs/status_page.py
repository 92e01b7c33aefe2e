"""The generated parts of status.md: the fields of `weir status --json`, and what it prints of a real cluster.

`fields_of` makes the tables of any JSON object that is declared with pydantic.

`status_example.json` is what it said of three hosts (namespaces with host names and shared memory of their own).
"""

from __future__ import annotations

import io
import typing
from pathlib import Path
from types import UnionType

from pydantic import BaseModel
from rich.console import Console

from weir.cluster.status.snapshot import ADVICE, LEVELS, ClusterStatus
from weir.commands.status.display import WIDTH, print_status

EXAMPLE = Path(__file__).parent / "status_example.json"


def status_example() -> str:
    """The example as text."""
    out = io.StringIO()
    print_status(
        ClusterStatus.model_validate_json(EXAMPLE.read_text()), Console(file=out, width=WIDTH, highlight=False)
    )
    return f"```text\n{out.getvalue()}```"


def status_advice() -> str:
    """A table of the kinds of problems, with how grave they are and what to do."""
    rows = [f"| {kind} | {LEVELS[kind]} | {advice} |" for kind, advice in ADVICE.items()]
    return "\n".join(["| kind | level | what to do |", "|---|---|---|", *rows])


def status_fields() -> str:
    """The fields of `weir status --json`."""
    return fields_of(ClusterStatus)


def fields_of(whole: type[BaseModel]) -> str:
    """A table for each object, the whole first."""
    waiting: list[type[BaseModel]] = [whole]
    done, parts = set(), []
    while waiting:
        model = waiting.pop(0)
        if model in done:
            continue
        done.add(model)
        rows = []
        for name, field in model.model_fields.items():
            rows.append(f"| `{name}` | {_told(field.annotation)} | {field.description} |")
            waiting += _objects(field.annotation)
        title = "The whole" if model is whole else f"`{model.__name__}`"
        parts.append("\n".join([f"**{title}**\n", "| field | type | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


def _objects(kind: typing.Any) -> list[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [found for inner in typing.get_args(kind) for found in _objects(inner)]


def _told(kind: typing.Any) -> str:
    """A type in the words of JSON."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return f"list of {_told(inner[0])}"
    if origin is dict:
        return f"object of {_told(inner[1])} by name"
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in inner) if len(inner) <= 4 else "string"
    if origin is UnionType or origin is typing.Union:
        return " or ".join(map(_told, inner))
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"`{kind.__name__}`"
    return {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}[kind]
