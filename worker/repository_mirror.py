"""`RepositoryMirror`: keeps a folder like a model repository that lies in NATS, for workers that share no file system."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable

from nats.errors import Error as NatsError

from bus import subjects
from bus.connection import Bus, Message
from bus.pushed_models import PushedModels
from schemas.errors import WeirError
from schemas.pushed_model import PushedFile, PushedModel
from worker.mirror_folder import MirrorFolder

logger = logging.getLogger("weir.worker")

FILES_AT_A_TIME = 4
"""Files that a worker fetches side by side."""


class RepositoryMirror:
    """One repository. `on_change()` is awaited after the folder has followed a change.

    What can't be fetched is logged, and leaves the model as it was; it is tried again when it changes or is loaded.
    """

    def __init__(self, bus: Bus, name: str, folder: MirrorFolder, background: asyncio.TaskGroup) -> None:
        self._bus = bus
        self._pushed = PushedModels(bus, name)
        self._folder = folder
        self._background = background
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._fetching = asyncio.Semaphore(FILES_AT_A_TIME)
        self._revisions: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.on_change: Callable[[], Awaitable[None]] = _nothing

    async def start(self, follows: bool) -> None:
        """Fetches all models; with `follows`, also what is pushed from now on."""
        if follows:
            await self._bus.subscribe(subjects.repository_writes(self._pushed.name), self._on_write)
            await self._bus.flush()
            self._bus.on_reconnect(self._refresh_all)
        await self._refresh_all()

    async def refresh(self, name: str) -> None:
        """Sees to it that the folder has the model as it was pushed last."""
        async with self._turns[name]:
            try:
                found = await self._pushed.find(name)
                if found is None:
                    if self._revisions.pop(name, None) is not None:
                        await asyncio.to_thread(self._folder.remove, name)
                        logger.info("'%s' was deleted from repository '%s'", name, self._pushed.name)
                    return
                model, revision = found
                if self._revisions.get(name) != revision:
                    await self._fetch(model)
                    self._revisions[name] = revision
                    logger.info("'%s' was fetched from repository '%s'", name, self._pushed.name)
            except (WeirError, NatsError, OSError, TimeoutError) as error:
                reason = error.message if isinstance(error, WeirError) else f"{type(error).__name__}: {error}"
                logger.error("'%s' can't be fetched from repository '%s': %s", name, self._pushed.name, reason)

    async def stop(self) -> None:
        """Follows no more."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def remove_folder(self) -> None:
        """Removes the models, once nothing runs from them any more."""
        self._folder.close()

    async def _refresh_all(self) -> None:
        names = {*await self._pushed.names(), *self._revisions}
        await asyncio.gather(*(self.refresh(name) for name in sorted(names)))

    def _on_write(self, message: Message) -> None:
        if not self._is_closed:
            task = self._background.create_task(self._follow(subjects.untoken(message.subject.rpartition(".")[2])))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _follow(self, name: str) -> None:
        await self.refresh(name)
        await self.on_change()

    async def _fetch(self, model: PushedModel) -> None:
        contents = {file.digest: file for file in model.files}
        # All are waited for, whatever becomes of one: what goes on must not write to a folder that was given up.
        outcomes = await asyncio.gather(*map(self._fetch_content, contents.values()), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        await asyncio.to_thread(self._folder.install, model)

    async def _fetch_content(self, file: PushedFile) -> None:
        async with self._fetching:
            if await asyncio.to_thread(self._folder.has, file):
                return
            incoming = await asyncio.to_thread(self._folder.receive, file)
            try:
                async for piece in self._pushed.pieces(file):
                    await asyncio.to_thread(incoming.write, piece)
                await asyncio.to_thread(incoming.finish)
            finally:
                incoming.abandon()


async def _nothing() -> None:
    pass
