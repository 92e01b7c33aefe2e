"""`python -m weir.scheduler.replay FILE`: feeds a recorded event log to a new `ModelScheduler` and compares the results.

Prints each event with its batches and ended requests, and each difference to the recorded actions. Exit status 1 if
there are differences, 2 if the file is not an event log. It uses neither the clock nor the bus.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from weir.scheduler.batching.batch import Batch
from weir.scheduler.batching.version_scheduler import NOTHING_ENDED, Ended, Failure
from weir.scheduler.model_scheduler import ModelScheduler
from weir.scheduler.recording.event_rows import FORMAT, FORMAT_VERSION, REQUEST_FIELDS, digest_of, unpack_event
from weir.scheduler.recording.state_snapshot import UnsupportedState, unpack_state
from weir.schemas.core.errors import WeirError

_NO_BATCH_ID = 1 << 62
"""First of the batch ids drawn beyond the recorded ones."""


class NotAnEventLog(ValueError):
    """The file is not an event log, or was written by another version of Weir."""


class Header(NamedTuple):
    """The header of a file: its model, the number of its first event, and the packed state before it (None: new policy).

    A new policy is created with `options`.
    """

    model: str
    options: dict[str, int]
    first: int
    unix_us: int
    state: bytes | None


class Event(NamedTuple):
    """One event: the method and its arguments, the batch ids drawn, and the digest of its result.

    `packed` is the first part of the row, which the digest covers.
    """

    number: int
    method: str
    arguments: list[Any]
    keywords: dict[str, Any]
    batch_ids: list[int]
    digest: bytes
    packed: bytes


def read_log(path: Path) -> tuple[Header, Iterator[Event]]:
    """Returns the header and the events of a file, which may end within a row. Raises NotAnEventLog, also while
    iterating.
    """
    rows = _rows(path)
    head = next(rows, None)
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise NotAnEventLog(f"{path} is not an event log of a scheduler")
    if head.get("version") != FORMAT_VERSION or head.get("request_fields") != list(REQUEST_FIELDS):
        raise NotAnEventLog(f"{path} was written by another version of Weir")
    try:
        header = Header(*(head[name] for name in Header._fields))
    except KeyError as error:
        raise NotAnEventLog(f"{path}: field {error} is missing in its header") from error
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
            raise TypeError("batch ids or the digest are missing")
        return Event(*unpack_event(packed), batch_ids, digest, packed)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise NotAnEventLog(f"malformed event: {error}") from error


class Replay:
    """A policy that is fed with recorded events. Raises UnsupportedState if the state of a file can not be read."""

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
            raise UnsupportedState(f"unknown options of a scheduler: {error}") from error

    def feed(self, event: Event) -> tuple[Any, str]:
        """Returns the result of the event, and how it differs from the recorded one ("": not at all)."""
        self._ids = list(reversed(event.batch_ids))
        expected, self._next = self._next, event.number + 1
        try:
            actions = getattr(self.scheduler, event.method)(*event.arguments, **event.keywords)
            digest = digest_of(event.packed, actions)
        except (WeirError, LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
            return None, f"{type(error).__name__}: {error}"
        if event.number != expected:
            return actions, f"event {expected} is missing"
        if self._ids:
            return actions, f"{len(self._ids)} batches fewer than recorded"
        return actions, "" if digest == event.digest else "the result differs from the recorded one"

    def _next_batch_id(self) -> int:
        return self._ids.pop() if self._ids else next(self._unknown_ids)


# Output


def lines_of(event: Event, actions: Any) -> Iterator[str]:
    """Returns the event and its result as readable lines."""
    arguments = [_text(argument) for argument in event.arguments]
    arguments += [f"{name}={_text(argument)}" for name, argument in event.keywords.items()]
    yield f"{event.number} {event.method} {' '.join(arguments)}"
    if event.method == "dispatch" and actions is not None:
        batches, wake_at_us = actions
        for batch in batches:
            yield f"    {_batch(batch)}"
        if wake_at_us is not None:
            yield f"    wakes at {wake_at_us}"
        return
    completed, failures = ended_by(event, actions)
    if completed:
        yield f"    ended: {_requests(completed)}"
    for failure in failures:
        yield f"    {_failure(failure)}"


def ended_by(event: Event, actions: Any) -> Ended:
    """Returns the requests that the event ended; `actions` is its result."""
    if event.method == "enqueue":  # it returns the rejected requests
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
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m weir.scheduler.replay", description=(__doc__ or "").partition("\n")[0]
    )
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
    except (NotAnEventLog, UnsupportedState, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(
        f"model {header.model}: {events} events, {batches} batches, {ended} requests ended, {differences} differences"
    )
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
