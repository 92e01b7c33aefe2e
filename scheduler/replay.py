"""`python -m scheduler.replay FILE`: feeds a recorded event log to a fresh `ModelScheduler`, and compares.

Prints each event with its batches and ends, and each difference: a row whose actions are others than those that were
recorded. Exit status 1 if there are any, 2 for a file that is no event log. No clock and no bus is asked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from scheduler.batch import Batch
from scheduler.event_rows import FORMAT, FORMAT_VERSION, REQUEST_FIELDS, digest_of, unpack_event
from scheduler.model_scheduler import ModelScheduler
from scheduler.state_snapshot import UnknownState, unpack_state
from scheduler.version_scheduler import NOTHING_ENDED, Ended, Failure
from schemas.errors import WeirError

_NO_BATCH_ID = 1 << 62
"""Where ids begin that are drawn while the log tells of none."""


class NotAnEventLog(ValueError):
    """The file is no event log, or one of another version of Weir."""


class Header(NamedTuple):
    """The head of a file: whose events, the number of the first, and the packed state before it (None: new).

    A new scheduler is made with `options`.
    """

    model: str
    options: dict[str, int]
    first: int
    unix_us: int
    state: bytes | None


class Event(NamedTuple):
    """One event: the method that was called and its arguments, the batch ids drawn, and the digest of what came of it.

    `packed` is its first part, over which the digest is.
    """

    number: int
    method: str
    arguments: list[Any]
    by_name: dict[str, Any]
    batch_ids: list[int]
    digest: bytes
    packed: bytes


def read_log(path: Path) -> tuple[Header, Iterator[Event]]:
    """The header and the events of a file, which may end amidst a row. Raises NotAnEventLog, also while iterating."""
    rows = _rows(path)
    head = next(rows, None)
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise NotAnEventLog(f"{path} is no event log of a scheduler")
    if head.get("version") != FORMAT_VERSION or head.get("request_fields") != list(REQUEST_FIELDS):
        raise NotAnEventLog(f"{path} was written by another version of Weir")
    try:
        header = Header(*(head[name] for name in Header._fields))
    except KeyError as error:
        raise NotAnEventLog(f"{path}: no {error} in its header") from error
    return header, (_event(row) for row in rows)


def _rows(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        unpacker = msgpack.Unpacker(file, max_buffer_size=1 << 31)
        try:
            yield from unpacker
        except (ValueError, msgpack.UnpackException) as error:
            raise NotAnEventLog(f"{path}: {error}") from error


def _event(row: Any) -> Event:
    try:
        packed, batch_ids, digest = row
        if type(batch_ids) is not list or type(digest) is not bytes:
            raise TypeError("neither batch ids nor a digest")
        return Event(*unpack_event(packed), batch_ids, digest, packed)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise NotAnEventLog(f"not an event: {error}") from error


class Replay:
    """A scheduler that is fed with recorded events. Raises UnknownState where a file's state can't be read."""

    def __init__(self, header: Header) -> None:
        self._ids: list[int] = []
        self._unknown_ids = count(_NO_BATCH_ID)
        self._next = header.first
        if header.state is not None:
            self.scheduler = unpack_state(header.state, self._next_batch_id)
            return
        try:
            self.scheduler = ModelScheduler(header.model, self._next_batch_id, **header.options)
        except TypeError as error:
            raise UnknownState(f"not the options of a scheduler: {error}") from error

    def feed(self, event: Event) -> tuple[Any, str]:
        """What the scheduler decides, and in what it differs from what was recorded ("": in nothing)."""
        self._ids = list(reversed(event.batch_ids))
        expected, self._next = self._next, event.number + 1
        try:
            actions = getattr(self.scheduler, event.method)(*event.arguments, **event.by_name)
            digest = digest_of(event.packed, actions)
        except (WeirError, LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
            return None, f"{type(error).__name__}: {error}"
        if event.number != expected:
            return actions, f"event {expected} is missing"
        if self._ids:
            return actions, f"{len(self._ids)} batches less than were recorded"
        return actions, "" if digest == event.digest else "other than what was recorded"

    def _next_batch_id(self) -> int:
        return self._ids.pop() if self._ids else next(self._unknown_ids)


# What is printed


def lines_of(event: Event, actions: Any) -> Iterator[str]:
    """The event and what came of it, for people."""
    arguments = [_text(argument) for argument in event.arguments]
    arguments += [f"{name}={_text(argument)}" for name, argument in event.by_name.items()]
    yield f"{event.number} {event.method} {' '.join(arguments)}"
    if event.method == "dispatch" and actions is not None:
        batches, wake_at_us = actions
        for batch in batches:
            yield f"    {_batch(batch)}"
        if wake_at_us is not None:
            yield f"    wakes at {wake_at_us}"
        return
    answered, failures = ended_by(event, actions)
    if answered:
        yield f"    ended: {_requests(answered)}"
    for failure in failures:
        yield f"    {_failure(failure)}"


def ended_by(event: Event, actions: Any) -> Ended:
    """The requests that the event has ended; `actions` are what came of it."""
    if event.method == "enqueue":  # which tells whom it refuses
        return (), actions or ()
    return actions if isinstance(actions, tuple) and event.method != "dispatch" else NOTHING_ENDED


def _text(argument: Any) -> str:
    if isinstance(argument, list) and argument and hasattr(argument[0], "gateway"):
        return _requests(argument)
    name = getattr(argument, "name", None)
    return f"config of {name}" if name else str(argument)


def _requests(requests: Any) -> str:
    return ", ".join(f"{request.gateway}/{request.key}" for request in requests)


def _batch(batch: Batch) -> str:
    where = f"{batch.instance.worker}/{batch.instance.number}"
    return f"batch {batch.id} of version {batch.version} to {where}: {_requests(batch.requests)}"


def _failure(failure: Failure) -> str:
    request, error = failure
    return f"failed: {request.gateway}/{request.key}: {error.code.name}: {error.message}"


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m scheduler.replay", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="an event log: *.events")
    parser.add_argument("--quiet", action="store_true", help="print differences and totals only")
    arguments = parser.parse_args()
    events = batches = ended = differences = 0
    try:
        header, log = read_log(arguments.file)
        replay = Replay(header)
        for event in log:
            actions, difference = replay.feed(event)
            events += 1
            if event.method == "dispatch" and actions is not None:
                batches += len(actions[0])
            else:
                ended += sum(map(len, ended_by(event, actions)))
            if not arguments.quiet or difference:
                print(*lines_of(event, actions), sep="\n")
            if difference:
                differences += 1
                print(f"    DIFFERENT: {difference}")
    except (NotAnEventLog, UnknownState, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(
        f"model {header.model}: {events} events, {batches} batches, {ended} requests ended, {differences} differences"
    )
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
