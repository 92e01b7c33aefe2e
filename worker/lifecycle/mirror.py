"""`RepositoryMirrors`: the local copies of the repositories of a worker that are not local.

`RepositoryMirror` keeps a folder equal to a repository in NATS; `weir.worker.lifecycle.cloud_mirror` does it for one in an
object store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from nats.errors import Error as NatsError

from weir.bus.kv.pushed_models import PushedModels
from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus, Message
from weir.repository.stores.addresses import is_cloud_address, parse_address
from weir.repository.stores.cloud import CloudStore
from weir.runtime.containment import contained, report
from weir.schemas.core.errors import WeirError, invalid
from weir.schemas.core.names import repository_of
from weir.schemas.wire.model_control import PushedFile, PushedModel
from weir.worker.lifecycle.cloud_mirror import CloudMirror
from weir.worker.lifecycle.downloads import DownloadProgress, Downloads, DownloadSource
from weir.worker.lifecycle.mirror_folder import MirrorFolder
from weir.worker.lifecycle.store_cache import StoreCache

logger = logging.getLogger("weir.worker")


FILES_AT_A_TIME = 4
"""Files that a worker fetches at a time."""

ATTEMPTS = 5
"""Attempts to fetch a model: the broker may be away for a moment, or another worker may clean up a shared cache."""

_RETRY_S = 1.0
_TRANSIENT = (NatsError, ConnectionError, TimeoutError, FileNotFoundError)


class RepositoryMirror:
    """The mirror of one repository. `on_change()` is awaited after the folder was updated.

    A model that can't be fetched keeps its local state; `problems` has the reason, by model. It is fetched again when it
    changes or is loaded.
    """

    def __init__(self, bus: Bus, pushed: PushedModels, folder: MirrorFolder, background: asyncio.TaskGroup) -> None:
        self._bus = bus
        self._pushed = pushed
        self._folder = folder
        self._background = background
        # Locks disappear with their last user: names come from clients, so their number must not grow.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._fetching = asyncio.Semaphore(FILES_AT_A_TIME)
        self._revisions: dict[str, int] = {}
        self.problems: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.on_change: Callable[[], Awaitable[None]] = _nothing

    async def start(self, follows: bool) -> None:
        """Fetches all models; with `follows`, also those that are pushed from now on."""
        if follows:
            await self._bus.subscribe(subjects.repository_writes(self._pushed.name), self._on_write)
            await self._bus.flush()
            self._bus.on_reconnect(self._follow_all)
        await self._refresh_all()

    async def refresh(self, name: str) -> None:
        """Updates the folder to the version of the model that was pushed last."""
        turn = self._turns.setdefault(name, asyncio.Lock())
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with turn:
                    await self._follow(name)
                self.problems.pop(name, None)
                return
            except Exception as error:  # noqa: BLE001 - an invalid model must not affect the others
                if not isinstance(error, (WeirError, NatsError, OSError, TimeoutError)):
                    report("weir.worker.lifecycle.mirror: fetching a model", error)
                reason = error.message if isinstance(error, WeirError) else f"{type(error).__name__}: {error}"
                logger.error("'%s' can't be fetched from repository '%s': %s", name, self._pushed.name, reason)
                self.problems[name] = f"failed to fetch it from repository '{self._pushed.name}': {reason}"
                if not isinstance(error, _TRANSIENT):
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
        """Stops following changes."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def remove_folder(self) -> None:
        """Removes the local models; called when no instance uses them any more."""
        self._folder.close()

    async def _refresh_all(self) -> None:
        names = {*await self._pushed.names(), *self._revisions}
        await asyncio.gather(*(self.refresh(name) for name in sorted(names)))

    async def _follow_all(self) -> None:
        """Fetches all models again after a reconnect, since pushes may have been missed."""
        if not self._is_closed:
            await self._begin(self._refresh_all())

    def _on_write(self, message: Message) -> None:
        if not self._is_closed:
            self._begin(self.refresh(subjects.untoken(message.subject.rpartition(".")[2])))

    def _begin(self, refreshing: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._background.create_task(self._refresh_and_report(refreshing))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @contained()
    async def _refresh_and_report(self, refreshing: Coroutine[Any, Any, None]) -> None:
        await refreshing
        await self.on_change()

    async def _fetch(self, model: PushedModel) -> None:
        contents = {file.digest: file for file in model.files}
        with self._folder.keeping(model):
            await self._install(model, contents.values())

    async def _install(self, model: PushedModel, contents: Iterable[PushedFile]) -> None:
        # All are awaited, also after a failure: none may write to the folder after it was discarded.
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
                incoming.discard()


async def _nothing() -> None:
    pass


class RepositoryMirrors:
    """All mirrors of a worker: of repositories in NATS, and in object stores (`clouds`). Without any it does nothing.

    `is_listed` is set by `start` once all repositories were listed, or could not be.
    """

    def __init__(
        self,
        mirrors: Sequence[RepositoryMirror] = (),
        clouds: Sequence[CloudMirror] = (),
        progress: DownloadProgress | None = None,
    ) -> None:
        self._mirrors = mirrors
        self._clouds = clouds
        self._all: tuple[RepositoryMirror | CloudMirror, ...] = (*mirrors, *clouds)
        self._progress = progress
        self.is_listed = asyncio.Event()

    async def start(self, follows: bool) -> None:
        """Lists all repositories, and fetches the models of those in NATS; with `follows`, also those pushed later."""
        await asyncio.gather(
            *(mirror.start(follows) for mirror in self._mirrors), *(cloud.start() for cloud in self._clouds)
        )
        self.is_listed.set()

    def pending(self) -> dict[str, tuple[int, ...]]:
        """The models in object stores that are not here yet, with their versions, in the order in which to fetch them."""
        return {name: model.versions for cloud in self._clouds for name, model in cloud.pending().items()}

    @property
    def is_fetching(self) -> bool:
        """Whether models are being downloaded from object stores."""
        return self._progress is not None and self._progress.is_active

    async def refresh(self, name: str) -> None:
        """Updates the folders to the newest version of the model in each repository."""
        await asyncio.gather(
            *(mirror.refresh(name) for mirror in self._mirrors), *(cloud.refresh(name) for cloud in self._clouds)
        )

    async def fetch(self, name: str) -> None:
        """Updates the folders to the version of the model that was listed last."""
        await asyncio.gather(*(cloud.refresh(name, looks=False) for cloud in self._clouds))

    def problems(self) -> dict[str, str]:
        """The reasons why models can't be fetched, by model."""
        return {name: problem for mirror in self._all for name, problem in mirror.problems.items()}

    async def contents(self, looks: bool) -> dict[str, str]:
        """As `problems`, and "" for each model of an object store that can be fetched; with `looks`, as it is now."""
        found = await asyncio.gather(*(cloud.contents(looks) for cloud in self._clouds))
        return {name: problem for part in found for name, problem in part.items()} | self.problems()

    def failures(self) -> list[str]:
        """Why object stores can't be read."""
        return [cloud.failure for cloud in self._clouds if cloud.failure]

    def unusable(self) -> list[str]:
        """The failures of object stores from which nothing was ever fetched to this host."""
        return [cloud.failure for cloud in self._clouds if cloud.is_unusable]

    def follow(self, background: asyncio.TaskGroup, on_change: Callable[[Collection[str]], Awaitable[None]]) -> None:
        """Awaits `on_change(names)` after models of object stores were updated in the background."""
        for cloud in self._clouds:
            cloud.follow(background, on_change)

    def on_status(self, listener: Callable[[], None]) -> None:
        """Calls `listener()` when an object store can't be read any more, or can be read again."""
        for cloud in self._clouds:
            cloud.on_status = listener

    def on_push(self, listener: Callable[[], Awaitable[None]]) -> None:
        """Awaits `listener()` after a model that was pushed was fetched."""
        for mirror in self._mirrors:
            mirror.on_change = listener

    async def stop(self) -> None:
        """Stops following changes."""
        for mirror in self._all:
            await mirror.stop()

    def remove_folders(self) -> None:
        """Removes the local models; called when no instance uses them any more."""
        for mirror in self._all:
            mirror.remove_folder()


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The folder of downloaded files (None: a temporary one for each repository), and its limit in bytes (0: the disk)."""

    folder: Path | None = None
    limit_bytes: int = 0


def open_mirrors(
    bus: Bus,
    repositories: Iterable[Path | str],
    cache: CacheOptions,
    background: asyncio.TaskGroup,
    poll_s: float | None = None,
) -> tuple[list[Path], RepositoryMirrors]:
    """The folders of all repositories in order, and the mirrors of those that are not local. Raises WeirError.

    With `poll_s`, mirrors of object stores follow changes at this interval, in seconds.
    """
    paths: list[Path] = []
    mirrors: list[RepositoryMirror] = []
    clouds: list[CloudMirror] = []
    downloads = Downloads()
    for repository in repositories:
        name = repository_of(repository)
        if name is None and not is_cloud_address(repository):
            paths.append(Path(repository))
            continue
        try:
            folder = MirrorFolder(cache.folder, cache.limit_bytes)
            paths.append(folder.models)
            if name is not None:
                mirrors.append(RepositoryMirror(bus, PushedModels(bus, name), folder, background))
                continue
            store = CloudStore(parse_address(str(repository)))
            source = DownloadSource(store, folder, StoreCache(folder, store.name))
        except OSError as error:
            where = f"repository '{name}'" if name is not None else f"model repository {repository}"
            raise invalid(f"can't create a folder for the models of {where}: {error.strerror}") from error
        clouds.append(CloudMirror(source, downloads, poll_s))
    return paths, RepositoryMirrors(mirrors, clouds, downloads.progress)
