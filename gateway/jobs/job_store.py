"""`JobStore`: the jobs in bucket `jobs`, as one gateway sees them.

Progress is taken from the bucket's writes as they pass by, for only a job's runner writes it. A write of an entry may
still be refused by the bucket (two who ask at once), so it is only a hint to read the entry, and to read it again until
the write must have been stored.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from nats.errors import Error as NatsError
from nats.js.errors import KeyNotFoundError, NoKeysError, NotFoundError
from nats.js.kv import KeyValue

from bus import durable_subjects as subjects
from bus.acked_publisher import AckedPublisher
from bus.connection import Bus, Message
from bus.headers import pack_headers
from gateway.jobs.job_record import ID_PREFIX, Job, JobEntry, JobProgress
from runtime.containment import contained
from schemas.errors import WeirError, not_found, unavailable

logger = logging.getLogger("weir.gateway")

MAX_JOBS = 1000
"""Jobs that are kept; beyond it the oldest that have ended are forgotten."""

STORE_PATIENCE_S = 30.0
"""Wait for the broker to store what becomes of a job."""

_PROGRESS = ".progress"
_HINT_S = 3.0
_READ_AGAIN_S = 0.25
_ATTEMPTS = 20
_AWAY = "the message broker is not available"

Change = Callable[[JobEntry], JobEntry]


class JobStore:
    """See the module. `on_change` is called from the event loop with the id of a job that may have changed."""

    def __init__(self, bus: Bus, publisher: AckedPublisher) -> None:
        self._bus = bus
        self._publisher = publisher
        self._entries: dict[str, JobEntry] = {}
        self._progress: dict[str, JobProgress] = {}
        self._hinted_until_s: dict[str, float] = {}
        self._hint = asyncio.Event()
        self._is_subscribed = False
        self._on_change: Callable[[str], None] = lambda _id: None
        self.malformed = 0

    async def start(self, on_change: Callable[[str], None]) -> None:
        """Reads the bucket, and hears of its writes from now on.

        Raises NatsError, OSError or TimeoutError without a broker; then it may be called again.
        """
        self._on_change = on_change
        if not self._is_subscribed:
            await self._bus.subscribe(subjects.job_subject(">"), self._on_write)
            self._is_subscribed = True
            self._bus.on_reconnect(self._read_all)
        await self._bus.flush()
        await self._read_all()

    def find(self, id: str) -> Job | None:
        """The job, if there is one."""
        entry = self._entries.get(id)
        return None if entry is None else Job(entry, self._progress.get(id, JobProgress()))

    def get(self, id: str) -> Job:
        """The job. Raises WeirError (NOT_FOUND)."""
        job = self.find(id)
        if job is None:
            raise not_found(f"there is no job '{id}'")
        return job

    def all(self) -> list[Job]:
        """All jobs, oldest first."""
        jobs = [Job(entry, self._progress.get(id, JobProgress())) for id, entry in self._entries.items()]
        return sorted(jobs, key=lambda job: (job.entry.created_ms, job.id))

    async def create(self, entry: JobEntry) -> None:
        """Adds a job, and returns when it is stored. Raises WeirError (UNAVAILABLE)."""
        await self._make_room()
        # Nobody else draws this id: a conflict is an earlier copy of this very publish.
        await self._store(entry, 0)
        self._take_entry(entry)

    async def change(self, id: str, change: Change) -> Job:
        """Stores what `change` makes of the entry. It may raise WeirError, and may be called again with a newer entry."""
        for _ in range(_ATTEMPTS):
            entry, revision = await self._read_entry(id)
            wanted = change(entry)
            if wanted == entry or await self._store(wanted, revision):
                self._take_entry(wanted)
                return self.get(id)
        raise unavailable("too many change the job at once")

    def write_progress(self, id: str, progress: JobProgress) -> asyncio.Future[None]:
        """Stores how far a job is; what comes back is done when it is stored."""
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        subject = subjects.job_subject(id + _PROGRESS)
        self._publisher.publish(
            subject, progress.pack(), b"", lambda _ack: None if stored.done() else stored.set_result(None)
        )
        self._take_progress(id, progress)
        return stored

    async def delete(self, id: str) -> None:
        """Forgets a job. Raises WeirError (UNAVAILABLE)."""
        try:
            bucket = await self._bucket()
            await bucket.purge(id)
            await bucket.purge(id + _PROGRESS)
        except (NatsError, NotFoundError, OSError, TimeoutError) as error:
            raise unavailable(_AWAY) from error
        self._forget(id)

    # How

    async def _bucket(self) -> KeyValue:
        return await self._bus.jetstream.key_value(subjects.JOBS_BUCKET)

    async def _store(self, entry: JobEntry, revision: int) -> bool:
        block = pack_headers({"Nats-Expected-Last-Subject-Sequence": str(revision)})
        try:
            async with asyncio.timeout(STORE_PATIENCE_S):
                ack = await self._publisher.store(subjects.job_subject(entry.id), entry.pack(), block)
        except TimeoutError as error:
            raise unavailable(_AWAY) from error
        if not ack.is_stored and not ack.is_conflict:
            raise unavailable(f"the job can't be stored: {ack.description}")
        return ack.is_stored

    async def _read_entry(self, id: str) -> tuple[JobEntry, int]:
        try:
            found = await (await self._bucket()).get(id)
            return JobEntry.unpack(found.value or b""), found.revision or 0
        except (KeyNotFoundError, ValueError) as error:
            raise not_found(f"there is no job '{id}'") from error
        except (NatsError, NotFoundError, OSError, TimeoutError) as error:
            raise unavailable(_AWAY) from error

    async def _make_room(self) -> None:
        jobs = self.all()
        ended = [job for job in jobs if job.state.is_final]
        for job in ended[: max(0, len(jobs) - MAX_JOBS + 1)]:
            await self.delete(job.id)
        if len(self._entries) >= MAX_JOBS:
            raise unavailable(f"there are {MAX_JOBS} jobs that have not ended")

    async def _read_all(self) -> None:
        bucket = await self._bucket()
        try:
            keys = await bucket.keys()
        except (NoKeysError, NotFoundError):
            keys = []
        for id in self._entries.keys() - set(keys):
            self._forget(id)
        # How far a job is comes first: without it, one that has ended would look like one that is to be run.
        for key in sorted(keys, key=lambda key: not key.endswith(_PROGRESS)):
            try:
                value = (await bucket.get(key)).value or b""
            except KeyNotFoundError:
                continue
            self._take(key, value)

    def _on_write(self, message: Message) -> None:
        key = message.subject.removeprefix(subjects.job_subject(""))
        if key.endswith(_PROGRESS):
            if message.data:
                self._take(key, message.data)
        elif key.startswith(ID_PREFIX):
            self._hinted_until_s[key] = time.monotonic() + _HINT_S
            self._hint.set()

    async def follow_hints(self) -> None:
        """Reads what may have been written, for ever."""
        while True:
            await self._hint.wait()
            for id, until_s in list(self._hinted_until_s.items()):
                if time.monotonic() > until_s:
                    del self._hinted_until_s[id]
                await self._read_again(id)
            if self._hinted_until_s:
                await asyncio.sleep(_READ_AGAIN_S)
            else:
                self._hint.clear()

    @contained()
    async def _read_again(self, id: str) -> None:
        try:
            self._take_entry((await self._read_entry(id))[0])
        except WeirError as error:
            if not error.retryable:
                self._forget(id)

    @contained()
    def _take(self, key: str, value: bytes) -> None:
        try:
            if key.endswith(_PROGRESS):
                self._take_progress(key.removesuffix(_PROGRESS), JobProgress.unpack(value))
            else:
                entry = JobEntry.unpack(value)
                if entry.id != key:
                    raise ValueError("it is called otherwise")
                self._take_entry(entry)
        except ValueError as error:
            self.malformed += 1
            logger.warning("dropped an entry of bucket jobs: %s", error)

    def _take_entry(self, entry: JobEntry) -> None:
        if self._entries.get(entry.id) != entry and (entry.id in self._entries or len(self._entries) < 2 * MAX_JOBS):
            self._entries[entry.id] = entry
            self._on_change(entry.id)

    def _take_progress(self, id: str, progress: JobProgress) -> None:
        known = self._progress.get(id)
        if known != progress and (known is not None or len(self._progress) < 2 * MAX_JOBS):
            self._progress[id] = replace(progress)
            self._on_change(id)

    def _forget(self, id: str) -> None:
        self._progress.pop(id, None)
        if self._entries.pop(id, None) is not None:
            self._on_change(id)
