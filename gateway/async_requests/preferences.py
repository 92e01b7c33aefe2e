"""`Preferences`: what a `Prefer` header asks for, of what this server knows: `respond-async` and `wait`.

Source: RFC 7240 (Prefer Header for HTTP). What is malformed is no preference, and of several of a name the first counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_MAX_LENGTH = 1024  # characters of one header that are looked at
_ITEM = re.compile(r'(?:[^,"]|"[^"]*")+')
_SECONDS = re.compile(r"[0-9]{1,9}")

MAX_WAIT_S = 60.0
"""The longest that `wait` has an answer wait."""


class Preferences(NamedTuple):
    """Whether the answer is to be fetched later, and for how long (`wait_s`, at most `MAX_WAIT_S`) to wait for it."""

    respond_async: bool = False
    wait_s: float | None = None


def read_preferences(values: Iterable[bytes]) -> Preferences:
    """What the `Prefer` headers with these values ask for."""
    found: dict[str, str] = {}
    for value in values:
        text = value.decode("latin-1")
        for item in _ITEM.findall(text) if len(text) <= _MAX_LENGTH else ():
            name, _, argument = item.partition(";")[0].partition("=")
            found.setdefault(name.strip().lower(), argument.strip().strip('"'))
    wait = found.get("wait", "")
    wait_s = min(float(wait), MAX_WAIT_S) if _SECONDS.fullmatch(wait) else None
    return Preferences("respond-async" in found, wait_s)


def wants_answer_later(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the request with these headers (names in lower case) is to be answered later."""
    return read_preferences(value for name, value in headers if name == b"prefer").respond_async
