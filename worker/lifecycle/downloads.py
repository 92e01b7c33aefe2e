"""`Downloads`: copies models from repositories that are not local into the cache of this host, in bounded memory.

A file is read in ranges, several at a time, which are written where they belong. Ranges of all files share
`RANGES_AT_A_TIME`. Models are fetched in the order of requests, large ones one after another, small ones beside them: those
requested first are complete, and can be loaded, while the others download.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from weir.repository.stores.store import RANGE_BYTES, ModelStore, StoredFile, StoredModel, StoreError
from weir.worker.lifecycle.model_cache import SHA256_TAG, Draft, ModelCache, checked_digest

logger = logging.getLogger("weir.worker")

RANGES_AT_A_TIME = 8
"""Ranges that a worker holds in memory: those it is reading, and those that wait to be written."""

FILES_AT_A_TIME = 16
"""Files that a worker downloads at a time."""

SMALL_MODEL_BYTES = 64 << 20
"""Size up to which a model is downloaded beside others; larger ones are downloaded one after another."""

SMALL_MODELS_AT_A_TIME = 32
"""Such models that a worker downloads at a time."""

REPORT_INTERVAL_S = 5.0
"""Time between two log entries about the progress of downloads."""

_LOCKED_S = 0.2


class Downloads:
    """The downloads of a worker, of all its stores. Runs in the event loop; files are written in threads."""

    def __init__(self) -> None:
        self._ranges = asyncio.Semaphore(RANGES_AT_A_TIME)
        self._files = asyncio.Semaphore(FILES_AT_A_TIME)
        self._small, self._large = asyncio.Semaphore(SMALL_MODELS_AT_A_TIME), asyncio.Semaphore(1)
        self._without_checksums: set[str] = set()
        self.progress = DownloadProgress()

    async def fetch(self, store: ModelStore, cache: ModelCache, model: StoredModel) -> None:
        """Copies the model and installs it. Raises WeirError and OSError; files that are complete are kept."""
        if model.problem:
            raise StoreError(model.problem)
        turns = self._small if model.size_bytes <= SMALL_MODEL_BYTES else self._large
        with self.progress.expecting(model.size_bytes):
            async with turns, _locked(cache, model.name):
                draft = await asyncio.to_thread(cache.begin, model)
                missing = draft.missing
                self.progress.advance(model.size_bytes - sum(file.size_bytes for file in missing))
                await _together(self._fetch_file(store, draft, file) for file in missing)
                await asyncio.to_thread(cache.install, draft)

    async def _fetch_file(self, store: ModelStore, draft: Draft, file: StoredFile) -> None:
        """Downloads the file and compares it with its tag where that is a checksum.

        Stores also have tags that only look like one, of encrypted objects. So a content that differs is downloaded again,
        and is right if it is the same as before.
        """
        name, part = f"{draft.model.name}/{file.path}", draft.part(file)
        async with self._files:
            await self._download(store, draft.model.name, file, part)
            digest, is_right = await asyncio.to_thread(checked_digest, part, file.tag)
            if not is_right and file.tag.startswith(SHA256_TAG):
                raise StoreError(f"the content of file '{file.path}' does not match the hash of the pushed file")
            if not is_right and store.name not in self._without_checksums:
                message = "'%s' of %s does not match the checksum that its ETag may be; downloading it again"
                logger.warning(message, name, store.name)
                self.progress.advance(-file.size_bytes)
                first = digest
                await self._download(store, draft.model.name, file, part)
                digest, is_right = await asyncio.to_thread(checked_digest, part, file.tag)
                if not is_right and digest != first:
                    reason = f"two downloads of object '{name}' differ"
                    raise StoreError(f"model repository {store.name} can't be read: {reason}", is_transient=True)
                if not is_right:
                    self._without_checksums.add(store.name)
                    logger.info(
                        "the ETags of %s are not checksums: its contents are verified by their size", store.name
                    )
            await asyncio.to_thread(draft.place, file, digest)

    async def _download(self, store: ModelStore, model: str, file: StoredFile, part: Path) -> None:
        starts = iter(range(0, file.size_bytes, RANGE_BYTES))

        async def download_ranges() -> None:
            for start in starts:
                async with self._ranges:
                    piece = await store.read(model, file, start, min(start + RANGE_BYTES, file.size_bytes))
                    await asyncio.to_thread(_write, part, piece, start)
                self.progress.advance(len(piece))

        await _together(download_ranges() for _ in range(RANGES_AT_A_TIME))


def _write(part: Path, piece: memoryview, start: int) -> None:
    # The file is opened here, since a write may end after its task was cancelled.
    with part.open("r+b") as content:
        content.seek(start)
        content.write(piece)


async def _together(tasks: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Awaits all; after the first failure, which it raises, the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(task)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


@contextlib.asynccontextmanager
async def _locked(cache: ModelCache, name: str) -> AsyncIterator[None]:
    while (lock := await asyncio.to_thread(cache.lock, name)) is None:
        await asyncio.sleep(_LOCKED_S)
    with lock:
        yield


class DownloadProgress:
    """The progress of all downloads since there was none: a bar on a terminal, log entries otherwise."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, report_s: float = REPORT_INTERVAL_S) -> None:
        self._clock = clock
        self._report_s = report_s
        self._bar: Progress | None = None
        self._reset()

    def _reset(self) -> None:
        self.models = self.models_done = self.size_bytes = self.done_bytes = 0
        self._started_s = self._reported_s = self._clock()

    @property
    def is_active(self) -> bool:
        """Whether models are downloading or wait to be."""
        return self.models > self.models_done

    @contextlib.contextmanager
    def expecting(self, size_bytes: int) -> Iterator[None]:
        """A context in which a model of this size is downloaded."""
        self._begin(size_bytes)
        try:
            yield
        finally:
            self._end()

    def _begin(self, size_bytes: int) -> None:
        if not self.models:
            self._reset()
        self.models += 1
        self.size_bytes += size_bytes
        if self._bar is None and sys.stderr.isatty() and size_bytes:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4)
            self._bar.start()
            self._bar.add_task("models")
        self._show()

    def advance(self, size_bytes: int) -> None:
        """Counts bytes of a model."""
        self.done_bytes += size_bytes
        self._show()

    def _end(self) -> None:
        self.models_done += 1
        self._show()
        if self.is_active:
            return
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._reported_s > self._started_s:
            self._log("fetched")
        self.models = self.models_done = 0

    def _show(self) -> None:
        if self._bar is not None:
            text = f"models {self.models_done}/{self.models}"
            self._bar.update(self._bar.task_ids[0], description=text, completed=self.done_bytes, total=self.size_bytes)
        elif self._clock() - self._reported_s >= self._report_s:
            self._reported_s = self._clock()
            self._log("fetching")

    def _log(self, doing: str) -> None:
        took_s = max(self._clock() - self._started_s, 1e-3)
        done_mb, all_mb = self.done_bytes / 1e6, self.size_bytes / 1e6
        logger.info(
            "%s models: %d of %d, %.0f of %.0f MB, %.1f MB/s",
            doing,
            self.models_done,
            self.models,
            done_mb,
            all_mb,
            done_mb / took_s,
        )
