"""Output to terminals: help text of commands, and texts from models, clients and hosts."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Any

from typer.core import TyperCommand, TyperGroup

from weir.options import UsageError

_ARGUMENTS, _OPTIONS, _COMMANDS = "Arguments", "Options", "Commands"


def examples(*lines: str) -> str:
    """The `epilog` of a command with these examples: command lines, shown as they are. "  # ..." explains one."""
    return "\n".join(lines)


class _PlainHelp:
    """Help without tables, which cut names off in narrow terminals: options by panel, then the examples.

    A base of commands and groups. typer would import rich and pydantic to show a table.
    """

    params: list[Any]
    epilog: str | None

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **{**settings, "rich_markup_mode": None})

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words behind the command's name in the line "Usage:"."""
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [_REQUIRED.sub(r"\1", piece) for piece in pieces]

    def panel_of(self, ctx: Any, parameter: Any) -> str | None:
        """The title of the section with this parameter; None to leave it out."""
        default = _ARGUMENTS if parameter.param_type_name == "argument" else _OPTIONS
        return getattr(parameter, "rich_help_panel", None) or default

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options by panel in declaration order; of a group also its commands."""
        sections: dict[str, list[tuple[str, str]]] = {_ARGUMENTS: []}
        for parameter in self.get_params(ctx):  # type: ignore[attr-defined]
            record, panel = parameter.get_help_record(ctx), self.panel_of(ctx, parameter)
            if record is not None and panel is not None:
                sections.setdefault(panel, []).append((_shown_name(record[0]), _shown_ranges(record[1])))
        _write_sections(sections, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples."""
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.splitlines():
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")


class SectionedCommand(_PlainHelp, TyperCommand):
    """A typer command with plain help text: one section per panel, option names never cut, examples at the end."""


class SectionedGroup(_PlainHelp, TyperGroup):
    """A typer group with plain help text: its commands by panel, each with its first sentence."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, then the commands."""
        super().format_options(ctx, formatter)
        sections: dict[str, list[tuple[str, str]]] = {_COMMANDS: []}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            panel = getattr(command, "rich_help_panel", None) or _COMMANDS
            sections.setdefault(panel, []).append((name, _first_sentence(command.help or "")))
        _write_sections(sections, formatter)


def _write_sections(sections: dict[str, list[tuple[str, str]]], formatter: Any) -> None:
    for title, rows in sections.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)


def _first_sentence(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split()).partition(". ")[0].removesuffix(".")


def _shown_name(name: str) -> str:
    """The name of a parameter as typer shows it, without the name of its type in Python, and with its choices."""
    return _TYPE_NAME.sub("", _CHOICES.sub(r" \1", name))


def _shown_ranges(text: str) -> str:
    """The help of a parameter, with "1 to 64" in the place of "1<=x<=64", and "1 or more" in that of "x>=1"."""
    return _AT_LEAST.sub(r"\1 or more", _RANGE.sub(r"\1 to \2", text))


_REQUIRED = re.compile(r"^\{(.*)\}")
"""typer's form of a required argument; all others stand in brackets."""

_CHOICES = re.compile(r" <(\S+\|\S+)>$")
_TYPE_NAME = re.compile(r" <[^<>]+>$")
"""What typer adds to a parameter without a metavar: its choices, or the name of its type in Python."""

_NUMBER = r"(-?\d+(?:\.\d*[1-9])?)(?:\.0)?"
_RANGE = re.compile(rf"\b{_NUMBER}<=x<={_NUMBER}")
_AT_LEAST = re.compile(rf"\bx>={_NUMBER}")

_LINE_BREAKS = re.compile(r"\s*[\r\n]\s*")


def one_line(text: str) -> str:
    """The text on one line: line breaks and the spaces around them become one space, and nothing steers the terminal.

    Other characters that are not printable become "?".
    """
    return "".join(ch if ch.isprintable() else "?" for ch in _LINE_BREAKS.sub(" ", text.strip()))


def print_json(document: Any) -> None:
    """Print a document, indented."""
    import json

    print(json.dumps(document, indent=2))


_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds_of(option: str, text: str) -> float:
    """The seconds in `90s`, `30m`, `12h` or `7d`, the value of `option`. Raises UsageError for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"{option} takes a number and a unit, as in 90s, 30m, 12h or 7d, not {text!r}")
    return float(match[1]) * _UNITS_S[match[2]]


def moment_of(option: str, text: str) -> float:
    """The time in Unix seconds that `30m` (that long ago) or an ISO 8601 time means; one without a zone is local time.

    Raises UsageError for any other text.
    """
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        pass
    try:
        return time.time() - seconds_of(option, text)
    except UsageError:
        raise UsageError(
            f"{option} takes 90s, 30m, 12h or 7d, that long ago, or a time as 2026-12-31T12:00:00Z, not {text!r}"
        ) from None
