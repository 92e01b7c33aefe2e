"""`StoredMessages`: reads single messages of streams by their subjects, on the connection of the hot path.

Source: JetStream's direct get (ADR-31): `last_by_subj`, `next_by_subj` and `multi_last`, which takes wildcards.
"""

from __future__ import annotations

import asyncio
from datetime import datetime
from itertools import count
from typing import NamedTuple

import orjson

from bus import durable_subjects as subjects
from bus.connection import Bus, Message
from bus.headers import last_header, parse_headers
from runtime.containment import contained

PATIENCE_S = 5.0
"""How long an answer is waited for."""

_RETRY_S = 0.05  # no stream answers: it is being made, or its server restarts


class StoredMessage(NamedTuple):
    """A message of a stream. `headers` have names in lower case, `header_block` as they lie there; `stored_ms` is unix
    time.
    """

    subject: str
    sequence: int
    stored_ms: int
    headers: dict[str, str]
    header_block: bytes
    data: bytes


class _Question:
    __slots__ = ("answer", "found", "payload", "stream")

    def __init__(self, stream: str, payload: bytes) -> None:
        self.stream = stream
        self.payload = payload
        self.found: StoredMessage | None = None
        self.answer: asyncio.Future[StoredMessage | None] = asyncio.get_running_loop().create_future()


class StoredMessages:
    """See the module. One of a role: `role_id` names it."""

    def __init__(self, bus: Bus, role_id: str) -> None:
        self._bus = bus
        self._inbox = subjects.found(role_id)
        self._numbers = count(1)
        self._questions: dict[int, _Question] = {}

    async def start(self) -> None:
        """Listens for answers, and asks again what had none when the connection was lost."""
        await self._bus.subscribe(f"{self._inbox}.*", self._on_answer)
        self._bus.on_reconnect(self._ask_again)

    async def _ask_again(self) -> None:
        for number in list(self._questions):
            self._send(number)

    async def last(self, stream: str, *filters: str) -> StoredMessage | None:
        """The newest message on some subjects, which may have wildcards; None where there is none.

        Raises TimeoutError where the broker doesn't answer in time, ConnectionError for an answer that can't be read.
        """
        if len(filters) > 1 or "*" in filters[0]:
            return await self._ask(stream, {"multi_last": filters})
        return await self._ask(stream, {"last_by_subj": filters[0]})

    async def next(self, stream: str, subject: str, sequence: int) -> StoredMessage | None:
        """The first message on a subject from this sequence on; otherwise as `last`."""
        return await self._ask(stream, {"seq": sequence, "next_by_subj": subject})

    async def _ask(self, stream: str, question: dict[str, object]) -> StoredMessage | None:
        number = next(self._numbers)
        asked = self._questions[number] = _Question(stream, orjson.dumps(question))
        try:
            self._send(number)
            return await asyncio.wait_for(asked.answer, PATIENCE_S)
        finally:
            del self._questions[number]

    def _send(self, number: int) -> None:
        asked = self._questions.get(number)
        if asked is not None:
            self._bus.publish(f"$JS.API.DIRECT.GET.{asked.stream}", asked.payload, f"{self._inbox}.{number}")

    def _on_answer(self, message: Message) -> None:
        number = message.subject.rpartition(".")[2]
        asked = self._questions.get(int(number)) if number.isascii() and number.isdigit() else None
        if asked is not None and not asked.answer.done():
            self._take_answer(asked, int(number), message)

    @contained(on_error="_fail")
    def _take_answer(self, asked: _Question, number: int, message: Message) -> None:
        if message.status == "503":
            asyncio.get_running_loop().call_later(_RETRY_S, self._send, number)
        elif message.status:  # 404: there is none; 204: that was all
            asked.answer.set_result(asked.found)
        else:
            found = stored_message(message)
            if asked.found is None or asked.found.sequence < found.sequence:
                asked.found = found
            if b"multi_last" not in asked.payload[:16]:
                asked.answer.set_result(found)

    def _fail(self, error: Exception, asked: _Question, _number: int, _message: Message) -> None:
        if not asked.answer.done():
            asked.answer.set_exception(ConnectionError(f"JetStream's answer could not be read: {error}"))


def stored_message(answer: Message) -> StoredMessage:
    """The message that JetStream has answered a direct get with."""
    block = answer.header_block
    time = datetime.fromisoformat(last_header(block, b"Nats-Time-Stamp"))
    return StoredMessage(
        last_header(block, b"Nats-Subject"),
        int(last_header(block, b"Nats-Sequence")),
        int(time.timestamp() * 1000),
        parse_headers(block),
        block,
        answer.data,
    )
