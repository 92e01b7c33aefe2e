"""`Readiness`: is a model ready, and is the server? What the registry tells, and what models say that have a say in it.

Most models have none: then nobody is asked. A Python model with `is_ready` is asked each time, as in Triton, by its worker;
a version is ready when one of its workers says so. A question is never answered by what was said before it came: those who
ask while one is under way share the next.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import count

from bus import subjects
from bus.connection import Bus, Message
from calls.catalog import Catalog
from runtime.containment import contained
from runtime.log_limiter import LogLimiter
from schemas.readiness import pack_readiness_question, unpack_readiness
from schemas.wire import MalformedMessage

logger = logging.getLogger("weir.calls")

_limited = LogLimiter(logger)

ANSWER_TIMEOUT_S = 6.0
"""How long workers may take to ask their models, which have 5 s; then the version is not ready."""

Key = tuple[str, int]
"""The identity of a model, and a version."""


class Readiness:
    """See the module. Everything runs in one event loop. `asker_id` is the role's."""

    def __init__(self, bus: Bus, asker_id: str, catalog: Catalog) -> None:
        self._bus = bus
        self._subject = subjects.readiness_answers(asker_id)
        self._catalog = catalog
        self._numbers = count(1)
        self._asked: dict[str, asyncio.Future[bool]] = {}
        self._running: dict[Key, asyncio.Task[bool]] = {}
        self._next: dict[Key, asyncio.Task[bool]] = {}
        self.malformed_messages = 0

    async def start(self) -> None:
        """Listens for answers."""
        await self._bus.subscribe(f"{self._subject}.*", self._on_answer)

    async def is_ready(self, name: str, version: str) -> bool:
        """Whether this version of a model ("" for the latest) is ready; False for what is unknown.

        Raises WeirError (INVALID_ARG) for what can't be a version.
        """
        if not self._catalog.is_ready(name, version):
            return False
        served = self._catalog.resolve(name, version)
        return await self._agrees((served.name, int(version or served.latest)))

    async def is_server_ready(self) -> bool:
        """Whether the server is ready; where that is strict, all models that have a say in it are asked."""
        if not self._catalog.server_ready():
            return False
        if not self._catalog.is_strict:
            return True
        keys = [(served.name, version) for served in self._catalog.served() for version in served.versions]
        asked = [self._agrees(key) for key in keys if self._has_a_say(key)]
        return all(await asyncio.gather(*asked)) if asked else True

    def _has_a_say(self, key: Key) -> bool:
        """Whether the model is to be asked: one worker that need not ask is enough."""
        rows = [row for _, row in self._catalog.told_of(*key) if not row.problem]
        return bool(rows) and all(row.asks for row in rows)

    async def _agrees(self, key: Key) -> bool:
        if not self._has_a_say(key):
            return True
        task = self._next.get(key)
        if task is None:
            task = self._next[key] = asyncio.get_running_loop().create_task(
                self._ask_after(self._running.get(key), key)
            )
        return await asyncio.shield(task)

    async def _ask_after(self, running: asyncio.Task[bool] | None, key: Key) -> bool:
        if running is not None:
            await asyncio.wait({running})
        task = self._running[key] = self._next.pop(key)
        try:
            return await self._ask(key)
        finally:
            if self._running.get(key) is task:
                del self._running[key]

    async def _ask(self, key: Key) -> bool:
        workers = [worker for worker, row in self._catalog.told_of(*key) if not row.problem]
        answers: dict[str, asyncio.Future[bool]] = {}
        for worker in workers:
            reply = f"{self._subject}.{next(self._numbers)}"
            answers[reply] = self._asked[reply] = asyncio.get_running_loop().create_future()
            self._bus.publish(subjects.readiness(worker), pack_readiness_question(*key), reply)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                for answer in asyncio.as_completed(answers.values()):
                    if await answer:
                        return True
        except TimeoutError:
            _limited.warning("late", "model '%s' version %d did not say in time whether it is ready", *key)
        finally:
            for reply in answers:
                del self._asked[reply]
        return False

    @contained(on_error="_answer_failed")
    def _on_answer(self, message: Message) -> None:
        answer = self._asked.get(message.subject)
        if answer is None or answer.done():
            return
        if not message.data:
            answer.set_result(False)  # nats-server says that the worker is gone
            return
        try:
            answer.set_result(unpack_readiness(message.data))
        except MalformedMessage as error:
            self.malformed_messages += 1
            _limited.warning("malformed", "dropped a malformed message about readiness: %s", error)

    def _answer_failed(self, _error: Exception, message: Message) -> None:
        answer = self._asked.get(message.subject)
        if answer is not None and not answer.done():
            answer.set_result(False)
