"""`JobStore`: the jobs in bucket `jobs`, as one process sees them: an entry, which clients change, and the progress, which
only the process that runs the job writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from weir.bus.kv.view import KvView
from weir.bus.naming import durable_subjects as subjects
from weir.bus.nats.connection import BROKER_ERRORS, Bus
from weir.bus.nats.headers import pack_headers
from weir.bus.nats.jetstream import EXPECTED_SEQUENCE
from weir.bus.streams.acked_publisher import AckedPublisher
from weir.jobs.records.record import Job, JobEntry, JobProgress
from weir.runtime.containment import contained
from weir.schemas.core.errors import WeirError, not_found, unavailable

logger = logging.getLogger("weir.gateway")

MAX_JOBS = 1000
"""Jobs in the bucket; beyond it the oldest ones that have ended are deleted."""

STORE_TIMEOUT_S = 30.0
"""Timeout of storing an entry."""

_PROGRESS = ".progress"
_ATTEMPTS = 20
_RETRY_S = 1.0
_OPEN_TIMEOUT_S = 10.0
_OPEN_RETRY_S = 0.5
_BROKER_UNAVAILABLE = "the message broker is not available"

Change = Callable[[JobEntry], JobEntry]


class JobStore:
    """Reads, changes and follows the jobs."""

    def __init__(self, bus: Bus, publisher: AckedPublisher) -> None:
        self._bus = bus
        self._publisher = publisher
        self._entries: dict[str, JobEntry] = {}
        self._progress: dict[str, JobProgress] = {}
        self._entry_view = KvView(bus, subjects.JOBS_BUCKET, self._take, self._forget, "*")
        self._progress_view = KvView(bus, subjects.JOBS_BUCKET, self._take, lambda _key: None, f"*{_PROGRESS}")
        self._listeners: list[Callable[[str], None]] = []
        self._follower: asyncio.Task[None] | None = None
        self.opened = asyncio.Event()
        """Set once all jobs have been read."""
        self.malformed = 0

    def on_change(self, listener: Callable[[str], None]) -> None:
        """Calls `listener` from the event loop with the id of each job that may have changed."""
        self._listeners.append(listener)

    def start(self, background: asyncio.TaskGroup) -> None:
        """Reads the bucket and follows its writes, in a task of `background`; retries while the broker is unavailable."""
        self._follower = background.create_task(self._follow())

    def stop(self) -> None:
        """Stops following the bucket."""
        if self._follower is not None:
            self._follower.cancel()

    async def _follow(self) -> None:
        while not self.opened.is_set():
            try:
                async with asyncio.timeout(_OPEN_TIMEOUT_S):
                    await self._open()
                self.opened.set()
            except BROKER_ERRORS as error:
                logger.warning("offline jobs can't be read yet: %s: %s; retrying", type(error).__name__, error)
                await asyncio.sleep(_OPEN_RETRY_S)
        self._bus.on_reconnect(self._recover)

    async def _open(self) -> None:
        # Progress first: without it, a job that has ended would look like a job to run.
        await self._progress_view.start()
        await self._entry_view.start()

    async def _recover(self) -> None:
        await self._progress_view.read(lambda: {f"{id}{_PROGRESS}": row.pack() for id, row in self._progress.items()})
        await self._entry_view.read(lambda: {id: entry.pack() for id, entry in self._entries.items()})

    def find(self, id: str) -> Job | None:
        """The job, None if it does not exist."""
        entry = self._entries.get(id)
        return None if entry is None else Job(entry, self._progress.get(id, JobProgress()))

    def get(self, id: str) -> Job:
        """The job. Raises WeirError (NOT_FOUND)."""
        job = self.find(id)
        if job is None:
            raise no_job(id)
        return job

    async def refresh(self, id: str) -> None:
        """Reads the job's entry, which a client may just have changed at another gateway. It stays as it is known while the
        broker is unavailable.
        """
        with contextlib.suppress(*BROKER_ERRORS):
            await self._entry_view.refresh(id)

    def all(self) -> list[Job]:
        """All jobs, oldest first."""
        jobs = [Job(entry, self._progress.get(id, JobProgress())) for id, entry in self._entries.items()]
        return sorted(jobs, key=lambda job: (job.entry.created_ms, job.id))

    async def create(self, entry: JobEntry) -> None:
        """Stores a new job. Raises WeirError (UNAVAILABLE)."""
        await self._make_room()
        # The id is random: a conflict can only be an earlier copy of this very publish.
        await self._store(entry, 0)

    async def change(self, id: str, change: Change) -> Job:
        """Stores the entry that `change` returns. It may raise WeirError, and is called again if the entry has changed."""
        for _ in range(_ATTEMPTS):
            entry, revision = await self._read_entry(id)
            wanted = change(entry)
            if wanted == entry or await self._store(wanted, revision):
                return Job(wanted, self._progress.get(id, JobProgress()))
        raise unavailable("too many clients change the job at the same time")

    def write_progress(self, id: str, progress: JobProgress) -> asyncio.Future[None]:
        """Stores the progress of a job; the future completes when it is stored."""
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        subject = subjects.job_subject(id + _PROGRESS)
        self._publisher.publish(
            subject, progress.pack(), b"", lambda _ack: None if stored.done() else stored.set_result(None)
        )
        self._take_progress(id, progress)
        return stored

    async def delete(self, id: str) -> None:
        """Deletes a job. Raises WeirError (UNAVAILABLE)."""
        try:
            await self._entry_view.bucket.delete(id)
            await self._entry_view.bucket.delete(id + _PROGRESS)
        except BROKER_ERRORS as error:
            raise unavailable(_BROKER_UNAVAILABLE) from error

    # Steps

    async def _store(self, entry: JobEntry, revision: int) -> bool:
        block = pack_headers({EXPECTED_SEQUENCE: str(revision)})
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                ack = await self._publisher.store(subjects.job_subject(entry.id), entry.pack(), block)
        except TimeoutError as error:
            raise unavailable(_BROKER_UNAVAILABLE) from error
        if not ack.is_stored and not ack.is_conflict:
            raise unavailable(f"the job can't be stored: {ack.description}")
        return ack.is_stored

    async def _read_entry(self, id: str) -> tuple[JobEntry, int]:
        try:
            data, sequence = await self._entry_view.bucket.entry(id)
            return JobEntry.unpack(data), sequence
        except ValueError as error:
            raise no_job(id) from error
        except BROKER_ERRORS as error:
            raise unavailable(_BROKER_UNAVAILABLE) from error

    async def _make_room(self) -> None:
        jobs = self.all()
        ended = [job for job in jobs if job.state.is_final]
        for job in ended[: max(0, len(jobs) - MAX_JOBS + 1)]:
            await self.delete(job.id)
        if len(self._entries) >= MAX_JOBS:
            raise unavailable(f"there are {MAX_JOBS} jobs that have not ended")

    def _take(self, key: str, value: bytes) -> None:
        try:
            if key.endswith(_PROGRESS):
                self._take_progress(key.removesuffix(_PROGRESS), JobProgress.unpack(value))
            else:
                entry = JobEntry.unpack(value)
                if entry.id != key:
                    raise ValueError("its key does not match its id")
                self._take_entry(entry)
        except ValueError as error:
            self.malformed += 1
            logger.warning("ignored a malformed entry of bucket jobs: %s", error)

    def _take_entry(self, entry: JobEntry) -> None:
        if self._entries.get(entry.id) != entry and (entry.id in self._entries or len(self._entries) < 2 * MAX_JOBS):
            self._entries[entry.id] = entry
            self._changed(entry.id)

    def _take_progress(self, id: str, progress: JobProgress) -> None:
        known = self._progress.get(id)
        if known != progress and (known is not None or len(self._progress) < 2 * MAX_JOBS):
            self._progress[id] = progress
            self._changed(id)

    def _forget(self, id: str) -> None:
        self._progress.pop(id, None)
        if self._entries.pop(id, None) is not None:
            self._changed(id)

    @contained(on_error="_change_failed")
    def _changed(self, id: str) -> None:
        for listener in self._listeners:
            listener(id)

    def _change_failed(self, _error: Exception, id: str) -> None:
        """Reports a change again after a pause: without it, a job that should run would stand still."""
        asyncio.get_running_loop().call_later(_RETRY_S, self._changed, id)


def no_job(id: str) -> WeirError:
    """The error for an id of which there is no job (NOT_FOUND)."""
    return not_found(f"there is no job '{id}'")
