"""`CudaQuestions`: a gateway asks the workers of its host whether they can use GPU memory that a client shares.

The gateway itself never touches a GPU: workers do, and they have opened the memory by the time the client is answered.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import count

from bus import subjects
from bus.connection import Bus, Message
from bus.identity import host
from schemas.errors import invalid, unavailable
from schemas.regions import CudaOpening, pack_cuda_opening, unpack_cuda_opened
from schemas.wire import MalformedMessage

logger = logging.getLogger("weir.gateway")

ANSWER_TIMEOUT_S = 10.0
"""The first answer of a worker takes as long as its GPU needs to start."""


class CudaQuestions:
    """See the module. Everything runs in one event loop."""

    def __init__(self, bus: Bus, gateway_id: str) -> None:
        self._bus = bus
        self._reply = subjects.cuda_opened(gateway_id)
        self._numbers = count(1)
        self._asked: dict[str, tuple[set[str], asyncio.Future[str]]] = {}

    async def start(self) -> None:
        """Listens for answers."""
        await self._bus.subscribe(f"{self._reply}.*", self._on_answer)

    async def open(self, opening: CudaOpening, workers: set[str]) -> None:
        """Returns once one of `workers` has opened the memory. Raises WeirError when none of them can, or none answers."""
        subject = f"{self._reply}.{next(self._numbers)}"
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._asked[subject] = (set(workers), answer)
        try:
            self._bus.publish(subjects.cuda_open(host()), pack_cuda_opening(opening), subject)
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                reason = await answer
        except TimeoutError as error:
            raise unavailable("no worker has answered whether it can use the CUDA shared memory region") from error
        finally:
            del self._asked[subject]
        if reason:
            logger.warning("CUDA shared memory could not be opened: %s", reason)
            raise invalid("failed to register shared memory region: invalid args")

    def close(self, opening: CudaOpening) -> None:
        """Has the workers close what they have opened."""
        self._bus.publish(subjects.cuda_close(host()), pack_cuda_opening(opening))

    def _on_answer(self, message: Message) -> None:
        asked = self._asked.get(message.subject)
        if asked is None:
            return
        waiting, answer = asked
        try:
            worker, reason = unpack_cuda_opened(message.data)
        except MalformedMessage as error:
            logger.warning("subject %s: %s", message.subject, error)
            return
        waiting.discard(worker)
        # One that can is enough: others may not see that GPU.
        if (not reason or not waiting) and not answer.done():
            answer.set_result(reason)
