"""Output to terminals: help text of commands with many options, and texts from models, clients and hosts."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand

_ARGUMENTS, _OPTIONS = "Arguments", "Options"


class SectionedCommand(TyperCommand):
    """A typer command with plain help text: one section per panel, option names never cut.

    typer's own help is a table, which cuts names off in narrow terminals.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **{**settings, "rich_markup_mode": None})

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options by panel in declaration order."""
        sections: dict[str, list[tuple[str, str]]] = {_ARGUMENTS: []}
        for parameter in self.get_params(ctx):
            default = _ARGUMENTS if parameter.param_type_name == "argument" else _OPTIONS
            record = parameter.get_help_record(ctx)
            if record is not None:
                panel = getattr(parameter, "rich_help_panel", None) or default
                sections.setdefault(panel, []).append((_TYPE_NAME.sub("", record[0]), record[1]))
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


_TYPE_NAME = re.compile(r" <\S+>$")
"""What typer adds to an argument: the name of its type in Python."""

_LINE_BREAKS = re.compile(r"\s*[\r\n]\s*")


def one_line(text: str) -> str:
    """The text on one line: line breaks and the spaces around them become one space, and nothing steers the terminal.

    Other characters that are not printable become "?".
    """
    return "".join(ch if ch.isprintable() else "?" for ch in _LINE_BREAKS.sub(" ", text.strip()))
