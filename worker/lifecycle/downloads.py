"""`Downloads`: copies models from object stores into the cache of this host, in bounded memory.

A file is read in ranges of `RANGE_BYTES`, several at a time, and written in order, so that the part of a file that a killed
process has left is continued. Ranges of all files share `RANGES_AT_A_TIME`. Models are admitted in the order of requests,
and few at a time: those requested first are complete, and can be loaded, while the others download.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from weir.repository.stores.store import ModelStore, StoredFile, StoredModel, StoreError
from weir.schemas.wire.model_control import PushedFile, PushedModel
from weir.worker.lifecycle.mirror_folder import HeldContents, MirrorFolder
from weir.worker.lifecycle.store_cache import PartialFile, StoreCache

logger = logging.getLogger("weir.worker")

RANGE_BYTES = 4 << 20
"""Bytes that one request reads of a file."""

RANGES_AT_A_TIME = 8
"""Ranges that a worker holds in memory: those it is reading, and those that wait to be written."""

FILES_AT_A_TIME = 16
"""Files that a worker downloads at a time."""

MODELS_AT_A_TIME = 32
"""Models that a worker downloads at a time, as long as they are small."""

MODEL_BYTES_AT_A_TIME = 64 << 20
"""Bytes of the models that a worker downloads at a time; a larger model is downloaded alone."""

REPORT_INTERVAL_S = 5.0
"""Time between two log entries about the progress of downloads."""

_LOCKED_S = 0.2
_WINDOW = 4


@dataclass(frozen=True, slots=True)
class DownloadSource:
    """A store, and where its contents are kept."""

    store: ModelStore
    folder: MirrorFolder
    cache: StoreCache


class Downloads:
    """The downloads of a worker, of all its stores. Runs in the event loop; files are written in threads."""

    def __init__(self) -> None:
        self._ranges = asyncio.Semaphore(RANGES_AT_A_TIME)
        self._files = asyncio.Semaphore(FILES_AT_A_TIME)
        self._admission = Admission(MODELS_AT_A_TIME, MODEL_BYTES_AT_A_TIME)
        self._without_checksums: set[str] = set()
        self.progress = DownloadProgress()

    async def fetch(self, source: DownloadSource, model: StoredModel) -> None:
        """Copies the model and installs it in the folder. Raises StoreError and OSError; what was copied is kept."""
        if model.problem:
            raise StoreError(model.problem)
        with self.progress.expecting(model.size_bytes):
            async with self._admission.admit(model.size_bytes):
                with source.folder.holding() as held:
                    # All are awaited, also after a failure: none may write after its content is no longer kept.
                    files = (self._fetch_file(source, model, file, held) for file in model.files)
                    outcomes = await asyncio.gather(*files, return_exceptions=True)
                    stored = tuple(_result(outcome) for outcome in outcomes)
                    await asyncio.to_thread(source.folder.install, PushedModel(model.name, stored))
                    await asyncio.to_thread(source.cache.save_listing, model)

    async def _fetch_file(
        self, source: DownloadSource, model: StoredModel, file: StoredFile, held: HeldContents
    ) -> PushedFile:
        async with self._files:
            while True:
                digest = await asyncio.to_thread(source.cache.find, model.name, file, held)
                if digest is not None:
                    self.progress.advance(file.size_bytes)
                    return PushedFile(file.path, file.size_bytes, digest)
                partial = await asyncio.to_thread(source.cache.open_partial, model.name, file)
                if partial is not None:
                    break
                await asyncio.sleep(_LOCKED_S)
            with partial:
                if partial.size_bytes:
                    logger.info(
                        "continuing the download of '%s/%s' from %s at byte %d of %d",
                        model.name,
                        file.path,
                        source.store.name,
                        partial.size_bytes,
                        file.size_bytes,
                    )
                self.progress.advance(partial.size_bytes)
                await self._download(source, model, file, partial)
                await self._verify(source, model, file, partial)
                digest = await asyncio.to_thread(source.cache.complete, model.name, file, partial, held)
                return PushedFile(file.path, file.size_bytes, digest)

    async def _download(
        self, source: DownloadSource, model: StoredModel, file: StoredFile, partial: PartialFile
    ) -> None:
        reading: deque[asyncio.Task[memoryview]] = deque()
        start = partial.size_bytes
        try:
            while start < file.size_bytes or reading:
                while start < file.size_bytes and len(reading) < _WINDOW:
                    end = min(start + RANGE_BYTES, file.size_bytes)
                    reading.append(asyncio.create_task(self._read(source.store, model.name, file, start, end)))
                    start = end
                piece = await reading[0]
                try:
                    await asyncio.to_thread(partial.write, piece)
                finally:
                    reading.popleft()
                    self._ranges.release()
                self.progress.advance(len(piece))
        finally:
            for task in reading:
                task.cancel()
            for outcome in await asyncio.gather(*reading, return_exceptions=True):
                if not isinstance(outcome, BaseException):
                    self._ranges.release()

    async def _read(self, store: ModelStore, model: str, file: StoredFile, start: int, end: int) -> memoryview:
        """The range. It counts as held until the caller has written it."""
        await self._ranges.acquire()
        try:
            return await store.read(model, file, start, end)
        except BaseException:
            self._ranges.release()
            raise

    async def _verify(self, source: DownloadSource, model: StoredModel, file: StoredFile, partial: PartialFile) -> None:
        """Compares the content with the tag where that is an MD5.

        Stores also have tags that only look like one, of encrypted objects. So a content that differs is downloaded again,
        and is right if it is the same as before.
        """
        store = source.store.name
        if store in self._without_checksums or not partial.differs_from_tag:
            return
        first = partial.digest()
        logger.warning(
            "'%s/%s' of %s does not match the checksum that its ETag may be; downloading it again",
            model.name,
            file.path,
            store,
        )
        await asyncio.to_thread(partial.restart)
        self.progress.advance(-file.size_bytes)
        await self._download(source, model, file, partial)
        if not partial.differs_from_tag:
            return
        if partial.digest() != first:
            await asyncio.to_thread(partial.restart)
            raise StoreError(
                f"model repository {store} can't be read: two downloads of object '{model.name}/{file.path}' differ",
                is_transient=True,
            )
        self._without_checksums.add(store)
        logger.info("the ETags of %s are not checksums: its contents are verified by their size", store)


class Admission:
    """Admits models in the order of requests: at most `models` at a time, of at most `limit_bytes` together, or one."""

    def __init__(self, models: int, limit_bytes: int) -> None:
        self._models = models
        self._limit_bytes = limit_bytes
        self._admitted = self._admitted_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def admit(self, size_bytes: int) -> AsyncIterator[None]:
        """Waits until a model of this size is admitted; it leaves with the context."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, turn))
        self._admit_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(size_bytes)
            raise
        try:
            yield
        finally:
            self._leave(size_bytes)

    def _leave(self, size_bytes: int) -> None:
        self._admitted -= 1
        self._admitted_bytes -= size_bytes
        self._admit_next()

    def _admit_next(self) -> None:
        while self._waiting:
            size_bytes, turn = self._waiting[0]
            fits = self._admitted < self._models and self._admitted_bytes + size_bytes <= self._limit_bytes
            if not turn.cancelled():
                if self._admitted and not fits:
                    return
                self._admitted += 1
                self._admitted_bytes += size_bytes
                turn.set_result(None)
            self._waiting.popleft()


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

    def expecting(self, size_bytes: int) -> _Expected:
        """A context in which a model of this size is downloaded."""
        return _Expected(self, size_bytes)

    def begin(self, size_bytes: int) -> None:
        """Counts one more model."""
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

    def end(self) -> None:
        """Counts one model as done, or as failed."""
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


class _Expected:
    """A model that is being downloaded, as a context manager."""

    def __init__(self, progress: DownloadProgress, size_bytes: int) -> None:
        self._progress = progress
        self._size_bytes = size_bytes

    def __enter__(self) -> None:
        self._progress.begin(self._size_bytes)

    def __exit__(self, *_: object) -> None:
        self._progress.end()


def _result(outcome: PushedFile | BaseException) -> PushedFile:
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
