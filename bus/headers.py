"""The headers of NATS messages: `NATS/1.0`, then `Name: value` lines, as in HTTP.

Source: NATS ADR-4 (message headers).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_VERSION_LINE = b"NATS/1.0\r\n"


def parse_headers(block: bytes) -> dict[str, str]:
    """The headers in a message's block, by names in lower case; of several of one name, the first."""
    headers: dict[str, str] = {}
    for line in block.split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            headers.setdefault(name.decode("latin-1").strip().lower(), value.decode("utf-8", "replace").strip())
    return headers


def header_rows(block: bytes) -> list[tuple[str, str]]:
    """All headers in a message's block, as they are written and in their order."""
    rows: list[tuple[str, str]] = []
    for line in block.split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            rows.append((name.decode("latin-1").strip(), value.decode("utf-8", "replace").strip()))
    return rows


def pack_headers(headers: Mapping[str, str] | Iterable[tuple[str, str]]) -> bytes:
    """The block of these headers. What would end a line early is made a space, and what is no character a question mark."""
    items = headers.items() if isinstance(headers, Mapping) else headers
    lines = [f"{name}: {value}\r\n" for name, value in items]
    text = "".join(lines)
    if len(text.splitlines()) != len(lines):
        text = "".join(f"{' '.join(line.splitlines())}\r\n" for line in lines)
    return b"%b%b\r\n" % (_VERSION_LINE, text.encode(errors="replace"))


def last_header(block: bytes, name: bytes) -> str:
    """The last header of this name, as the server writes it: its own come after those that a message was stored with."""
    _, found, rest = block.rpartition(b"\r\n%b:" % name)
    return rest.partition(b"\r\n")[0].decode("utf-8", "replace").strip() if found else ""
