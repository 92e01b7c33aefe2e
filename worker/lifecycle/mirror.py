"""`RepositoryMirror`: keeps a local folder equal to a model repository in an object store or in NATS.

The store is asked for one listing, which shows by sizes and tags what has changed; only that is downloaded. A store that
fails or hangs leaves the local models as they are. At the start, models that were fetched before serve from the cache.
`RepositoryMirrors` are those of a worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from weir.bus.nats.connection import Bus
from weir.repository.paths import check_folder_name
from weir.repository.stores.addresses import is_cloud_address, parse_address
from weir.repository.stores.cloud import CloudStore
from weir.repository.stores.store import ModelStore, StoredModel, StoreError
from weir.runtime.containment import contained, report
from weir.schemas.core.errors import WeirError, invalid
from weir.schemas.core.names import repository_of
from weir.worker.lifecycle.downloads import DownloadProgress, Downloads
from weir.worker.lifecycle.model_cache import ModelCache
from weir.worker.lifecycle.pushed_store import PushedStore

logger = logging.getLogger("weir.worker")

ATTEMPTS = 3
"""Attempts to fetch a model: its objects may be replaced meanwhile."""

START_TIMEOUT_S = 15.0
"""How long a store may delay the start: models that were fetched before are loaded then."""

LOOK_TIMEOUT_S = 10.0
"""How long a store may delay a load request; an older listing counts then."""

LOOKS_AT_A_TIME = 16
"""Requests for single models that a mirror sends at a time."""

RETRY_S = 1.0
"""Time before the first repetition in the background, doubled up to `MAX_RETRY_S`."""

MAX_RETRY_S = 30.0
"""Longest time between two repetitions."""

SETTLE_S = 1.0
"""Time for which a changed model must not change further before it is fetched: uploads write file by file."""

MAX_SETTLE_LISTINGS = 60
"""Listings of a model that still changes, before it is fetched as it is."""

LISTING_AGE_S = 1.0
"""Age up to which a listing answers queries for the contents of the repository."""


class RepositoryMirror:
    """The mirror of one repository. Runs in the event loop.

    A model that can't be fetched keeps its local state; `problems` has the reason, by model. `failure` says why the
    repository can't be read, "" while it can. With `follows`, what changes is fetched: when the store reports it, else by a
    listing every `poll_s` seconds (None: never).
    """

    def __init__(
        self,
        store: ModelStore,
        cache: ModelCache,
        downloads: Downloads,
        follows: bool = False,
        poll_s: float | None = None,
    ) -> None:
        self._store = store
        self._cache = cache
        self._downloads = downloads
        self._background: asyncio.TaskGroup | None = None
        self._follows = follows
        self._poll_s = poll_s if follows else None
        self._looks = asyncio.Semaphore(LOOKS_AT_A_TIME)
        self._listed: dict[str, StoredModel] = {}
        self._listed_s = 0.0
        self._listing = asyncio.Lock()
        self._looked: set[str] = set()
        self._installed: dict[str, StoredModel] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._on_change: Callable[[Collection[str]], Awaitable[None]] = _nothing
        self._changed: set[str] = set()
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._updating: set[str] = set()
        self.problems: dict[str, str] = {}
        self.failure = ""
        self.is_unusable = False
        self.on_status: Callable[[], None] = _nothing_changes

    @property
    def name(self) -> str:
        """The address of the repository."""
        return self._store.name

    async def start(self) -> None:
        """Lists the repository. If that fails, the models are those that were fetched before; without any such listing,
        `is_unusable` is True.
        """
        try:
            await self._list(START_TIMEOUT_S)
            return
        except StoreError as error:
            self._fail(error)
        self.is_unusable = not self._cache.was_listed
        self._listed = await asyncio.to_thread(self._cache.listings)
        if self._listed:
            logger.warning(
                "%d models of %s are as they were fetched last, until it can be read", len(self._listed), self.name
            )

    def pending(self) -> Mapping[str, StoredModel]:
        """The listed models that are not up to date here, the smallest first."""
        models = [model for name, model in self._listed.items() if self._installed.get(name) != model]
        return {model.name: model for model in sorted(models, key=lambda model: (model.size_bytes, model.name))}

    async def contents(self, looks: bool) -> Mapping[str, str]:
        """Why each model of the repository can't be fetched, by name ("": it can); with `looks`, from a new listing."""
        if looks and time.monotonic() - self._listed_s > LISTING_AGE_S:
            try:
                await self._list(LOOK_TIMEOUT_S)
            except StoreError as error:
                self._fail(error)
        return {name: self.problems.get(name, model.problem) for name, model in self._listed.items()}

    async def refresh(self, name: str, looks: bool = True) -> None:
        """Updates the local copy of a model; with `looks`, to what the store has now, else to what was listed last."""
        try:
            check_folder_name(name)
        except WeirError as error:
            self._report(name, error)
            return
        turn = self._turns.setdefault(name, asyncio.Lock())
        async with turn:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    if looks or attempt > 1:
                        await self._look(name)
                    await self._follow(name)
                    self.problems.pop(name, None)
                    return
                except Exception as error:  # noqa: BLE001 - an invalid model must not affect the others
                    if not isinstance(error, (WeirError, OSError)):
                        report("weir.worker.lifecycle.mirror: fetching a model", error)
                    is_passing = isinstance(error, StoreError) and (error.has_changed or error.is_transient)
                    if not is_passing or attempt == ATTEMPTS:
                        self._report(name, error)
                        return
                await asyncio.sleep(RETRY_S)

    async def _look(self, name: str) -> None:
        """Lists the folder of one model. While the store is away, the model is as it was listed last."""
        try:
            async with self._looks, asyncio.timeout(LOOK_TIMEOUT_S):
                found = await self._store.find(name)
        except (StoreError, TimeoutError) as error:
            why = (
                error.message
                if isinstance(error, StoreError)
                else f"{self.name} did not answer in {LOOK_TIMEOUT_S:g} s"
            )
            logger.warning("'%s' counts as it was listed last: %s", name, why)
            return
        if self._listing.locked():
            self._looked.add(name)
        if found is None:
            self._listed.pop(name, None)
        else:
            self._listed[name] = found

    async def _follow(self, name: str) -> None:
        model = self._listed.get(name)
        if model is None:
            if self._installed.pop(name, None) is not None:
                await asyncio.to_thread(self._cache.remove, name)
                logger.info("'%s' was deleted from %s", name, self.name)
            return
        if self._installed.get(name) == model:
            return
        await self._downloads.fetch(self._store, self._cache, model)
        self._installed[name] = model
        logger.info("'%s' was fetched from %s", name, self.name)
        if not model.versions:
            logger.warning("'%s' of %s has no files of a version yet: its upload may be incomplete", name, self.name)

    def _report(self, name: str, error: Exception) -> None:
        reason = f"failed to fetch it from {self.name}: {type(error).__name__}: {error}"
        if isinstance(error, WeirError):
            reason = error.message
        if self.problems.get(name) != reason:
            logger.error("'%s' can't be fetched: %s", name, reason)
        if name in self._listed:  # other names come from clients, and must not be kept
            self.problems[name] = reason

    # Listings

    async def _list(self, timeout_s: float | None = None) -> None:
        try:
            async with asyncio.timeout(timeout_s), self._listing:
                self._looked.clear()
                listed = dict(await self._store.models())
        except TimeoutError as error:
            message = f"model repository {self.name} can't be listed: the store did not answer in {timeout_s:g} s"
            raise StoreError(message, is_transient=True) from error
        for name in self._looked:  # since the listing began
            listed.pop(name, None)
            listed.update({name: self._listed[name]} if name in self._listed else {})
        self._listed, self._listed_s = listed, time.monotonic()
        self.problems = {name: problem for name, problem in self.problems.items() if name in listed}
        await asyncio.to_thread(self._cache.mark_listed)
        self.is_unusable = False
        if self.failure:
            self.failure = ""
            self.on_status()
            logger.info("model repository %s can be read again", self.name)

    def _fail(self, error: StoreError) -> None:
        if self.failure != error.message:
            logger.error("%s; its models stay as they are until it can be read", error.message)
            self.failure = error.message
            self.on_status()

    # Changes

    def follow(self, background: asyncio.TaskGroup, on_change: Callable[[Collection[str]], Awaitable[None]]) -> None:
        """Awaits `on_change(names)` after models were updated: changed ones, and those that could not be fetched yet."""
        self._background, self._on_change = background, on_change
        self._begin(self._follow_changes())

    async def stop(self) -> None:
        """Stops following changes."""
        self._background = None
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def remove_folder(self) -> None:
        """Removes the local models; called when no instance uses them any more."""
        self._cache.close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        if self._background is None:  # it was stopped
            work.close()
            return
        task = self._background.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_store_change(self, name: str) -> None:
        self._begin(self._update(name, looks=True) if name else self._poll_again())

    async def _follow_changes(self) -> None:
        if self._follows and await self._store.subscribe(self._on_store_change):
            self._poll_s = None
            await self._poll()  # for what has changed since the start
        await self._keep_polling()

    async def _poll_again(self) -> None:
        await self._poll()
        await self._keep_polling()

    async def _keep_polling(self) -> None:
        """Polls at the interval; without one, until the repository and all models could be read."""
        pause_s, took_s = RETRY_S, 0.0
        while self._poll_s is not None or self.failure or self._missing():
            if self._poll_s is None:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_RETRY_S)
            else:  # a store that is slower than the interval is left alone for as long as a listing takes
                await asyncio.sleep(max(self._poll_s - took_s, min(took_s, self._poll_s)))
            started_s = time.monotonic()
            await self._poll()
            took_s = time.monotonic() - started_s

    def _missing(self) -> list[str]:
        """The listed models of which there is no version here, the smallest first."""
        return [name for name in self.pending() if name not in self._installed]

    @contained()
    async def _poll(self) -> None:
        """Lists the repository and starts to update what has changed; unless it `follows`, what could not be fetched."""
        before = self._listed
        try:
            await self._list()
        except StoreError as error:
            self._fail(error)
            return
        changed = list(self.pending()) if self._follows else self._missing()
        gone = self._installed.keys() - self._listed.keys() if self._follows else ()
        for name in (*changed, *gone):
            if name not in self._updating:
                self._updating.add(name)
                has_changed = before.get(name) != self._listed.get(name)
                self._begin(self._update(name, settles=has_changed and self._poll_s is not None))

    @contained()
    async def _update(self, name: str, settles: bool = False, looks: bool = False) -> None:
        """Updates one model. With `settles` it has just changed, and waits until it does not change further."""
        try:
            before = self._installed.get(name)
            if settles and name in self._listed:
                await self._settle(name)
            await self.refresh(name, looks)
            if self._installed.get(name) != before:
                self._changed.add(name)
                await self._notify()
        finally:
            self._updating.discard(name)

    async def _settle(self, name: str) -> None:
        for _ in range(MAX_SETTLE_LISTINGS):
            before = self._listed.get(name)
            await asyncio.sleep(SETTLE_S)
            await self._look(name)
            if self._listed.get(name) == before:
                return

    async def _notify(self) -> None:
        """Reports changed models; those that change during a report share the next one."""
        async with self._changing:
            if self._changed:
                changed, self._changed = self._changed, set()
                await self._on_change(changed)


