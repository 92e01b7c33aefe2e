"""`Drains`: asks schedulers for leave to unload versions, so that what is queued or running for them still runs.

Each partition of a model may have another owner, and all of them must let go.
"""

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
"""How long an unloading waits for the scheduler of a partition that does not answer at all."""


class Drains:
    """One worker's questions. `malformed_messages` counts what came and was no answer."""

    def __init__(self, bus: Bus, worker_id: str) -> None:
        self._bus = bus
        self._worker = worker_id
        self._needed: dict[str, dict[int, set[int]]] = {}  # by model and partition, the versions
        self._heard: set[tuple[str, int]] = set()
        self.malformed_messages = 0

    async def start(self) -> None:
        """Listens for answers."""
        await self._bus.subscribe(subjects.drained(self._worker), self._on_answer)

    async def wait(self, model: str, versions: set[int], partitions: int = 1) -> None:
        """Returns when the schedulers of all partitions have let go of these versions of the model.

        One that can't be heard for too long is not waited for.
        """
        await asyncio.sleep(SETTLE_S)
        needed = self._needed[model] = {partition: set(versions) for partition in range(partitions)}
        try:
            await self._ask(model, needed)
        finally:
            if self._needed.get(model) is needed:
                del self._needed[model]

    async def _ask(self, model: str, needed: dict[int, set[int]]) -> None:
        heard_s = dict.fromkeys(needed, time.monotonic())
        while versions := set[int]().union(*needed.values()):
            self._heard.difference_update((model, partition) for partition in heard_s)
            question = pack_drain(self._worker, model, versions)
            self._bus.publish(subjects.drain(model), question, subjects.drained(self._worker))
            await asyncio.sleep(_ASK_INTERVAL_S)
            now_s = time.monotonic()
            for partition in heard_s:
                if (model, partition) in self._heard or not self._bus.is_connected:
                    heard_s[partition] = now_s
                elif needed[partition] and now_s - heard_s[partition] > PATIENCE_S:
                    logger.warning("no scheduler answers: '%s' is unloaded without its leave", model)
                    needed[partition].clear()

    def _on_answer(self, message: Message) -> None:
        if message.status:
            return  # nobody listens: the scheduler is being restarted
        try:
            answer = unpack_drain(message.data)
        except MalformedMessage as error:
            self.malformed_messages += 1
            logger.warning("dropped a message: %s", error)
            return
        needed = self._needed.get(answer.model, {}).get(answer.partition)
        if needed is not None:
            needed.difference_update(answer.versions)
            self._heard.add((answer.model, answer.partition))
