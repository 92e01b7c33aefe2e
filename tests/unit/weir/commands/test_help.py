"""The help of every command: what it shows, in which order, and examples that the parser accepts."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from weir.commands.app import app, main, with_all_values
from weir.commands.option_commands import read_values
from weir.options import BACKENDS, ROLES, SERVE, options_of

PARSER = typer.main.get_command(app)
TYPE_NAME = re.compile(
    r"<(?:int|float|bool|str|text|path|file|directory|list|[A-Z]\w*)\b[^<>]*>|\blist\[|[\dx]<=|>=\d|\{"
)
"""What typer writes for a type of Python, for a range of numbers and for a required argument."""


def commands(command: Any = PARSER, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command, subcommand and group that the parser has, with its words behind `weir`."""
    yield " ".join(path), command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


COMMANDS = dict(commands())


def words_of(example: str) -> list[str]:
    """The command line, without its comment and without where the shell sends its output."""
    program, *words = shlex.split(example, comments=True)
    assert program == "weir"
    return words[: words.index(">")] if ">" in words else words


def parse(words: list[str]) -> tuple[str, dict[str, Any]]:
    """The command that is run, and its arguments. A command line that the parser rejects ends in its exception."""
    command, path, rest = PARSER, [], with_all_values(words)
    while hasattr(command, "commands"):
        name, command, rest = command.resolve_command(typer.Context(command), rest)
        path.append(name)
    return " ".join(path), command.make_context(path[-1], rest).params


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_parser_has_the_commands_that_this_file_looks_at() -> None:
    assert {"", "serve", "backends", "status", "perf", "dead purge", "traffic ramp", "batch submit", *ROLES} <= set(
        COMMANDS
    )


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_has_examples_of_itself_in_its_help(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    examples = (COMMANDS[path].epilog or "").splitlines()
    assert examples
    help = shown(capsys, *path.split(), "--help")
    assert help.endswith("\nExamples:\n" + "".join(f"  {example}\n" for example in examples))
    for example in examples:
        assert f"{example} ".startswith(f"weir {path} ".replace("  ", " "))


@pytest.mark.parametrize(
    "example", sorted({line for one in COMMANDS.values() for line in (one.epilog or "").splitlines()})
)
def test_the_parser_accepts_every_example(example: str) -> None:
    path, arguments = parse(words_of(example))
    if path in (SERVE, BACKENDS, *ROLES):
        read_values(options_of(path), arguments)


def test_an_example_with_an_unknown_option_is_rejected() -> None:
    """So that the test above can fail."""
    with pytest.raises(Exception, match="No such option"):
        parse(words_of("weir status --no-such-option"))


@pytest.mark.parametrize("path", COMMANDS)
def test_help_fits_a_terminal_and_names_no_type_of_python(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    help = shown(capsys, *path.split(), "--help")
    assert TYPE_NAME.findall(help) == []
    assert [line for line in help.splitlines() if len(line) > 80] == []


def test_choices_and_ranges_are_shown_as_a_person_writes_them(capsys: pytest.CaptureFixture[str]) -> None:
    help = shown(capsys, "perf", "--help")
    assert "Usage: weir perf [OPTIONS] MODEL\n" in help
    assert "--protocol http|grpc|nats " in help
    assert "1 to 10000]" in help
    assert "[1 or more]" in help


def test_help_of_serve_shows_what_people_use_and_two_examples(capsys: pytest.CaptureFixture[str]) -> None:
    help = shown(capsys, "serve", "--help")
    options = [option for option in options_of(SERVE).values() if f"  {option.name}" in help]
    assert 20 <= len(options) <= 30
    assert {"--model-repository", "--http-port", "--http-address", "--nats", "--data-dir"} <= {
        option.name for option in options
    }
    assert not [option.name for option in options if option.ineffective or option.refused]
    assert len(COMMANDS["serve"].epilog.splitlines()) == 2
    assert "--help-all" in help


def test_all_options_are_shown_by_topic_and_those_without_effect_in_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    help = shown(capsys, "serve", "--help-all")
    panels = ["Models", "HTTP", "gRPC", "Metrics", "Trace", "Message bus", "Server", "Log", "Accepted without effect"]
    places = [help.index(f"\n{panel}:\n") for panel in [*panels, "Refused", "Deprecated", "Options"]]
    assert places == sorted(places)
    group = help[places[-4] : places[-3]]
    ineffective = [option for option in options_of(SERVE).values() if option.ineffective]
    assert [option.name for option in ineffective] == re.findall(r"^  (--\S+)", group, re.MULTILINE)


def test_names_of_options_are_shown_in_full_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in (SERVE, *ROLES):
        words = shown(capsys, command, "--help-all").replace(",", " ").split()
        assert {name for option in options_of(command).values() for name in option.names} <= set(words)
    assert "--nats-credentials FILE " in shown(capsys, "dead", "purge", "--help")


def test_a_command_all_of_whose_options_are_common_has_no_further_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--help-all" not in shown(capsys, BACKENDS, "--help")


def test_the_list_of_commands_has_the_first_sentence_of_each_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    help = " ".join(shown(capsys, "--help").split())
    for path, command in COMMANDS.items():
        if path and " " not in path:
            first = " ".join(command.help.split("\n\n")[0].split()).partition(". ")[0].removesuffix(".")
            assert f"{path} {first}" in help
