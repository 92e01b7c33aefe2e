"""`Drains`: asks the scheduler for leave to unload versions, so that what is queued or running for them still runs."""

from __future__ import annotations

import asyncio
import logging
import time

from bus import subjects
from bus.connection import Bus, Message
from schemas.drain import pack_drain, unpack_drain
from schemas.wire import MalformedMessage

logger = logging.getLogger("weir.worker")

SETTLE_S = 0.1
"""Requests that gateways took before they saw the unloading are on their way to the scheduler for so long."""

_ASK_INTERVAL_S = 0.1
PATIENCE_S = 30.0
"""How long an unloading waits for a scheduler that does not answer at all."""


class Drains:
    """One worker's questions. `malformed_messages` counts what came and was no answer."""

    def __init__(self, bus: Bus, worker_id: str) -> None:
        self._bus = bus
        self._worker = worker_id
        self._needed: dict[str, set[int]] = {}
        self._heard: set[str] = set()
        self.malformed_messages = 0

    async def start(self) -> None:
        """Listens for answers."""
        await self._bus.subscribe(subjects.drained(self._worker), self._on_answer)

    async def wait(self, model: str, versions: set[int]) -> None:
        """Returns when the scheduler has let go of these versions of the model, or can't be heard for too long."""
        await asyncio.sleep(SETTLE_S)
        needed = self._needed[model] = set(versions)
        try:
            await self._ask(model, needed)
        finally:
            if self._needed.get(model) is needed:
                del self._needed[model]

    async def _ask(self, model: str, needed: set[int]) -> None:
        heard_s = time.monotonic()
        while needed:
            self._heard.discard(model)
            question = pack_drain(self._worker, model, needed)
            self._bus.publish(subjects.drain(model), question, subjects.drained(self._worker))
            await asyncio.sleep(_ASK_INTERVAL_S)
            if model in self._heard or not self._bus.is_connected:
                heard_s = time.monotonic()
            elif time.monotonic() - heard_s > PATIENCE_S:
                logger.warning("no scheduler answers: '%s' is unloaded without its leave", model)
                return

    def _on_answer(self, message: Message) -> None:
        if message.status:
            return  # nobody listens: the scheduler is being restarted
        try:
            answer = unpack_drain(message.data)
        except MalformedMessage as error:
            self.malformed_messages += 1
            logger.warning("dropped a message: %s", error)
            return
        if answer.model in self._needed:
            self._needed[answer.model] -= set(answer.versions)
            self._heard.add(answer.model)