async def _nothing(names: Collection[str]) -> None:
    pass


def _nothing_changes() -> None:
    pass


class RepositoryMirrors:
    """All mirrors of a worker. Without any it does nothing.

    `is_listed` is set by `start` once all repositories were listed, or could not be.
    """

    def __init__(self, mirrors: Sequence[RepositoryMirror] = (), progress: DownloadProgress | None = None) -> None:
        self._mirrors = mirrors
        self._progress = progress
        self.is_listed = asyncio.Event()

    async def start(self) -> None:
        """Lists all repositories."""
        await asyncio.gather(*(mirror.start() for mirror in self._mirrors))
        self.is_listed.set()

    def pending(self) -> dict[str, tuple[int, ...]]:
        """The models that are not here yet, with their versions, in the order in which to fetch them."""
        return {name: model.versions for mirror in self._mirrors for name, model in mirror.pending().items()}

    @property
    def is_fetching(self) -> bool:
        """Whether models are being downloaded."""
        return self._progress is not None and self._progress.is_active

    async def refresh(self, name: str) -> None:
        """Updates the folders to the newest version of the model in each repository."""
        await asyncio.gather(*(mirror.refresh(name) for mirror in self._mirrors))

    async def fetch(self, name: str) -> None:
        """Updates the folders to the version of the model that was listed last."""
        await asyncio.gather(*(mirror.refresh(name, looks=False) for mirror in self._mirrors))

    def problems(self) -> dict[str, str]:
        """The reasons why models can't be fetched, by model."""
        return {name: problem for mirror in self._mirrors for name, problem in mirror.problems.items()}

    async def contents(self, looks: bool) -> dict[str, str]:
        """As `problems`, and "" for each model that can be fetched; with `looks`, as it is now."""
        found = await asyncio.gather(*(mirror.contents(looks) for mirror in self._mirrors))
        return {name: problem for part in found for name, problem in part.items()}

    def failures(self) -> list[str]:
        """Why repositories can't be read."""
        return [mirror.failure for mirror in self._mirrors if mirror.failure]

    def unusable(self) -> list[str]:
        """The failures of repositories from which nothing was ever fetched to this host."""
        return [mirror.failure for mirror in self._mirrors if mirror.is_unusable]

    def follow(self, background: asyncio.TaskGroup, on_change: Callable[[Collection[str]], Awaitable[None]]) -> None:
        """Awaits `on_change(names)` after models were updated in the background."""
        for mirror in self._mirrors:
            mirror.follow(background, on_change)

    def on_status(self, listener: Callable[[], None]) -> None:
        """Calls `listener()` when a repository can't be read any more, or can be read again."""
        for mirror in self._mirrors:
            mirror.on_status = listener

    async def stop(self) -> None:
        """Stops following changes."""
        for mirror in self._mirrors:
            await mirror.stop()

    def remove_folders(self) -> None:
        """Removes the local models; called when no instance uses them any more."""
        for mirror in self._mirrors:
            mirror.remove_folder()


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The folder of downloaded models (None: a temporary one for each repository), and its limit in bytes (0: the disk)."""

    folder: Path | None = None
    limit_bytes: int = 0


def open_mirrors(
    bus: Bus,
    repositories: Iterable[Path | str],
    cache: CacheOptions,
    follows: bool = False,
    poll_s: float | None = None,
) -> tuple[list[Path], RepositoryMirrors]:
    """The folders of all repositories in order, and the mirrors of those that are not local. Raises WeirError.

    With `follows`, mirrors follow changes; object stores are listed at the interval `poll_s`, in seconds (None: never).
    """
    paths: list[Path] = []
    mirrors: list[RepositoryMirror] = []
    downloads = Downloads()
    for repository in repositories:
        name = repository_of(repository)
        if name is None and not is_cloud_address(repository):
            paths.append(Path(repository))
            continue
        store: ModelStore = CloudStore(parse_address(str(repository))) if name is None else PushedStore(bus, name)
        try:
            models = ModelCache(store.name, cache.folder, cache.limit_bytes)
        except OSError as error:
            reason = error.strerror
            raise invalid(f"can't create a folder for the models of model repository {repository}: {reason}") from error
        paths.append(models.models)
        mirrors.append(RepositoryMirror(store, models, downloads, follows, poll_s))
    return paths, RepositoryMirrors(mirrors, downloads.progress)
