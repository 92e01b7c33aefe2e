"""Lists, shows, replays and purges the dead letters in stream DEAD, for `weir dead`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar

import weir.bus.nats.nats_py  # noqa: F401  # isort: skip  # ahead of all that imports nats-py

import orjson
import typer
from nats.errors import Error as NatsError

from weir.bus.naming.identity import new_id
from weir.bus.streams.acked_publisher import AckedPublisher
from weir.bus.streams.dead_letters import DeadLetter, DeadLetters
from weir.commands.running_server import BrokerTarget, unwrap_exception_groups
from weir.commands.terminal import one_line
from weir.errors import StartError
from weir.options import UsageError
from weir.schemas.core.errors import WeirError

_SHOWN_BODY_BYTES = 64 << 10
_HEX_BYTES = 1024

_Result = TypeVar("_Result")


def list_letters(broker: BrokerTarget, model: str, limit: int, as_json: bool) -> None:
    """Print the newest dead letters, as a table or as one JSON object per line."""
    letters = _run(broker, lambda dead: dead.newest(limit, model))
    if as_json:
        for letter in letters:
            typer.echo(orjson.dumps(_facts(letter)))
        return
    if not letters:
        typer.echo("no dead letters")
        return
    rows = [("seq", "when", "model", "id", "attempts", "bytes", "reason")]
    rows += [
        (
            str(letter.sequence),
            _moment(letter.dead_ms),
            letter.model,
            letter.id,
            str(letter.attempts),
            "in store" if letter.object else str(letter.size_bytes),
            letter.reason,
        )
        for letter in letters
    ]
    printable = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*printable, strict=True)]
    for row in printable:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def show(broker: BrokerTarget, name: str) -> None:
    """Print the details of one dead letter."""

    async def look(dead: DeadLetters) -> DeadLetter:
        return await dead.get((await _one(dead, name)).sequence)

    letter = _run(broker, look)
    for title, value in (
        ("seq", letter.sequence),
        ("model", letter.model),
        ("id", letter.id),
        ("reason", letter.reason),
        ("dead since", _moment(letter.dead_ms)),
        ("attempts", letter.attempts),
        ("published to", letter.subject),
    ):
        typer.echo(f"{title + ':':14}{one_line(str(value))}")
    if letter.history:
        typer.echo("history:")
    for attempt in letter.history:
        typer.echo(f"  {_moment(attempt.ended_ms)}  {one_line(attempt.reason)}")
    headers = letter.original_headers()
    if headers:
        typer.echo("headers:")
    for header, value in headers:
        shown = "***" if header.lower() == "authorization" else one_line(value)
        typer.echo(f"  {one_line(header)}: {shown}")
    where = f"in object store, as {letter.object!r}" if letter.object else f"{letter.size_bytes} bytes"
    typer.echo(f"body ({where}):")
    if letter.body:
        typer.echo(shown_body(letter.body))


def replay(broker: BrokerTarget, names: Sequence[str], model: str, has_new_id: bool) -> bool:
    """Replay the named dead letters, or those of a model ("": all), oldest first; print each outcome.

    Returns whether all were replayed.
    """

    async def put_back(dead: DeadLetters) -> bool:
        letters = (
            [await _one(dead, name) for name in names] if names else [le async for le in dead.headers(model=model)]
        )
        done = 0
        for letter in letters:
            label = f"{one_line(letter.model)} {one_line(letter.id)} (seq {letter.sequence})"
            try:
                id = await dead.replay(await dead.get(letter.sequence), has_new_id)
            except WeirError as error:
                typer.echo(f"{label}: not replayed: {error.message}")
                continue
            typer.echo(f"{label}: replayed" + (f" as {one_line(id)}" if id != letter.id else ""))
            done += 1
        typer.echo(f"replayed {done} of {len(letters)}")
        return done == len(letters)

    return _run(broker, put_back)


def purge(broker: BrokerTarget, names: Sequence[str], model: str, age_s: float, is_sure: bool) -> None:
    """Delete the named dead letters, or those of a model ("": all) older than `age_s`; confirm unless `is_sure`."""

    async def throw_away(dead: DeadLetters) -> int:
        if names:
            letters = [await _one(dead, name) for name in names]
        else:
            before_ms = (time.time() - age_s) * 1000 if age_s else float("inf")
            letters = [letter async for letter in dead.headers(model=model) if letter.dead_ms < before_ms]
        if letters and not is_sure:
            count = f"{len(letters)} dead letter" + ("s" if len(letters) > 1 else "")
            question = f"Delete {count}? This can't be undone"
            await asyncio.to_thread(typer.confirm, question, abort=True)
        if names or age_s:  # dead letters of a time range need not be contiguous: clocks of gateways may have been set
            for letter in letters:
                await dead.purge(letter)
        elif letters:
            await dead.purge_up_to(letters[-1].sequence, model)
        return len(letters)

    typer.echo(f"purged {_run(broker, throw_away)}")


def shown_body(body: bytes) -> str:
    """A body as readable text: JSON indented, other text unchanged, binary data as a hex dump of its first bytes."""
    try:
        text = orjson.dumps(orjson.loads(body), option=orjson.OPT_INDENT_2).decode()
    except ValueError:
        try:
            text = body.decode()
        except UnicodeDecodeError:
            text = ""
        if not text or any(not (ch.isprintable() or ch in "\r\n\t") for ch in text):
            rows = [body[at : at + 16] for at in range(0, min(len(body), _HEX_BYTES), 16)]
            lines = [
                f"{at * 16:08x}  {row.hex(' '):47}  {''.join(chr(b) if 32 <= b < 127 else '.' for b in row)}"
                for at, row in enumerate(rows)
            ]
            return "\n".join([*lines, *_rest(len(body) - _HEX_BYTES, "bytes")])
    shown = "".join(ch if ch.isprintable() or ch in "\n\t" else "?" for ch in text[:_SHOWN_BODY_BYTES])
    return "\n".join([shown, *_rest(len(text) - _SHOWN_BODY_BYTES, "characters")])


def _rest(count: int, unit: str) -> list[str]:
    return [f"... and {count} more {unit}"] if count > 0 else []


async def _one(dead: DeadLetters, name: str) -> DeadLetter:
    found = await dead.find(name)
    if len(found) > 1:
        sequences = ", ".join(str(letter.sequence) for letter in found)
        raise UsageError(f"{len(found)} dead letters have id {name!r}: name one by its sequence ({sequences})")
    return found[0]


def _facts(letter: DeadLetter) -> dict[str, Any]:
    return {
        "seq": letter.sequence,
        "model": letter.model,
        "id": letter.id,
        "reason": letter.reason,
        "dead_ms": letter.dead_ms,
        "attempts": letter.attempts,
        "history": [[attempt.ended_ms, attempt.reason] for attempt in letter.history],
        "size_bytes": letter.size_bytes,
        "object": letter.object or None,
        "subject": letter.subject,
    }


def _moment(unix_ms: int) -> str:
    try:
        return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(" ", "seconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return str(unix_ms)


def _run(broker: BrokerTarget, act: Callable[[DeadLetters], Awaitable[_Result]]) -> _Result:
    async def connected() -> _Result:
        async with _dead_letters(broker) as dead:
            return await act(dead)

    try:
        return asyncio.run(connected())
    except WeirError as error:
        raise StartError(error.message) from error
    except (NatsError, OSError, TimeoutError) as error:
        raise StartError(str(error) or type(error).__name__) from error


@asynccontextmanager
async def _dead_letters(broker: BrokerTarget) -> AsyncIterator[DeadLetters]:
    with unwrap_exception_groups(WeirError, NatsError, OSError, TimeoutError, UsageError, typer.Abort):
        name = new_id("dead")
        async with asyncio.TaskGroup() as background, broker.connected(name) as bus:
            publisher = AckedPublisher(bus, name)
            try:
                await publisher.start(background)
                yield DeadLetters(bus, publisher)
            finally:
                publisher.stop()
