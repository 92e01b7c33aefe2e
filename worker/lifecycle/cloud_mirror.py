"""`CloudMirror`: keeps a local folder equal to a model repository in an object store.

The store is asked for one listing, which shows by sizes and tags what has changed; only that is downloaded. A store that
fails or hangs leaves the local models as they are. At the start, models that were fetched before serve from the cache.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any
from weakref import WeakValueDictionary

from weir.repository.paths import check_folder_name
from weir.repository.stores.store import StoredModel, StoreError
from weir.runtime.containment import contained, report
from weir.schemas.core.errors import WeirError
from weir.worker.lifecycle.downloads import Downloads, DownloadSource

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


class CloudMirror:
    """The mirror of one repository in an object store. Runs in the event loop.

    A model that can't be fetched keeps its local state; `problems` has the reason, by model. `failure` says why the
    repository can't be read, "" while it can. With `poll_s`, changes are followed at this interval, in seconds.
    """

    def __init__(self, source: DownloadSource, downloads: Downloads, poll_s: float | None = None) -> None:
        self._source = source
        self._downloads = downloads
        self._poll_s = poll_s
        self._looks = asyncio.Semaphore(LOOKS_AT_A_TIME)
        self._listed: dict[str, StoredModel] = {}
        self._listed_s = 0.0
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
        self._is_marked = False

    @property
    def name(self) -> str:
        """The address of the repository."""
        return self._source.store.name

    async def start(self) -> None:
        """Lists the repository. If that fails, the models are those that were fetched before; without any such listing,
        `is_unusable` is True.
        """
        try:
            await self._list(START_TIMEOUT_S)
            return
        except StoreError as error:
            self._fail(error)
        cache = self._source.cache
        self.is_unusable = not await asyncio.to_thread(lambda: cache.was_listed)
        self._listed = await asyncio.to_thread(cache.listings)
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
                        report("weir.worker.lifecycle.cloud_mirror: fetching a model", error)
                    is_passing = isinstance(error, StoreError) and (error.has_changed or error.is_transient)
                    if not is_passing or attempt == ATTEMPTS:
                        self._report(name, error)
                        return
                await asyncio.sleep(RETRY_S)

    async def _look(self, name: str) -> None:
        """Lists the folder of one model. While the store is away, the model is as it was listed last."""
        try:
            async with self._looks, asyncio.timeout(LOOK_TIMEOUT_S):
                found = await self._source.store.find(name)
        except (StoreError, TimeoutError) as error:
            why = (
                error.message
                if isinstance(error, StoreError)
                else f"{self.name} did not answer in {LOOK_TIMEOUT_S:g} s"
            )
            logger.warning("'%s' counts as it was listed last: %s", name, why)
            return
        if found is None:
            self._listed.pop(name, None)
        else:
            self._listed[name] = found

    async def _follow(self, name: str) -> None:
        model = self._listed.get(name)
        if model is None:
            if self._installed.pop(name, None) is not None:
                await asyncio.to_thread(self._source.folder.remove, name)
                await asyncio.to_thread(self._source.cache.forget_listing, name)
                logger.info("'%s' was deleted from %s", name, self.name)
            return
        if self._installed.get(name) == model:
            return
        await self._downloads.fetch(self._source, model)
        self._installed[name] = model
        logger.info("'%s' was fetched from %s", name, self.name)
        if not model.versions:
            logger.warning("'%s' of %s has no files of a version yet: its upload may be incomplete", name, self.name)

    def _report(self, name: str, error: Exception) -> None:
        reason = error.message if isinstance(error, WeirError) else f"{type(error).__name__}: {error}"
        if self.problems.get(name) != reason:
            logger.error("'%s' can't be fetched: %s", name, reason)
        if name in self._listed:  # other names come from clients, and must not be kept
            self.problems[name] = reason

    # Listings

    async def _list(self, timeout_s: float | None = None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                listed = dict(await self._source.store.models())
        except TimeoutError as error:
            message = f"model repository {self.name} can't be listed: the store did not answer in {timeout_s:g} s"
            raise StoreError(message, is_transient=True) from error
        self._listed, self._listed_s = listed, time.monotonic()
        self.problems = {name: problem for name, problem in self.problems.items() if name in listed}
        if self.is_unusable or not self._is_marked:
            await asyncio.to_thread(self._source.cache.mark_listed)
            self._is_marked = True
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
        self._on_change = on_change
        self._begin(background, self._follow_changes(background))

    async def stop(self) -> None:
        """Stops following changes."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def remove_folder(self) -> None:
        """Removes the local models; called when no instance uses them any more."""
        self._source.folder.close()

    def _begin(self, background: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
        task = background.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow_changes(self, background: asyncio.TaskGroup) -> None:
        pause_s, took_s = RETRY_S, 0.0
        while self._poll_s is not None or self.failure or self._missing():
            if self._poll_s is None:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_RETRY_S)
            else:  # a store that is slower than the interval is left alone for as long as a listing takes
                await asyncio.sleep(max(self._poll_s - took_s, min(took_s, self._poll_s)))
            started_s = time.monotonic()
            await self._poll(background)
            took_s = time.monotonic() - started_s

    def _missing(self) -> list[str]:
        """The listed models of which there is no version here, the smallest first."""
        return [name for name in self.pending() if name not in self._installed]

    @contained()
    async def _poll(self, background: asyncio.TaskGroup) -> None:
        """Lists the repository once and starts to update what has changed; without `poll_s`, what could not be fetched."""
        before = self._listed
        try:
            await self._list()
        except StoreError as error:
            self._fail(error)
            return
        changed = list(self.pending()) if self._poll_s is not None else self._missing()
        gone = self._installed.keys() - self._listed.keys() if self._poll_s is not None else ()
        for name in (*changed, *gone):
            if name not in self._updating:
                self._updating.add(name)
                self._begin(background, self._update(name, settles=before.get(name) != self._listed.get(name)))

    @contained()
    async def _update(self, name: str, settles: bool) -> None:
        """Updates one model. With `settles` it has just changed, and waits until it does not change further."""
        try:
            before = self._installed.get(name)
            if settles and name in self._listed:
                await self._settle(name)
            await self.refresh(name, looks=False)
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
