"""`RepositoryMirror`: keeps a folder like a model repository that lies in NATS, for workers that share no file system."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any
from weakref import WeakValueDictionary

from nats.errors import Error as NatsError

from bus import subjects
from bus.connection import Bus, Message
from bus.pushed_models import PushedModels
from runtime.containment import contained, report
from schemas.errors import WeirError
from schemas.pushed_model import PushedFile, PushedModel
from worker.mirror_folder import MirrorFolder

logger = logging.getLogger("weir.worker")

FILES_AT_A_TIME = 4
"""Files that a worker fetches side by side."""

ATTEMPTS = 5
"""How often something is fetched in vain: the broker may be away for a moment, or somebody else tidy up a shared cache."""

_RETRY_S = 1.0
_PASSING = (NatsError, ConnectionError, TimeoutError, FileNotFoundError)


class RepositoryMirror:
    """One repository. `on_change()` is awaited after the folder has followed a change.

    What can't be fetched is logged, and leaves the model as it was; it is tried again when it changes or is loaded. Until
    then `problems` says why, by model.
    """

    def __init__(self, bus: Bus, name: str, folder: MirrorFolder, background: asyncio.TaskGroup) -> None:
        self._bus = bus
        self._pushed = PushedModels(bus, name)
        self._folder = folder
        self._background = background
        # A lock is there for as long as somebody holds it or waits for it: names come from clients.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._fetching = asyncio.Semaphore(FILES_AT_A_TIME)
        self._revisions: dict[str, int] = {}
        self.problems: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.on_change: Callable[[], Awaitable[None]] = _nothing

    async def start(self, follows: bool) -> None:
        """Fetches all models; with `follows`, also what is pushed from now on."""
        if follows:
            await self._bus.subscribe(subjects.repository_writes(self._pushed.name), self._on_write)
            await self._bus.flush()
            self._bus.on_reconnect(self._follow_all)
        await self._refresh_all()

    async def refresh(self, name: str) -> None:
        """Sees to it that the folder has the model as it was pushed last."""
        turn = self._turns.setdefault(name, asyncio.Lock())
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with turn:
                    await self._follow(name)
                self.problems.pop(name, None)
                return
            except Exception as error:  # noqa: BLE001 - what one model is stored as must not cost the others
                if not isinstance(error, (WeirError, NatsError, OSError, TimeoutError)):
                    report("worker.repository_mirror: fetching a model", error)
                reason = error.message if isinstance(error, WeirError) else f"{type(error).__name__}: {error}"
                logger.error("'%s' can't be fetched from repository '%s': %s", name, self._pushed.name, reason)
                self.problems[name] = f"failed to fetch it from repository '{self._pushed.name}': {reason}"
                if not isinstance(error, _PASSING):
                    return
            if attempt < ATTEMPTS:
                await asyncio.sleep(_RETRY_S)

    async def _follow(self, name: str) -> None:
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

    async def _follow_all(self) -> None:
        """The broker came back: what was pushed meanwhile was not heard of."""
        if not self._is_closed:
            await self._begin(self._refresh_all())

    def _on_write(self, message: Message) -> None:
        if not self._is_closed:
            self._begin(self.refresh(subjects.untoken(message.subject.rpartition(".")[2])))

    def _begin(self, refreshing: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._background.create_task(self._tell_after(refreshing))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @contained()
    async def _tell_after(self, refreshing: Coroutine[Any, Any, None]) -> None:
        await refreshing
        await self.on_change()

    async def _fetch(self, model: PushedModel) -> None:
        contents = {file.digest: file for file in model.files}
        with self._folder.expecting(model):
            await self._install(model, contents.values())

    async def _install(self, model: PushedModel, contents: Iterable[PushedFile]) -> None:
        # All are waited for, whatever becomes of one: what goes on must not write to a folder that was given up.
        outcomes = await asyncio.gather(*map(self._fetch_content, contents), return_exceptions=True)
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
