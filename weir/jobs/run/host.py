"""`JobHost`: the jobs that run in this process.

Of all processes that could run a job one does: the holder of its lease. When a process dies, its jobs are taken over
once their leases have expired. A bounded number of jobs runs at a time, the oldest first; the others wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections import Counter
from functools import partial

from msgspec.structs import replace

from weir.bus.kv.leases import Leases
from weir.jobs.records.folders import Uploads
from weir.jobs.records.record import DesiredState, JobState
from weir.jobs.records.store import JobStore
from weir.jobs.run.run import INTERNAL_ERROR, STOP_TIMEOUT_S, JobRun, RunContext
from weir.runtime.containment import contained

logger = logging.getLogger("weir.gateway")

MAX_RUNNING = 8
"""Jobs that run at a time, in all processes together."""

MAX_RUNNING_OF_MODEL = 2
"""Of these, jobs for one model: a job whose model is unavailable leaves room for others."""

SWITCH_INTERVAL_S = 0.0005
"""How long a thread of a job may keep the interpreter while the event loop waits for it (Python's default: 5 ms).

Measured with one thread that parses JSON, on a busy machine: one message in ten reaches the event loop later than 0.16
ms, with the default later than 8 to 12 ms; the thread gets a tenth less done.
"""

_FINAL_REPORT_S = 5.0


class JobHost:
    """Runs the jobs whose leases this process holds. Everything runs in one event loop; files are read in threads."""

    def __init__(self, store: JobStore, leases: Leases, context: RunContext) -> None:
        self._store = store
        self._leases = leases
        self._context = context
        self._uploads = None if context.roots.first is None else Uploads(context.roots.first)
        self._turns: dict[str, tuple[bool, DesiredState]] = {}
        self._wanted_leases: set[str] = set()
        self._runs: dict[str, JobRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._background: asyncio.TaskGroup | None = None
        self._opening: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._default_switch_interval_s = sys.getswitchinterval()

    def start(self, background: asyncio.TaskGroup) -> None:
        """Runs jobs in tasks of `background`, once the store has read them."""
        self._background = background
        self._store.on_change(self._on_change)
        self._opening = background.create_task(self._open())

    async def _open(self) -> None:
        await self._store.opened.wait()
        self._choose()
        if self._uploads is not None:
            await self._sweep(self._uploads)

    @contained()
    async def _sweep(self, uploads: Uploads) -> None:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(uploads.sweep, {job.id for job in self._store.all()})

    async def stop(self) -> None:
        """Ends the runs. What is done by then is written; the next holder of each lease continues its job."""
        self._is_stopping = True
        if self._opening is not None:
            self._opening.cancel()
        for run in self._runs.values():
            run.leave()
        tasks = list(self._tasks.values())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S + _FINAL_REPORT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _on_change(self, id: str) -> None:
        """Applies a change of a job's entry or progress to the run of the job, if it runs here."""
        run, job = self._runs.get(id), self._store.find(id)
        if run is not None:
            if job is None:
                run.leave()
            elif job.entry.round == run.progress.round:
                run.set_desired(job.entry.wanted)
        turn = None if job is None else (job.needs_runner, job.entry.wanted)
        if turn == self._turns.get(id):
            return
        self._turns.pop(id, None)
        if turn is not None:
            self._turns[id] = turn
        if self._store.opened.is_set():
            self._choose()

    def _choose(self) -> None:
        """Requests the leases of the jobs whose turn it is, and releases all others. Does nothing once the host stops."""
        if self._is_stopping:
            return
        chosen: set[str] = set()
        of_model: Counter[str] = Counter()
        for job in self._store.all():
            if not job.needs_runner:
                continue
            if job.entry.wanted is DesiredState.RUN:
                model = job.entry.spec.model
                if of_model.total() >= MAX_RUNNING or of_model[model] >= MAX_RUNNING_OF_MODEL:
                    continue
                of_model[model] += 1
            if job.id in self._wanted_leases or self._context.roots.holds(job.entry.spec):
                chosen.add(job.id)
        for id in self._wanted_leases - chosen:
            if id not in self._tasks:
                self._wanted_leases.discard(id)
                self._leases.release(_lease(id))
        for id in chosen - self._wanted_leases:
            self._wanted_leases.add(id)
            self._leases.acquire(_lease(id), partial(self._begin, id), partial(self._lose, id))

    @contained(on_error="_begin_failed")
    def _begin(self, id: str) -> None:
        """Starts the job, whose lease this process holds now, unless its previous run has not ended."""
        job = self._store.find(id)
        if job is None or not job.needs_runner or self._is_stopping or id in self._tasks:
            return
        assert self._background is not None  # noqa: S101 - leases are wanted only then
        self._runs[id] = run = JobRun(job, self._context, partial(self._store.write_progress, id))
        logger.info("job %s: started in this process", id)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._tasks[id] = self._background.create_task(self._run(id, run))

    def _begin_failed(self, _error: Exception, id: str) -> None:
        """Fails a job that could not be started because of an unexpected exception."""
        job = self._store.find(id)
        if job is not None and id not in self._tasks:
            progress = replace(job.progress, round=job.entry.round)
            self._store.write_progress(id, progress.ended(JobState.FAILED, INTERNAL_ERROR))

    def _lose(self, id: str) -> None:
        if id in self._runs:
            logger.warning("job %s: its lease was lost; another process continues it", id)
            self._runs[id].leave()

    async def _run(self, id: str, run: JobRun) -> None:
        try:
            await run.run()
        finally:
            del self._runs[id], self._tasks[id]
            if not self._runs:
                sys.setswitchinterval(self._default_switch_interval_s)
        if run.progress.state is not JobState.RUNNING:
            logger.info(
                "job %s: %s after %d items, %d of them failed",
                id,
                run.progress.state.value,
                run.progress.done,
                run.progress.failed,
            )
        self._choose()
        if self._leases.holds(_lease(id)):
            self._begin(id)  # a client has changed what it wants of the job meanwhile


def _lease(id: str) -> str:
    return f"job.{id}"
