"""`DeadLetters`: the durable requests in stream DEAD: looked at, put back into their queue, or thrown away.

A dead letter is the message as it was published, with headers that say what became of it. Its terminal record in RESULT
says `dead-lettered`, and the first record of an id wins: so a replay takes that record away before it publishes the
message under the same id, and the letter last of all. Killed in between it loses nothing, and doing it again costs one
more run at most.
Source: JetStream's API: message get, message delete, stream purge (filter, sequence), consumers of headers only.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

from bus import durable_subjects as subjects
from bus.acked_publisher import AckedPublisher
from bus.connection import Bus
from bus.headers import header_rows, pack_headers
from bus.stored_objects import has_object, remove_object
from bus.subjects import untoken
from schemas.errors import not_found, unavailable
from schemas.terminal import Attempt, Outcome, TerminalRecord, unpack_history

SETTLING_S = 30.0
"""A letter is stored before its record: one so young without a record may still get it, and is not replayed yet."""

_PAGE = 500
_PAGE_PATIENCE_S = 5.0
_PUBLISH_PATIENCE_S = 10.0
_NO_MESSAGE = (10037, 10043)  # JetStream's error codes: there is no such message; it can't be deleted

_MAX_KEPT_ID = 100  # an id has 128 characters at most

_NOT_THE_PRODUCERS = ("nats-", "weir-dead-", "weir-attempts", "weir-history", "weir-id")
_OF_ITS_TIME = "weir-deadline-ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """What is told of one: `sequence` is its place in DEAD, `subject` where it was published, `size_bytes` its body's.

    `dead_ms` is unix milliseconds. `object` names its body in the object store of requests, where it lies there. `rows`
    are all its headers as they came, and `body` is empty where only headers were asked for. `is_truncated`: its body is
    not there, because with it and all that is told of it the letter would have been larger than a message may be.
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
        """The headers it was published with, but those of JetStream."""
        return [(name, value) for name, value in self.rows if not name.lower().startswith(_NOT_THE_PRODUCERS)]


