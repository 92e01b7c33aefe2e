"""Runs `weir key`: makes, lists, revokes and replaces keys. A key is printed once, when it is made."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import typer

from weir.access.keys.ring import KeyRecord, KeyRing
from weir.commands.access.stores import KeyStore
from weir.commands.terminal import one_line, print_json
from weir.options import UsageError

MAX_NAME_CHARACTERS = 256

_Change = Callable[[KeyRing], tuple[KeyRing, str]]


def create(store: KeyStore, name: str, roles: Sequence[str], tenant: str, lifetime_s: float) -> None:
    """Makes a key of `name` that expires after `lifetime_s`, 0 for never."""
    for what, text in (("name", name), *(("role", role) for role in roles), ("tenant", tenant)):
        if not text.isprintable() or len(text) > MAX_NAME_CHARACTERS or (not text and what != "tenant"):
            raise UsageError(f"the {what} {text!r} is no printable text of at most {MAX_NAME_CHARACTERS} characters")
    now_s = time.time()
    expires_s = int(now_s + lifetime_s) if lifetime_s else 0
    _make(store, name, lambda ring: ring.create(name, roles, now_s, expires_s, tenant))


def rotate(store: KeyStore, name: str, overlap_s: float) -> None:
    """Makes a second key like the valid one of `name`, which is valid for `overlap_s` more."""
    now_s = time.time()
    _make(store, name, lambda ring: ring.rotate(name, now_s, int(overlap_s)))


def revoke(store: KeyStore, name_or_id: str) -> None:
    """Removes a key by its id, or all keys of a name."""
    store.revoke(name_or_id)
    typer.echo(f"revoked {one_line(name_or_id)}", err=True)


def list_keys(store: KeyStore, as_json: bool) -> None:
    """Prints all keys, without what lets anybody in."""
    records, now_s = store.ring().records, time.time()
    if as_json:
        print_json([_facts(record, now_s) for record in records])
        return
    if not records:
        typer.echo("no keys")
        return
    rows = [("id", "name", "roles", "tenant", "created", "expires")]
    rows += [
        (
            record.id,
            record.name,
            ",".join(record.roles),
            record.tenant or "-",
            _day(record.created_s),
            _end(record, now_s),
        )
        for record in records
    ]
    printable = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*printable, strict=True)]
    for row in printable:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _make(store: KeyStore, name: str, change: _Change) -> None:
    """Prints the key alone on stdout, so that it can be piped to where it is kept, and its facts on stderr."""
    made: list[Any] = [None, ""]

    def changed(ring: KeyRing) -> KeyRing:
        made[:] = change(ring)
        ring = made[0]
        return ring

    store.change(name, changed)
    ring, key = made
    id = key.split("_")[1]
    now_s = time.time()
    for record in ring.records:
        if record.name == name and record.is_live(now_s):
            which = "new key" if record.id == id else "old key"
            tenant = f", tenant {record.tenant}" if record.tenant else ""
            roles = f"role{'s' if len(record.roles) > 1 else ''} {', '.join(record.roles)}"
            shown = f"{which} {record.id} of {name}: {roles}{tenant}, expires {_end(record, now_s)}"
            typer.echo(one_line(shown), err=True)
    typer.echo(key)


def _facts(record: KeyRecord, now_s: float) -> dict[str, Any]:
    return {
        "id": record.id,
        "name": record.name,
        "roles": list(record.roles),
        "tenant": record.tenant,
        "created_s": record.created_s,
        "expires_s": record.expires_s or None,
        "valid": record.is_live(now_s),
    }


def _end(record: KeyRecord, now_s: float) -> str:
    if not record.expires_s:
        return "never"
    return _day(record.expires_s) + ("" if record.is_live(now_s) else " (expired)")


def _day(unix_s: int) -> str:
    try:
        return datetime.fromtimestamp(unix_s, UTC).isoformat(" ", "seconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return str(unix_s)
