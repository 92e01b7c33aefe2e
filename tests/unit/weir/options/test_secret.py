"""Options that hold secrets take them from files, show them nowhere, and none that holds one is declared otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from weir.commands.app import app
from weir.options import OPTIONS, UsageError, options_of
from weir.options.secret import Secret, SecretText, as_variable, has_identity, in_the_clear, taken_from
from weir.options.values import BadValue, Checked, Text, backend_setting

SERVE = options_of("serve")
SOUNDS_SECRET = re.compile(r"secret|password|token|key|credential|nkey|seed(?!s)", re.IGNORECASE)

HOLD_NO_SECRET = {
    "--seed": "of random inputs of `weir perf`",
}
"""Options with such a name, and why they may show their value. An option whose value is the name of a file needs no row."""


def all_options() -> Iterator[tuple[str, str, bool]]:
    """(name, metavar, whether its type is secret) of each option of each command."""
    types = {name: isinstance(option.value, Secret) for option in OPTIONS for name in option.names}

    def walk(command: click.Command) -> Iterator[click.Parameter]:
        yield from command.params
        for one in getattr(command, "commands", {}).values():
            yield from walk(one)

    for parameter in walk(typer.main.get_command(app)):
        for name in parameter.opts:
            yield name, str(parameter.metavar or ""), types.get(name, False)


def test_an_option_that_sounds_like_a_secret_is_one_or_names_a_file() -> None:
    found = list(all_options())
    assert {"--http-restricted-api", "--nats-key", "--api-key"} <= {name for name, _, _ in found}
    open_ones = {
        name
        for name, metavar, is_secret in found
        if SOUNDS_SECRET.search(name) and not is_secret and metavar not in ("FILE", "@FILE")
    }
    assert open_ones == HOLD_NO_SECRET.keys()


def test_options_say_that_they_take_a_file() -> None:
    secret = {option.name for option in OPTIONS if isinstance(option.value, Secret)}
    assert secret == {
        "--nats",
        "--nats-monitor",
        "--http-restricted-api",
        "--grpc-restricted-protocol",
        "--trace-config",
        "--backend-config",
    }
    shown = {name: metavar for name, metavar, is_secret in all_options() if is_secret or name == "--nats"}
    assert all(metavar.endswith("|@FILE") for metavar in shown.values()), shown


@pytest.mark.parametrize("content", [b"hush", b"hush\n", b"hush\r\n", b"hush\nmore\n"])
def test_the_first_line_of_the_file_is_the_value(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    value = Secret(Text()).read(f"@{tmp_path}/file")
    assert value == "hush"
    assert isinstance(value, SecretText)


def test_two_signs_are_a_literal_one() -> None:
    secret = Secret(Text())
    for text, value in (("@@a", "@a"), ("@@@a", "@@a"), ("a@", "a@")):
        assert secret.read(text) == value
        assert secret.read(secret.write(value)) == value


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "can't be read: No such file"),
        (b"", "is empty"),
        (b"\nhush\n", "is empty"),
        (b"\xff\n", "is not UTF-8"),
        (b"x" * (1 << 20) + b"xx", "is too long"),
    ],
)
def test_a_file_that_holds_no_secret_is_an_error_of_the_option(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(reason)) as error:
        SERVE["http_restricted_api"].read(f"@{tmp_path}/file")
    assert '"--http-restricted-api"' in str(error.value)
    with pytest.raises(UsageError, match="name of a file"):
        SERVE["http_restricted_api"].read("@")


def test_errors_show_nothing_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hush,hush")
    secret = Secret(Checked("BACKEND,KEY=VALUE", backend_setting), lambda text: False)
    with pytest.raises(BadValue, match="does not have the form BACKEND,KEY=VALUE") as error:
        secret.read(f"@{tmp_path}/file")
    assert "hush" not in str(error.value)
    assert error.value.__cause__ is None
    with pytest.raises(BadValue, match="Got shown,shown"):  # what is in the clear may be shown
        secret.read("shown,shown")


def test_settings_do_not_show_secrets() -> None:
    values = SERVE["http_restricted_api"].read_all(["health:a=hush"])
    assert "hush" not in repr({"of": values})
    assert values == ("health:a=hush",)


@pytest.mark.parametrize(
    ("url", "is_secret"),
    [("nats://host:1", False), ("nats://u:p@host", True), ("token@host:4222", True), ("nats://a,tls://t@b", True)],
)
def test_a_url_with_a_user_is_secret(url: str, is_secret: bool) -> None:
    assert isinstance(SERVE["nats"].read(url), SecretText) is is_secret
    assert has_identity(url) is (is_secret and "://" in url)


def test_secrets_of_a_command_line_are_found_in_either_form() -> None:
    secrets: Any = {option.name: option.value for option in OPTIONS if isinstance(option.value, Secret)}
    words = [
        "serve",
        "--http-restricted-api=health:a=b",
        "--grpc-restricted-protocol",
        "health:c=d",
        "--http-restricted-api=@file",
        "--http-restricted-api=@@x",
        "--trace-config=level=OFF",
        "--nats=nats://host",
        "--backend-config=a,key=b",
        "--grpc-restricted-protocol",
    ]
    assert in_the_clear(words, secrets) == {
        "--http-restricted-api": ["health:a=b", "@@x"],
        "--grpc-restricted-protocol": ["health:c=d"],
    }


def test_what_is_passed_on_is_taken_once() -> None:
    environment = {"A": "b", **as_variable({"nats": ["@@x"]})}
    assert taken_from(environment) == {"nats": ["@@x"]}
    assert environment == {"A": "b"}
    assert taken_from(environment) == {}
    assert as_variable({}) == {}