class DeadLetters:
    """See the module. `publisher` is started by whoever replays. All of it raises NatsError and TimeoutError."""

    def __init__(self, bus: Bus, publisher: AckedPublisher) -> None:
        self._bus = bus
        self._publisher = publisher

    async def newest(self, limit: int, model: str = "") -> list[DeadLetter]:
        """The last ones, newest first, without their bodies; of one model, if it is named."""
        first, last = await self._ends()
        span = limit
        while True:
            start = max(first, last - span + 1)
            letters = [letter async for letter in self.headers(start, model)]
            if len(letters) >= limit or start <= first:
                return letters[::-1][:limit]
            span *= 4  # what was deleted, and those of other models, left too few

    async def headers(self, start: int = 1, model: str = "") -> AsyncIterator[DeadLetter]:
        """Those from sequence `start` on that are there now, without their bodies, oldest first."""
        wanted = subjects.dead(model) if model else subjects.DEAD_SUBJECTS
        config = ConsumerConfig(
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=max(1, start),
            filter_subject=wanted,
            ack_policy=AckPolicy.NONE,
            headers_only=True,
            inactive_threshold=30.0,
            mem_storage=True,
        )
        try:
            pull = await self._bus.jetstream.pull_subscribe(wanted, stream=subjects.DEAD_STREAM, config=config)
        except NotFoundError:
            return
        try:
            left = (await pull.consumer_info()).num_pending or 0
            while left > 0:
                try:
                    messages = await pull.fetch(min(left, _PAGE), timeout=_PAGE_PATIENCE_S)
                except TimeoutError:
                    return  # they have grown too old meanwhile
                for message in messages:
                    left -= 1
                    told = message.metadata
                    yield _letter(
                        message.subject,
                        told.sequence.stream,
                        # nats-py reads a value that is not ASCII as an object of module `email`.
                        [(header, str(value)) for header, value in (message.headers or {}).items()],
                        b"",
                        int(told.timestamp.timestamp() * 1000),
                    )
        finally:
            await pull.unsubscribe()

    async def find(self, name: str) -> list[DeadLetter]:
        """Those of this id, oldest first; else the one of this sequence. Without their bodies. Raises NOT_FOUND."""
        found = [letter async for letter in self.headers() if letter.id == name]
        if not found and name.isascii() and name.isdecimal():
            found = [await self.get(int(name))]
        if not found:
            raise not_found(f"there is no dead letter of id or sequence '{name}'")
        return found

    async def get(self, sequence: int) -> DeadLetter:
        """The one of this sequence, with its body. Raises NOT_FOUND."""
        row = await self._message(subjects.DEAD_STREAM, {"seq": sequence})
        if row is None:
            raise not_found(f"there is no dead letter of sequence {sequence}")
        rows = header_rows(base64.b64decode(row.get("hdrs") or b""))
        body = base64.b64decode(row.get("data") or b"")
        stored_ms = int(datetime.fromisoformat(row["time"]).timestamp() * 1000)
        return _letter(row["subject"], int(row["seq"]), rows, body, stored_ms)

    async def replay(self, letter: DeadLetter, has_new_id: bool = False) -> str:
        """Puts the letter (with its body) back where it was published, and out of DEAD; returns the id it has there.

        Raises UNAVAILABLE where that can't be done, or would change nothing: the letter stays then.
        """
        self._check_subject(letter)
        if letter.object and not await self._has_object(letter.object):
            raise unavailable(f"its body '{letter.object}' is no longer in object store {subjects.REQUEST_OBJECTS}")
        if letter.is_truncated:
            raise unavailable("it was too large to be kept with its body")
        id = f"{letter.id[:_MAX_KEPT_ID]}.r{letter.sequence}" if has_new_id else letter.id
        record = None if has_new_id else await self._take_record(letter)
        headers = [(header, value) for header, value in letter.original_headers() if header.lower() != _OF_ITS_TIME]
        # The id by a header of its own: as `Nats-Msg-Id` it may still be remembered, and the message be dropped for it.
        what = "renamed" if has_new_id else "replay"
        headers += [("Weir-Id", id), ("Nats-Msg-Id", f"{what}-{letter.sequence}-{letter.dead_ms}")]
        try:
            async with asyncio.timeout(_PUBLISH_PATIENCE_S):
                ack = await self._publisher.store(letter.subject, letter.body, pack_headers(headers))
        except TimeoutError as error:
            # It may come to be stored; then this one is told by its record, when it is replayed again.
            raise unavailable("the broker did not acknowledge it") from error
        if not ack.is_stored:
            if record is not None:
                block = [("Nats-Expected-Last-Subject-Sequence", "0"), *record[0]]
                await self._publisher.store(subjects.result(letter.model, letter.id), record[1], pack_headers(block))
            raise unavailable(f"the queue refused it: {ack.description}")
        await self._delete(subjects.DEAD_STREAM, letter.sequence)
        return id

    async def purge(self, letter: DeadLetter) -> None:
        """Throws one away, and its body with it."""
        await self._delete_object(letter)
        await self._delete(subjects.DEAD_STREAM, letter.sequence)

    async def purge_up_to(self, last: int, model: str = "") -> None:
        """Throws away those up to this sequence; of one model, if it is named."""
        async for letter in self.headers(model=model):
            if letter.sequence > last:
                break
            await self._delete_object(letter)
        question = {"filter": subjects.dead(model) if model else subjects.DEAD_SUBJECTS, "seq": last + 1}
        _check(await self._bus.ask(f"$JS.API.STREAM.PURGE.{subjects.DEAD_STREAM}", question))

    async def _ends(self) -> tuple[int, int]:
        try:
            state = (await self._bus.jetstream.stream_info(subjects.DEAD_STREAM)).state
        except NotFoundError:
            return 1, 0
        return state.first_seq, state.last_seq

    @staticmethod
    def _check_subject(letter: DeadLetter) -> None:
        tokens = letter.subject.split(".")
        is_plain = all(tokens) and not any(ch in letter.subject for ch in "*> \t\r\n")
        if not (len(tokens) > 1 and tokens[0] in ("event", "batch") and is_plain and letter.id):
            raise unavailable("it does not say under which id and on which subject it was published")

    async def _take_record(self, letter: DeadLetter) -> tuple[list[tuple[str, str]], bytes] | None:
        """Takes the record that says it is dead out of RESULT. Raises UNAVAILABLE where another one stands there."""
        subject = subjects.result(letter.model, letter.id)
        row = await self._message(subjects.RESULT_STREAM, {"last_by_subj": subject})
        if row is None:
            if time.time() * 1000 - letter.dead_ms < SETTLING_S * 1000:
                raise unavailable("its record is not there yet: try again in half a minute")
            return None
        rows = header_rows(base64.b64decode(row.get("hdrs") or b""))
        try:
            outcome = TerminalRecord.of({name.lower(): value for name, value in rows}).outcome
        except ValueError as error:
            raise unavailable(f"its record in {subject} is none: {error}") from error
        if outcome is not Outcome.DEAD_LETTERED:
            raise unavailable(f"its id has ended as {outcome}: replay it under a new id, or purge it")
        await self._delete(subjects.RESULT_STREAM, int(row["seq"]))
        kept = [(name, value) for name, value in rows if not name.lower().startswith("nats-")]
        return kept, base64.b64decode(row.get("data") or b"")

    async def _message(self, stream: str, question: Mapping[str, object]) -> dict[str, str] | None:
        answer = await self._bus.ask(f"$JS.API.STREAM.MSG.GET.{stream}", question)
        error = answer.get("error")
        if error is not None and error.get("code") == 404:
            return None
        _check(answer)
        message: dict[str, str] = answer["message"]
        return message

    async def _delete(self, stream: str, sequence: int) -> None:
        answer = await self._bus.ask(f"$JS.API.STREAM.MSG.DELETE.{stream}", {"seq": sequence})
        if answer.get("error", {}).get("err_code") not in _NO_MESSAGE:
            _check(answer)

    async def _has_object(self, name: str) -> bool:
        return await has_object(self._bus, subjects.REQUEST_OBJECTS, name)

    async def _delete_object(self, letter: DeadLetter) -> None:
        if letter.object:
            await remove_object(self._bus, subjects.REQUEST_OBJECTS, letter.object)


