"""Prints audit events of stream AUDIT, oldest first."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import NamedTuple

import weir.bus.nats.nats_py  # noqa: F401  # isort: skip  # ahead of all that imports nats-py

import msgspec
import typer
from nats.errors import Error as NatsError

from weir.access.audit import AuditEvent
from weir.bus.naming.identity import new_id
from weir.cluster.audit import read_events
from weir.commands.running_server import BrokerTarget, unwrap_exception_groups
from weir.commands.terminal import one_line
from weir.errors import StartError


class Wanted(NamedTuple):
    """Which events are printed. Times are in Unix seconds; `model` is a glob, "" for all events."""

    since_s: float
    until_s: float
    denied: bool
    principal: str
    model: str

    def has(self, event: AuditEvent) -> bool:
        """Whether `event` is printed."""
        return (
            self.since_s <= event.time_s <= self.until_s
            and not (self.denied and event.allowed)
            and self.principal in ("", event.principal)
            and (not self.model or (event.model != "" and fnmatchcase(event.model, self.model)))
        )


def run(broker: BrokerTarget, wanted: Wanted, as_json: bool) -> None:
    """Print the events, as a table or as one JSON object per line. Raises StartError without a broker."""
    try:
        events = asyncio.run(_read(broker, wanted))
    except (NatsError, OSError, TimeoutError) as error:
        raise StartError(str(error) or type(error).__name__) from error
    show(events, as_json)


def show(events: Sequence[AuditEvent], as_json: bool) -> None:
    """Print these events, as a table or as one JSON object per line."""
    if as_json:
        for event in events:
            typer.echo(msgspec.json.encode(event))
    elif events:
        _print(events)
    else:
        typer.echo("no audit events")


async def _read(broker: BrokerTarget, wanted: Wanted) -> list[AuditEvent]:
    with unwrap_exception_groups(NatsError, OSError, TimeoutError):
        async with broker.connected(new_id("audit")) as bus:
            return [event async for event in read_events(bus) if wanted.has(event)]


def _print(events: Sequence[AuditEvent]) -> None:
    rows = [["when", "", "principal", "action", "model", "door", "operation", "client", "why"]]
    rows += [_row(event) for event in events]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _row(event: AuditEvent) -> list[str]:
    try:
        when = datetime.fromtimestamp(event.time_s, UTC).isoformat(" ", "seconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        when = str(event.time_s)
    outcome = "allowed" if event.allowed else "denied" + (f" ×{event.count}" if event.count > 1 else "")
    model = f"{event.model}:{event.version}" if event.version else event.model
    cells = (when, outcome, event.principal, event.action, model, event.door, event.operation, event.client, event.why)
    return [one_line(cell) or "-" for cell in cells]
