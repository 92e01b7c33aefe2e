"""`ReadinessAnswers`: asks models of this worker whether they are ready, for gateways and workers that want to know."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from bus import subjects
from bus.connection import Bus, Message
from bus.reserved_subjects import may_answer
from runtime.containment import contained
from schemas.readiness import pack_readiness, unpack_readiness_question
from schemas.wire import MalformedMessage
from worker.model_loader import LoadedResult

logger = logging.getLogger("weir.worker")

MAX_QUESTIONS = 1_000
"""Questions that wait for models; more are answered with no."""


class ReadinessAnswers:
    """See the module. `models` are those of the worker, by their identities. Everything runs in its event loop."""

    def __init__(self, bus: Bus, worker_id: str, models: Mapping[str, LoadedResult]) -> None:
        self._bus = bus
        self._worker_id = worker_id
        self._models = models
        self._background: asyncio.TaskGroup | None = None
        self._waiting: set[asyncio.Task[None]] = set()
        self.malformed_messages = 0

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Listens for questions; answers them in tasks of `background`."""
        self._background = background
        await self._bus.subscribe(subjects.readiness(self._worker_id), self._on_question)

    def _on_question(self, message: Message) -> None:
        assert self._background is not None  # noqa: S101 - started before anything comes
        try:
            model, version = unpack_readiness_question(message.data)
        except MalformedMessage as error:
            self.malformed_messages += 1
            logger.warning("subject %s: %s", message.subject, error)
            return
        if not may_answer(message, subjects.readiness_answers("")):
            return
        if len(self._waiting) >= MAX_QUESTIONS:
            self._bus.publish(message.reply, pack_readiness(False))
            return
        task = self._background.create_task(self._answer(model, version, message.reply))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _answer(self, model: str, version: int, reply: str) -> None:
        self._bus.publish(reply, pack_readiness(await self._is_ready(model, version)))

    @contained(on_error="_asking_failed")
    async def _is_ready(self, model: str, version: int) -> bool:
        """Whether the version can run, and no instance that would run it says that it is not ready."""
        result = self._models.get(model)
        served = None if result is None else result.served.get(version)
        if served is None:
            return False
        health = served.model.health
        answers = await asyncio.gather(*(probe.ask() for probe in health.probes()))
        return all(answers) and not health.problem

    def _asking_failed(self, _error: Exception, _model: str, _version: int) -> bool:
        return False
