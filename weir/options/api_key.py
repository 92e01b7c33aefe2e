"""The key that commands show to a gateway with an access policy: `--api-key @FILE`, else the variable `WEIR_API_KEY`.

A gateway takes it in the header `Authorization` of HTTP and of messages over NATS, and in the metadata of gRPC.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated

import typer

from weir import API_KEY_VARIABLE
from weir.options.option import UsageError
from weir.options.secret import SecretText, is_file, text_of
from weir.options.values import BadValue

_OPTION = "--api-key"

ApiKey = Annotated[
    str,
    typer.Option(
        _OPTION,
        metavar="@FILE",
        help="File whose first line is the key or token to show to the server, with @ before its name. Default: the "
        f"variable {API_KEY_VARIABLE}, which holds the key, or @FILE.",
    ),
]
"""The option of commands that send requests to a gateway."""


def authorization(option: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The headers that show the key of the option, else that of the variable; none without a key.

    Raises UsageError for a key on the command line, for a file that can't be read, and for text that no header may hold.
    """
    if option and not is_file(option):
        raise UsageError(
            f"{_OPTION} takes @FILE: every user of this machine could read a key on the command line. Write the key to a "
            f"file that only you may read, and give {_OPTION} @FILE, or set the variable {API_KEY_VARIABLE}"
        )
    name, text = (_OPTION, option) if option else (API_KEY_VARIABLE, environment.get(API_KEY_VARIABLE, ""))
    if not text:
        return {}
    try:
        return {"Authorization": bearer(text, name)}
    except BadValue as error:
        raise UsageError(str(error)) from None


def bearer(text: str, name: str) -> SecretText:
    """The header value that shows the key `text`, or for `@FILE` that in the first line of the file.

    Raises BadValue, with the `name` of what holds the text, for a file that can't be read, and for what no header may hold.
    """
    try:
        key = text_of(text).strip()
    except BadValue as error:
        raise BadValue(f"{name}: {error}") from None
    if not (key.isascii() and key.isprintable() and key and " " not in key):
        raise BadValue(f"{name} holds no key or token: it must be printable ASCII characters without spaces")
    return SecretText(f"Bearer {key}")


def hint_for_denied(has_key: bool) -> str:
    """What to do about a request that the server denies."""
    shown = "Show another key" if has_key else "Show a key that may do this"
    return f"{shown}: give {_OPTION} @FILE, or set the variable {API_KEY_VARIABLE}."
