"""`CudaAnswers`: tells gateways whether the GPU memory that a client shares can be used, and closes what is shared no more.

A thread of its own asks CUDA, which takes its time: hundreds of milliseconds when a GPU is used first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from bus import subjects
from bus.client_regions import RegionUnusable
from bus.connection import Bus, Message
from bus.identity import host
from bus.reserved_subjects import may_answer
from runtime.containment import contained
from schemas.regions import CudaOpening, pack_cuda_opened, unpack_cuda_opening
from schemas.wire import MalformedMessage
from worker.cuda_regions import CudaRegions

logger = logging.getLogger("weir.worker")

MAX_WAITING = 256
"""Questions that wait for the thread; gateways get no answer to more."""


class CudaAnswers:
    """See the module."""

    def __init__(self, bus: Bus, worker_id: str, regions: CudaRegions) -> None:
        self._bus = bus
        self._worker_id = worker_id
        self._regions = regions
        self._thread = ThreadPoolExecutor(1, "cuda-regions")
        self._waiting: set[asyncio.Task[None]] = set()
        self._background: asyncio.TaskGroup | None = None

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Listens for questions; answers them in tasks of `background`."""
        self._background = background
        await self._bus.subscribe(subjects.cuda_open(host()), lambda message: self._take(message, self._opened))
        await self._bus.subscribe(subjects.cuda_close(host()), lambda message: self._take(message, self._closed))

    def _take(self, message: Message, act: Callable[[CudaOpening], str]) -> None:
        assert self._background is not None  # noqa: S101 - started before anything comes
        try:
            opening = unpack_cuda_opening(message.data)
        except MalformedMessage as error:
            logger.warning("subject %s: %s", message.subject, error)
            return
        if len(self._waiting) >= MAX_WAITING:
            return
        reply = message.reply if may_answer(message, subjects.cuda_opened("")) else ""
        task = self._background.create_task(self._answer(opening, act, reply))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    @contained()
    async def _answer(self, opening: CudaOpening, act: Callable[[CudaOpening], str], reply: str) -> None:
        reason = await asyncio.get_running_loop().run_in_executor(self._thread, act, opening)
        if reply:
            self._bus.publish(reply, pack_cuda_opened(self._worker_id, reason))

    def _opened(self, opening: CudaOpening) -> str:
        try:
            self._regions.check(*opening)
        except RegionUnusable as error:
            return str(error) or "it can't be opened"
        return ""

    def _closed(self, opening: CudaOpening) -> str:
        self._regions.close(opening.handle, opening.device_id)
        return ""
