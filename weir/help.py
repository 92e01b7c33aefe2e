"""`SectionedCommand`: commands of many options, whose help shows each name in full, however narrow the terminal is."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

_ARGUMENTS, _OPTIONS = "Arguments", "Options"


class SectionedCommand(TyperCommand):
    """A command of typer's with plain help, a section for each of its options' panels.

    typer's own help is a table, which cuts names off in narrow terminals.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **{**settings, "rich_markup_mode": None})

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the arguments, then the options by panel, in the order in which they were declared."""
        sections: dict[str, list[tuple[str, str]]] = {_ARGUMENTS: []}
        for parameter in self.get_params(ctx):
            default = _ARGUMENTS if parameter.param_type_name == "argument" else _OPTIONS
            record = parameter.get_help_record(ctx)
            if record is not None:
                panel = getattr(parameter, "rich_help_panel", None) or default
                sections.setdefault(panel, []).append(record)
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
