"""What `weir serve` prints once all is ready: where it listens, what it serves, and what an acknowledgement means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from weir import __version__
from weir.terminal_text import one_line

_NOT_ALLOWED = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupFacts:
    """What is known at the start: addresses as `host:port`, None where there is no listener; models as the gateway
    announces them.

    `data_dir` is None with a broker of the user's own. `nats_url_file` holds the URL of the bus with its password, "" where
    there is none. `durability` is what the gateway found out of it, as it announces
    it: `ack_is_fsync` (None: nobody knows) and the `reason`.
    """

    http: str | None
    grpc: str | None
    metrics: str | None
    nats_url: str
    data_dir: str | None
    nats_url_file: str = ""
    models: Sequence[Mapping[str, Any]]
    durability: Mapping[str, Any]


def render_startup_block(facts: StartupFacts) -> str:
    """The block as lines of plain text, without a final newline; what models say of themselves is made printable."""
    rows = [
        ("HTTP", f"http://{facts.http}" if facts.http else _NOT_ALLOWED),
        ("gRPC", facts.grpc or _NOT_ALLOWED),
        ("metrics", f"http://{facts.metrics}/metrics" if facts.metrics else _NOT_ALLOWED),
        ("NATS", _without_password(facts.nats_url)),
        *([("NATS access", facts.nats_url_file)] if facts.nats_url_file else []),
        ("durability", _durability(facts.durability)),
        ("data", facts.data_dir or "where the NATS server keeps it"),
    ]
    return "\n".join([_headline(facts.models), "", *_columns(rows), "", *_columns(_model_rows(facts.models))])


def _headline(models: Sequence[Mapping[str, Any]]) -> str:
    """The first line: "ready" is said only where every model is."""
    missing = sum(model.get("state") != "READY" for model in models)
    if not missing:
        return f"Weir {__version__} is ready"
    verb = "is" if missing == 1 else "are"
    return f"Weir {__version__} has started, but {missing} of {len(models)} models {verb} not ready"


def _durability(told: Mapping[str, Any]) -> str:
    is_fsync = told.get("ack_is_fsync")
    if is_fsync is True:
        return "ack = fsync: yes"
    return f"ack = fsync: {'no' if is_fsync is False else 'unknown'} ({told.get('reason', '')})"


def _model_rows(models: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    if not models:
        return [("no models",)]
    rows = [
        (
            str(model["name"]),
            ",".join(map(str, model.get("versions", ()))) or "-",
            str(model.get("state", "")),
            str(model.get("reason", "")),
        )
        for model in models
    ]
    return [("model", "version", "state", "reason" if any(row[3] for row in rows) else ""), *rows]


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    printable = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*printable, strict=True)]
    return [
        ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in printable
    ]


def _without_password(url: str) -> str:
    # Several servers may be named in one URL, separated by commas.
    return ",".join(
        part.replace(f"{split.netloc.rpartition('@')[0]}@", "***@", 1)
        if "@" in (split := urlsplit(part)).netloc
        else part
        for part in url.split(",")
    )