def _check(answer: Mapping[str, object]) -> None:
    error = answer.get("error")
    if isinstance(error, dict):
        raise unavailable(f"the broker did not do as asked: {error.get('description')}")


def _letter(subject: str, sequence: int, rows: list[tuple[str, str]], body: bytes, stored_ms: int) -> DeadLetter:
    headers: dict[str, str] = {}
    for name, value in rows:
        headers.setdefault(name.lower(), value)
    try:
        history = unpack_history(headers.get("weir-history", "[]"))
    except (ValueError, TypeError):
        history = []
    return DeadLetter(
        sequence=sequence,
        model=untoken(subject.partition(".")[2]),
        id=headers.get("weir-dead-id", ""),
        reason=headers.get("weir-dead-reason", ""),
        subject=headers.get("weir-dead-subject", ""),
        dead_ms=_number(headers.get("weir-dead-ms", ""), stored_ms),
        attempts=_number(headers.get("weir-attempts", ""), 0),
        history=history,
        size_bytes=len(body) if body else _number(headers.get("nats-msg-size", ""), 0),
        object=headers.get("weir-object", ""),
        is_truncated="weir-dead-truncated" in headers,
        rows=rows,
        body=body,
    )


def _number(text: str, otherwise: int) -> int:
    return int(text) if text.isascii() and text.isdecimal() else otherwise
