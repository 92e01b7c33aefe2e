"""`DeadLetters`: lists, replays and removes the durable requests in stream DEAD.

A dead letter is the message as it was published, with headers about its failure. Its terminal record in RESULT says
`dead-lettered`, and the first record of an id counts. So a replay removes that record, then publishes the message under the
same id, then removes the letter. Killed in between it loses nothing, and a repetition costs one more run at most.
Source: JetStream's API: message get, message delete, stream purge (filter, sequence), consumers of headers only.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from nats.js.errors import APIError, NotFoundError

from weir.bus.naming import durable_subjects as subjects
from weir.bus.naming.subjects import untoken
from weir.bus.nats.connection import Bus
from weir.bus.nats.headers import header_rows, pack_headers
from weir.bus.nats.jetstream import EXPECTED_SEQUENCE, StoredMessage
from weir.bus.streams.acked_publisher import AckedPublisher
from weir.bus.streams.stored_objects import has_object, remove_object
from weir.schemas.core.errors import WeirError, not_found, unavailable
from weir.schemas.wire.terminal import Attempt, Outcome, TerminalRecord, unpack_history

SETTLING_S = 30.0
"""A letter is stored before its record. One without a record is not replayed while it is younger than this."""

MAX_SEQUENCE = (1 << 64) - 1
"""nats-server rejects a request with a larger one as malformed."""

_PUBLISH_TIMEOUT_S = 10.0

_MAX_KEPT_ID = 100  # an id has 128 characters at most

_ADDED_HEADERS = ("nats-", "weir-dead-", "weir-attempts", "weir-history", "weir-id")
_AUTHORIZATION = "authorization"
_DEADLINE = "weir-deadline-ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """One dead letter: `sequence` is its place in DEAD, `subject` where it was published, `size_bytes` the size of its
    body.

    `dead_ms` is unix milliseconds. `object` names its body in the object store of requests, if it is there. `rows` are
    all its headers as they were sent, and `body` is empty if only headers were read. `is_truncated`: its body was
    dropped, because the letter with its headers would have been larger than a message may be.
    """

    sequence: int
    model: str
    id: str
    reason: str
    subject: str
    dead_ms: int
    attempts: int
    history: Sequence[Attempt]
    size_bytes: int
    object: str
    is_truncated: bool
    rows: Sequence[tuple[str, str]]
    body: bytes = b""

    def original_headers(self) -> list[tuple[str, str]]:
        """The headers it was published with, except those of JetStream."""
        return [(name, value) for name, value in self.rows if not name.lower().startswith(_ADDED_HEADERS)]


def no_letter(sequence: int) -> WeirError:
    """The error for a sequence of which there is no letter (NOT_FOUND)."""
    return not_found(f"there is no dead letter of sequence {sequence}")


class DeadLetters:
    """Operations on DEAD. The caller starts `publisher` before a replay. All methods raise NatsError and TimeoutError."""

    def __init__(self, bus: Bus, publisher: AckedPublisher) -> None:
        self._bus = bus
        self._publisher = publisher

    async def newest(self, limit: int, model: str = "") -> list[DeadLetter]:
        """The last letters, newest first, without their bodies; of one model, if it is named."""
        first, last = await self._ends()
        span = limit
        while True:
            start = max(first, last - span + 1)
            letters = [letter async for letter in self.headers(start, model)]
            if len(letters) >= limit or start <= first:
                return letters[::-1][:limit]
            span *= 4  # deleted letters and those of other models left too few

    async def headers(self, start: int = 1, model: str = "") -> AsyncIterator[DeadLetter]:
        """The letters from sequence `start` on, without their bodies, oldest first."""
        wanted = subjects.dead(model) if model else subjects.DEAD_SUBJECTS
        messages = self._bus.jetstream.scan(subjects.DEAD_STREAM, wanted, start=start, headers_only=True)
        try:
            async with contextlib.aclosing(messages):
                async for message in messages:
                    yield _letter(message)
        except NotFoundError:
            return

    async def find(self, name: str) -> list[DeadLetter]:
        """The letters of this id, oldest first, else the one of this sequence; without bodies. Raises NOT_FOUND."""
        found = [letter async for letter in self.headers() if letter.id == name]
        if not found and name.isascii() and name.isdecimal():
            found = [await self.get(int(name))]
        if not found:
            raise not_found(f"there is no dead letter of id or sequence '{name}'")
        return found

    async def get(self, sequence: int) -> DeadLetter:
        """The letter of this sequence, with its body. Raises NOT_FOUND."""
        message = None
        if 0 < sequence <= MAX_SEQUENCE:
            with contextlib.suppress(NotFoundError):
                message = await self._bus.jetstream.stored(subjects.DEAD_STREAM, sequence=sequence)
        if message is None:
            raise no_letter(sequence)
        return _letter(message)

    async def replay(self, letter: DeadLetter, has_new_id: bool = False) -> str:
        """Publishes the letter (with its body) on its subject again, and removes it from DEAD; returns its id there.

        Raises UNAVAILABLE if that is impossible, or would have no effect: the letter stays then.
        """
        self._check_subject(letter)
        if letter.object and not await self._has_object(letter.object):
            raise unavailable(f"its body '{letter.object}' is no longer in object store {subjects.REQUEST_OBJECTS}")
        if letter.is_truncated:
            raise unavailable("it was too large to be kept with its body")
        id = f"{letter.id[:_MAX_KEPT_ID]}.r{letter.sequence}" if has_new_id else letter.id
        record = None if has_new_id else await self._take_record(letter)
        subject, headers = letter.subject, letter.original_headers()
        lane, _, version = subjects.durable_target(subject)
        if lane == "event" and any(name.lower() == _AUTHORIZATION for name, _ in headers):
            # What its sender has shown may have expired or been revoked: the operator vouches for it now, on a subject on
            # which producers can't publish.
            subject = subjects.job_event(letter.model, f"replay-{letter.sequence}", version)
            headers = [(name, value) for name, value in headers if name.lower() != _AUTHORIZATION]
        headers = [(header, value) for header, value in headers if header.lower() != _DEADLINE]
        # The id has a header of its own: as `Nats-Msg-Id` JetStream may still know it, and drop the message.
        what = "renamed" if has_new_id else "replay"
        headers += [("Weir-Id", id), ("Nats-Msg-Id", f"{what}-{letter.sequence}-{letter.dead_ms}")]
        try:
            async with asyncio.timeout(_PUBLISH_TIMEOUT_S):
                ack = await self._publisher.store(subject, letter.body, pack_headers(headers))
        except TimeoutError as error:
            # It may be stored later; then the next replay of this letter finds its record.
            raise unavailable("the message broker did not acknowledge the message") from error
        if not ack.is_stored:
            if record is not None:
                block = [(EXPECTED_SEQUENCE, "0"), *record[0]]
                await self._publisher.store(subjects.result(letter.model, letter.id), record[1], pack_headers(block))
            raise unavailable(f"stream QUEUE rejected the message: {ack.description}")
        await self._delete(subjects.DEAD_STREAM, letter.sequence)
        return id

    async def purge(self, letter: DeadLetter) -> None:
        """Removes a letter and its body."""
        await self._delete_object(letter)
        await self._delete(subjects.DEAD_STREAM, letter.sequence)

    async def purge_up_to(self, last: int, model: str = "") -> None:
        """Removes the letters up to this sequence; of one model, if it is named."""
        async for letter in self.headers(model=model):
            if letter.sequence > last:
                break
            await self._delete_object(letter)
        with _rejections():
            filter = subjects.dead(model) if model else subjects.DEAD_SUBJECTS
            await self._bus.jetstream.purge(subjects.DEAD_STREAM, filter, last + 1)

    async def _ends(self) -> tuple[int, int]:
        info = await self._bus.jetstream.find_stream(subjects.DEAD_STREAM)
        return (1, 0) if info is None else (int(info["state"]["first_seq"]), int(info["state"]["last_seq"]))

    @staticmethod
    def _check_subject(letter: DeadLetter) -> None:
        tokens = letter.subject.split(".")
        is_plain = all(tokens) and not any(ch in letter.subject for ch in "*> \t\r\n")
        if not (len(tokens) > 1 and tokens[0] in ("event", "batch") and is_plain and letter.id):
            raise unavailable("its headers do not name its id and a valid subject")

    async def _take_record(self, letter: DeadLetter) -> tuple[list[tuple[str, str]], bytes] | None:
        """Removes the record that says `dead-lettered` from RESULT. Raises UNAVAILABLE if another record is there."""
        subject = subjects.result(letter.model, letter.id)
        try:
            stored = await self._bus.jetstream.stored(subjects.RESULT_STREAM, subject=subject)
        except NotFoundError:
            stored = None
        if stored is None:
            if time.time() * 1000 - letter.dead_ms < SETTLING_S * 1000:
                raise unavailable("its record is not stored yet: try again in half a minute")
            return None
        rows = header_rows(stored.header_block)
        try:
            outcome = TerminalRecord.of({name.lower(): value for name, value in rows}).outcome
        except ValueError as error:
            raise unavailable(f"its record in {subject} is malformed: {error}") from error
        if outcome is not Outcome.DEAD_LETTERED:
            raise unavailable(f"its id has ended as {outcome}: replay it under a new id, or purge it")
        await self._delete(subjects.RESULT_STREAM, stored.sequence)
        kept = [(name, value) for name, value in rows if not name.lower().startswith("nats-")]
        return kept, stored.data

    async def _delete(self, stream: str, sequence: int) -> None:
        with _rejections():
            await self._bus.jetstream.delete(stream, sequence)

    async def _has_object(self, name: str) -> bool:
        return await has_object(self._bus, subjects.REQUEST_OBJECTS, name)

    async def _delete_object(self, letter: DeadLetter) -> None:
        if letter.object:
            await remove_object(self._bus, subjects.REQUEST_OBJECTS, letter.object)


@contextlib.contextmanager
def _rejections() -> Iterator[None]:
    """Raises UNAVAILABLE for a request that JetStream rejects."""
    try:
        yield
    except APIError as error:
        raise unavailable(f"the message broker rejected the operation: {error.description}") from error


def _letter(message: StoredMessage) -> DeadLetter:
    headers, body = message.headers, message.data
    try:
        history = unpack_history(headers.get("weir-history", "[]"))
    except (ValueError, TypeError):
        history = []
    return DeadLetter(
        sequence=message.sequence,
        model=untoken(message.subject.partition(".")[2]),
        id=headers.get("weir-dead-id", ""),
        reason=headers.get("weir-dead-reason", ""),
        subject=headers.get("weir-dead-subject", ""),
        dead_ms=_number(headers.get("weir-dead-ms", ""), message.stored_ms),
        attempts=_number(headers.get("weir-attempts", ""), 0),
        history=history,
        size_bytes=len(body) if body else _number(headers.get("nats-msg-size", ""), 0),
        object=headers.get("weir-object", ""),
        is_truncated="weir-dead-truncated" in headers,
        rows=header_rows(message.header_block),
        body=body,
    )


def _number(text: str, otherwise: int) -> int:
    return int(text) if text.isascii() and text.isdecimal() else otherwise
