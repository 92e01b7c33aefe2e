"""`JetStreamApi`: questions to JetStream over the hot connection: subjects, names of consumers, single messages.

nats-py has no call for some of them, and carries each through a task, a queue and its own parser of headers; there may be
thousands of questions at once after a takeover.
Source: the JetStream API (`$JS.API.STREAM.INFO`, `CONSUMER.NAMES`, `DIRECT.GET` of ADR-31).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from itertools import count
from typing import Any, NamedTuple

import orjson
from nats.js.errors import APIError

from bus.connection import Bus, Message
from bus.stored_messages import StoredMessage, stored_message

_TIMEOUT_S = 5.0
_NO_SUCH_MESSAGE = (10037, 10043, 10057)


class StreamState(NamedTuple):
    """How many messages a stream holds, and the sequence of the last one it ever got."""

    messages: int
    last_sequence: int


class JetStreamApi:
    """See the module. `inbox` is a subject of the role's own, on which answers come with a number as one more token."""

    def __init__(self, bus: Bus, inbox: str) -> None:
        self._bus = bus
        self._inbox = inbox
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[Message]] = {}

    async def start(self) -> None:
        """Listens for answers; a question has none any more once the connection is lost."""
        await self._bus.subscribe(f"{self._inbox}.*", self._on_answer)
        self._bus.on_loss(self._fail_all)

    def _fail_all(self) -> None:
        for answered in self._asked.values():
            if not answered.done():
                answered.set_exception(ConnectionError("the connection to nats-server was lost"))

    async def stream_state(self, stream: str) -> StreamState:
        """Raises nats.js.errors.NotFoundError where there is no such stream, else as `_ask`."""
        state = (await self.ask(f"$JS.API.STREAM.INFO.{stream}", {}))["state"]
        return StreamState(int(state["messages"]), int(state["last_seq"]))

    async def subjects(self, stream: str, filter: str) -> dict[str, int]:
        """How many messages lie on each subject that `filter` matches."""
        found: dict[str, int] = {}
        while True:
            asked = {"subjects_filter": filter, "offset": len(found)}
            answer = await self.ask(f"$JS.API.STREAM.INFO.{stream}", asked)
            page = answer["state"].get("subjects") or {}
            found.update(page)
            if not page or len(found) >= int(answer.get("total", 0)):
                return found

    async def consumer_names(self, stream: str) -> list[str]:
        """The names of all consumers of a stream."""
        names: list[str] = []
        while True:
            answer = await self.ask(f"$JS.API.CONSUMER.NAMES.{stream}", {"offset": len(names)})
            page = answer.get("consumers") or []
            names += page
            if not page or len(names) >= int(answer.get("total", 0)):
                return names

    async def purge(self, stream: str, filter: str, below: int) -> None:
        """Removes the messages on subjects that `filter` matches whose sequences are less than `below`."""
        await self.ask(f"$JS.API.STREAM.PURGE.{stream}", {"filter": filter, "seq": below})

    async def last(self, stream: str, subject: str) -> StoredMessage | None:
        """The last message on `subject`, which is one that a message may have; None where there is none."""
        answer = await self._ask(f"$JS.API.DIRECT.GET.{stream}.{subject}", b"")
        return _found(answer)

    async def first_subject(self, stream: str, filter: str) -> str:
        """The subject of the oldest message on subjects that `filter` matches; "" where there is none."""
        found = await self.first(stream, filter)
        return "" if found is None else found.subject

    async def first(self, stream: str, filter: str, sequence: int = 1) -> StoredMessage | None:
        """The oldest message from `sequence` on, on subjects that `filter` matches; None where there is none."""
        question = orjson.dumps({"seq": sequence, "next_by_subj": filter})
        answer = await self._ask(f"$JS.API.DIRECT.GET.{stream}", question)
        return _found(answer)

    async def delete(self, stream: str, sequence: int) -> None:
        """Removes a message; one that is gone already is no error."""
        try:
            await self.ask(f"$JS.API.STREAM.MSG.DELETE.{stream}", {"seq": sequence, "no_erase": True})
        except APIError as error:
            if error.err_code not in _NO_SUCH_MESSAGE:
                raise

    async def ask(self, subject: str, question: dict[str, Any]) -> dict[str, Any]:
        """JetStream's answer. Raises nats.js.errors.APIError for an error, TimeoutError or ConnectionError for none."""
        answer = await self._ask(subject, orjson.dumps(question))
        if answer.status:
            raise ConnectionError("JetStream does not answer")
        try:
            said: dict[str, Any] = orjson.loads(answer.data)
        except ValueError as error:
            raise ConnectionError("JetStream's answer can't be read") from error
        if "error" in said:
            APIError.from_error(said["error"])
        return said

    def _ask(self, subject: str, data: bytes) -> Awaitable[Message]:
        """The answer; raises TimeoutError where none comes, ConnectionError where the connection is lost meanwhile."""
        number = next(self._numbers)
        answered: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._asked[number] = answered
        self._bus.publish(subject, data, f"{self._inbox}.{number}")
        return self._answer(number, answered)

    async def _answer(self, number: int, answered: asyncio.Future[Message]) -> Message:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await answered
        finally:
            self._asked.pop(number, None)

    def _on_answer(self, message: Message) -> None:
        number = message.subject.rpartition(".")[2]
        answered = self._asked.get(int(number)) if number.isascii() and number.isdigit() else None
        if answered is not None and not answered.done():
            answered.set_result(message)


def _found(answer: Message) -> StoredMessage | None:
    if answer.status == "404":
        return None
    if answer.status:
        raise ConnectionError(f"JetStream could not look up a message: status {answer.status}")
    return stored_message(answer)
