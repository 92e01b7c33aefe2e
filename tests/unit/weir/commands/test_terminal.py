"""Texts for terminals: one line each, and help that shows option names in full."""

import time

import pytest
import typer
from typer.testing import CliRunner

from weir.commands.terminal import SectionedCommand, moment_of, one_line
from weir.options import UsageError


def test_line_breaks_and_control_characters_leave_no_second_line() -> None:
    shown = one_line("first\r\n  second\x1b[31m\tthird")
    assert len(shown.splitlines()) == 1
    assert "\x1b" not in shown
    assert "first" in shown
    assert "second" in shown


def test_help_shows_long_names_in_full_under_their_panel() -> None:
    name = "--an-option-whose-name-is-longer-than-a-narrow-terminal"
    app = typer.Typer()

    @app.command(cls=SectionedCommand)
    def command(
        file: str = typer.Argument(help="The file."),
        long: str = typer.Option("", name, help="Long.", rich_help_panel="Names"),
    ) -> None:
        """Run it."""

    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "40"}).stdout
    assert name in shown
    assert shown.index("Arguments:") < shown.index("Names:") < shown.index(name)


def test_a_moment_is_a_time_ago_or_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 10_000.0)
    assert moment_of("--since", "1h") == 6_400.0
    assert moment_of("--since", "1970-01-01T00:01:40Z") == 100.0


@pytest.mark.parametrize("text", ["", "1", "yesterday", "-1h", "2026-13-01"])
def test_anything_else_is_no_moment(text: str) -> None:
    with pytest.raises(UsageError, match=r"--since takes 90s, 30m"):
        moment_of("--since", text)
