"""`Secret`: the type of options whose values others must not see, and `SecretText`, such a value.

In place of the value, `@FILE` names a file whose first line is the value, so that the command line holds no secret: every
user of a machine may read the command lines of all processes. A value that begins with `@@` is a literal `@`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weir.options.values import BadValue, Value

FROM_FILE = "@"

MAX_LINE_BYTES = 1 << 20
"""Bytes of the first line of a file that may be read."""

_IDENTITY = re.compile(r"(?<=://)[^\s,/@]+@")


class SecretText(str):
    """A secret. Its `repr` does not show it, so that a `repr` of settings, or a traceback with one, may be logged."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


class Secret:
    """The type of an option that holds a secret; `value` is the type of its text.

    `is_secret` tells for a text whether it holds a secret, for options that may but need not. `read` returns a `SecretText`
    for a secret, and for all that comes from a file.
    """

    choices: Sequence[str] = ()

    def __init__(self, value: Value, is_secret: Callable[[str], bool] = lambda text: True) -> None:
        self.metavar = f"{value.metavar}|@FILE"
        self.is_secret = is_secret
        self._value = value

    def read(self, text: str) -> Any:
        """The value. Raises BadValue, which shows nothing of the content of a file or of a secret."""
        plain = text_of(text)
        is_hidden = is_file(text) or self.is_secret(plain)
        try:
            value = self._value.read(plain)
        except BadValue:
            if not is_hidden:
                raise
            place = f"the first line of {text[1:]}" if is_file(text) else "the value"
            raise BadValue(f"{place} does not have the form {self._value.metavar}") from None
        return SecretText(value) if is_hidden else value

    def write(self, value: Any) -> str:
        """A text that means `value`, with the value in it."""
        text = str(value)
        return f"@{text}" if text.startswith(FROM_FILE) else text


def is_file(text: str) -> bool:
    """Whether the text of an option names a file, and is not the value itself."""
    return text.startswith(FROM_FILE) and not text.startswith(FROM_FILE * 2)


def text_of(text: str) -> str:
    """The text that `text` means: the first line of FILE for `@FILE`, one `@` less where it begins with `@@`.

    Raises BadValue for a file that can't be read, has no first line, or one that is not UTF-8.
    """
    if not text.startswith(FROM_FILE):
        return text
    if not is_file(text):
        return text[1:]
    path = text[1:]
    if not path:
        raise BadValue("@ must be followed by the name of a file")
    try:
        with Path(path).open("rb") as file:  # may be a pipe, as in @<(command)
            line = file.readline(MAX_LINE_BYTES + 1)
        content = line.removesuffix(b"\n").removesuffix(b"\r").decode()
    except OSError as error:
        raise BadValue(f"{path} can't be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise BadValue(f"the first line of {path} is not UTF-8") from None
    if not content or len(line) > MAX_LINE_BYTES:
        raise BadValue(f"the first line of {path} is {'too long' if content else 'empty'}")
    return content


def has_identity(text: str) -> bool:
    """Whether a text has a URL with a user, a password or a token in it."""
    return _IDENTITY.search(text) is not None


def without_identities(text: str) -> str:
    """`text` without the users, passwords and tokens of the URLs in it."""
    return _IDENTITY.sub("", text)


def in_the_clear(arguments: Sequence[str], secrets: Mapping[str, Secret]) -> dict[str, list[str]]:
    """The secrets in a command line, by the name of the option. `secrets` are the types of the options, by name."""
    found: dict[str, list[str]] = {}
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        text = value if equals else following
        secret = secrets.get(name)
        if secret is not None and text and not is_file(text) and secret.is_secret(text):
            found.setdefault(name, []).append(text)
    return found


SECRETS_VARIABLE = "WEIR_SECRET_OPTIONS"
"""Environment variable with the texts of options that hold secrets, from `weir serve` to its roles: JSON, lists by key."""


def taken_from(environment: Any = os.environ) -> dict[str, list[str]]:
    """The texts in the environment variable, by the key of the option. Removes the variable."""
    import json

    return dict(json.loads(environment.pop(SECRETS_VARIABLE, "") or "{}"))


def as_variable(texts: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The environment that passes these texts on, empty for none."""
    import json

    return {SECRETS_VARIABLE: json.dumps(texts)} if texts else {}
