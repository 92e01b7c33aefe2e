"""Text of models, clients and hosts as it may be written to a terminal."""

from __future__ import annotations

import re

_LINE_BREAKS = re.compile(r"\s*[\r\n]\s*")


def one_line(text: str) -> str:
    """The text on one line: line breaks and the spaces around them become one space, and nothing steers the terminal.

    Other characters that are not printable become "?".
    """
    return "".join(ch if ch.isprintable() else "?" for ch in _LINE_BREAKS.sub(" ", text.strip()))
