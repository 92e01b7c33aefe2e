"""The headers of NATS messages: `NATS/1.0`, then `Name: value` lines, as in HTTP.

Source: NATS ADR-4 (message headers).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_VERSION_LINE = b"NATS/1.0\r\n"


def parse_headers(block: bytes) -> dict[str, str]:
    """The headers of a block, by lower-case names; of several with one name, the first."""
    headers: dict[str, str] = {}
    for line in block.split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            headers.setdefault(name.decode("latin-1").strip().lower(), value.decode("utf-8", "replace").strip())
    return headers


def header_rows(block: bytes) -> list[tuple[str, str]]:
    """All headers of a block in their order, with names as they were sent."""
    rows: list[tuple[str, str]] = []
    for line in block.split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            rows.append((name.decode("latin-1").strip(), value.decode("utf-8", "replace").strip()))
    return rows


def pack_headers(headers: Mapping[str, str] | Iterable[tuple[str, str]]) -> bytes:
    """The block of these headers. Line breaks become spaces, and unpaired surrogates question marks."""
    items = headers.items() if isinstance(headers, Mapping) else headers
    lines = [f"{name}: {value}\r\n" for name, value in items]
    text = "".join(lines)
    if len(text.splitlines()) != len(lines):
        text = "".join(f"{' '.join(line.splitlines())}\r\n" for line in lines)
    return b"%b%b\r\n" % (_VERSION_LINE, text.encode(errors="replace"))


def last_header(block: bytes, name: bytes) -> str:
    """The last header of this name, "" without one. The server appends its own after those of the stored message."""
    _, found, rest = block.rpartition(b"\r\n%b:" % name)
    return rest.partition(b"\r\n")[0].decode("utf-8", "replace").strip() if found else ""
