"""`JobService`: a gateway's part in all offline jobs: it runs those that nobody runs, and does what clients ask.

Of several gateways one runs a job: who holds its lease. A job of a gateway that died is taken over when the lease has run
out. Only some jobs run at a time, the oldest first; the others wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from nats.errors import Error as NatsError

from bus.connection import Bus
from calls.catalog import Catalog
from calls.inference import Inference
from gateway.durable.store import DurableStore
from gateway.jobs.batch_roots import BatchRoots
from gateway.jobs.files.job_files import InputFormat, OutputFormat, default_output_format, input_format
from gateway.jobs.job_folder import JobFolder
from gateway.jobs.job_record import Job, JobEntry, JobSpec, JobState, Wanted, new_job_id, unix_ms
from gateway.jobs.job_run import STOPPING_PATIENCE_S, JobRun, RunTools, check_model
from gateway.jobs.job_store import JobStore
from gateway.jobs.uploads import Uploads, json_lines
from gateway.settings import GatewaySettings
from runtime.containment import contained
from schemas.errors import WeirError, invalid, unavailable

logger = logging.getLogger("weir.gateway")

MAX_RUNNING = 8
"""Jobs that run at a time, of all gateways together."""

MAX_RUNNING_OF_MODEL = 2
"""Of these, jobs for one model: one whose model is away leaves room for others."""

CANCEL_PATIENCE_S = 10.0
"""Wait for a job to be cancelled that is to be deleted."""

SWITCH_INTERVAL_S = 0.0005
"""For how long a thread of a job may keep the interpreter while the event loop waits for it (Python's own: 5 ms).

Measured with one thread that reads JSON, on a busy machine: of messages that come to the event loop, one in ten is noticed
later than 0.16 ms, before 8 to 12 ms; the thread does a tenth less.
"""

_LAST_WORDS_S = 5.0
_OPEN_TIMEOUT_S = 10.0
_OPEN_AGAIN_S = 0.5
_POLL_S = 0.05
_LOOK_AGAIN_S = 1.0


class JobService:
    """See the module. Everything runs in one event loop; files are looked at in threads."""

    def __init__(
        self,
        bus: Bus,
        gateway_id: str,
        inference: Inference,
        catalog: Catalog,
        durable: DurableStore,
        settings: GatewaySettings,
    ) -> None:
        self._roots = BatchRoots(settings.batch_roots)
        self._tools = RunTools(
            gateway_id=gateway_id,
            inference=inference,
            catalog=catalog,
            roots=self._roots,
            attempts=settings.durable_attempts,
        )
        self._uploads = None if self._roots.first is None else Uploads(self._roots.first)
        self._leases = durable.leases
        self._catalog = catalog
        self._store = JobStore(bus, durable.publisher)
        self._turns: dict[str, tuple[bool, Wanted]] = {}
        self._wanted_leases: set[str] = set()
        self._runs: dict[str, JobRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._background: asyncio.TaskGroup | None = None
        self._follower: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._is_open = False
        self._usual_switch_interval_s = sys.getswitchinterval()

    def start(self, background: asyncio.TaskGroup) -> None:
        """Follows the jobs from now on, and runs those that are its to run."""
        self._background = background
        self._follower = background.create_task(self._follow())

    async def _follow(self) -> None:
        while not self._is_open:
            try:
                async with asyncio.timeout(_OPEN_TIMEOUT_S):
                    await self._store.start(self._on_change)
                self._is_open = True
            except (NatsError, OSError, TimeoutError) as error:
                logger.warning("offline jobs can't be read yet: %s: %s", type(error).__name__, error)
                await asyncio.sleep(_OPEN_AGAIN_S)
        self._choose()
        if self._uploads is not None:
            await self._sweep(self._uploads)
        await self._store.follow_hints()

    @contained(passes=(OSError,))
    async def _sweep(self, uploads: Uploads) -> None:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(uploads.sweep, {job.id for job in self._store.all()})

    async def stop(self) -> None:
        """Leaves the jobs as they stand, for the next gateway: what is done by then is written."""
        self._is_stopping = True
        if self._follower is not None:
            self._follower.cancel()
        for run in self._runs.values():
            run.leave()
        tasks = list(self._tasks.values())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=STOPPING_PATIENCE_S + _LAST_WORDS_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    # What clients ask

    async def submit(self, document: Any) -> dict[str, Any]:
        """Takes a job in. Raises WeirError for one that could not run."""
        spec = JobSpec.of(document)
        self._check_open()
        check_model(self._catalog.resolve(spec.model, spec.version))
        return await self._create(new_job_id(), spec)

    async def submit_items(self, body: bytes, document: dict[str, Any]) -> dict[str, Any]:
        """Takes a job in whose items are JSON Lines in `body`; `document` has the other fields but `output`."""
        self._check_open()
        unplaced = JobSpec.of({**document, "input": "-", "output": "-"})
        check_model(self._catalog.resolve(unplaced.model, unplaced.version))
        uploads, id = self._uploads, new_job_id()
        assert uploads is not None  # noqa: S101 - there is a root
        try:
            source, output = await asyncio.to_thread(uploads.store, id, body)
            placed = replace(unplaced, inputs=(source,), output=output, input_format=InputFormat.JSONL.value)
            return await self._create(id, placed)
        except OSError as error:
            await asyncio.to_thread(uploads.remove, id)
            raise unavailable(f"the items can't be stored: {error.strerror or type(error).__name__}") from error
        except WeirError:
            await asyncio.to_thread(uploads.remove, id)
            raise

    async def _create(self, id: str, spec: JobSpec) -> dict[str, Any]:
        self._check_output(spec)
        spec = await asyncio.to_thread(self._checked, id, spec)
        self._check_output(spec)  # another job may have been stored meanwhile
        entry = JobEntry(id=id, spec=spec, created_ms=unix_ms())
        await self._store.create(entry)
        return self._find(id).told()

    async def list(self) -> list[dict[str, Any]]:
        """All jobs, the newest first."""
        self._check_open(needs_root=False)
        return [job.told() for job in reversed(self._store.all())]

    async def status(self, id: str) -> dict[str, Any]:
        """One job. Raises WeirError (NOT_FOUND)."""
        return self._find(id).told()

    async def result(self, id: str) -> dict[str, Any]:
        """Where the results of a job lie. Raises WeirError: NOT_FOUND, INVALID_ARG while it has not ended."""
        job = self._find(id)
        if not job.state.is_final:
            raise invalid(f"job '{id}' is {job.state.value}: it has no result yet")
        return {"id": id, "state": job.state.value, "output": job.entry.spec.output}

    async def result_lines(self, id: str) -> AsyncIterator[bytes] | None:
        """The results of a job that has ended, as JSON Lines; None where its output is in another format."""
        told = await self.result(id)
        if self._find(id).entry.spec.output_format != OutputFormat.JSONL:
            return None
        return _in_threads(json_lines(await asyncio.to_thread(self._roots.output, told["output"])))

    async def cancel(self, id: str) -> dict[str, Any]:
        """Ends a job; what is done of it stays. One that has ended stays as it is."""
        return await self._want(id, Wanted.CANCEL)

    async def pause(self, id: str) -> dict[str, Any]:
        """Has a job keep its place and do nothing."""
        return await self._want(id, Wanted.PAUSE)

    async def resume(self, id: str) -> dict[str, Any]:
        """Has a job that was paused go on."""
        return await self._want(id, Wanted.RUN)

    async def retry(self, id: str) -> dict[str, Any]:
        """Has the failures of a job that has ended tried again, and what it had not come to done."""
        job = self._find(id)
        if not job.state.is_final:
            raise invalid(f"job '{id}' is {job.state.value}: only one that has ended can be tried again")

        def again(entry: JobEntry) -> JobEntry:
            return replace(entry, round=job.progress.round + 1, wanted=Wanted.RUN)

        return (await self._store.change(id, again)).told()

    async def delete(self, id: str) -> None:
        """Forgets a job, cancelled before if it has not ended; its files stay. One that isn't there is no error."""
        self._check_open(needs_root=False)
        if self._store.find(id) is None:
            return
        await self._want(id, Wanted.CANCEL)
        deadline_s = time.monotonic() + CANCEL_PATIENCE_S
        while (job := self._store.find(id)) is not None and not job.state.is_final:
            if time.monotonic() > deadline_s:
                raise unavailable(f"job '{id}' is being cancelled: it can be deleted when that is done")
            await asyncio.sleep(_POLL_S)
        await self._store.delete(id)
        if self._uploads is not None:
            await asyncio.to_thread(self._uploads.remove, id)

    def _check_open(self, needs_root: bool = True) -> None:
        if needs_root:
            self._roots.check_any()
        if not self._is_open:
            raise unavailable("the jobs have not been read yet")

    def _find(self, id: str) -> Job:
        self._check_open(needs_root=False)
        return self._store.get(id)

    async def _want(self, id: str, wanted: Wanted) -> dict[str, Any]:
        def change(entry: JobEntry) -> JobEntry:
            state = self._find(id).state
            if state.is_final and wanted is Wanted.CANCEL:
                return entry
            if state.is_final:
                raise invalid(f"job '{id}' has ended: it is {state.value}")
            if entry.wanted is Wanted.CANCEL and wanted is not Wanted.CANCEL:
                raise invalid(f"job '{id}' is being cancelled")
            return replace(entry, wanted=wanted)

        return (await self._store.change(id, change)).told()

    def _check_output(self, spec: JobSpec) -> None:
        """Raises WeirError (INVALID_ARG) where another job writes to the same folder. To be called in the event loop."""
        for job in self._store.all():
            if job.needs_runner and job.entry.spec.output == spec.output:
                raise invalid(f"job '{job.id}' writes to output '{spec.output}'")

    def _checked(self, id: str, spec: JobSpec) -> JobSpec:
        """Blocking: looks at the files."""
        checked = self._roots.checked(spec)
        paths = self._roots.inputs(checked.inputs)
        output = self._roots.output(checked.output)
        for path in paths:
            if path == output or path.is_relative_to(output) or output.is_relative_to(path):
                raise invalid("the output folder must not hold the input, nor lie in it")
        format = input_format(spec.input_format).value if spec.input_format else ""
        wanted_format = spec.output_format or default_output_format(paths, format or None)
        if wanted_format not in list(OutputFormat):
            raise invalid(f"unknown output format '{wanted_format}': it is one of {', '.join(OutputFormat)}")
        JobFolder(output, id).check()
        return replace(checked, input_format=format, output_format=str(wanted_format))

    # Which jobs are run here

    @contained(on_error="_look_again")
    def _on_change(self, id: str) -> None:
        run, job = self._runs.get(id), self._store.find(id)
        if run is not None:
            if job is None:
                run.leave()
            elif job.entry.round == run.progress.round:
                run.want(job.entry.wanted)
        turn = None if job is None else (job.needs_runner, job.entry.wanted)
        if turn == self._turns.get(id):
            return
        self._turns.pop(id, None)
        if turn is not None:
            self._turns[id] = turn
        if self._is_open:
            self._choose()

    def _look_again(self, _error: Exception, id: str) -> None:
        """A change that could not be handled is handled later: a job that should run would stand still otherwise."""
        if not self._is_stopping:
            asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._on_change, id)

    def _choose(self) -> None:
        """Wants the leases of the jobs whose turn it is, and no others; none any more at the end."""
        if self._is_stopping:
            return
        chosen: set[str] = set()
        of_model: Counter[str] = Counter()
        for job in self._store.all():
            if not job.needs_runner:
                continue
            if job.entry.wanted is Wanted.RUN:
                model = job.entry.spec.model
                if of_model.total() >= MAX_RUNNING or of_model[model] >= MAX_RUNNING_OF_MODEL:
                    continue
                of_model[model] += 1
            if job.id in self._wanted_leases or self._roots.holds(job.entry.spec):
                chosen.add(job.id)
        for id in self._wanted_leases - chosen:
            if id not in self._tasks:
                self._wanted_leases.discard(id)
                self._leases.give_up(_lease(id))
        for id in chosen - self._wanted_leases:
            self._wanted_leases.add(id)
            self._leases.want(_lease(id), partial(self._begin, id), partial(self._lose, id))

    @contained(on_error="_begin_failed")
    def _begin(self, id: str) -> None:
        """The lease is ours: the job runs here, once a run before has ended."""
        job = self._store.find(id)
        if job is None or not job.needs_runner or self._is_stopping or id in self._tasks:
            return
        assert self._background is not None  # noqa: S101 - leases are wanted only then
        self._runs[id] = run = JobRun(job, self._tools, partial(self._store.write_progress, id))
        logger.info("job %s runs here", id)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._tasks[id] = self._background.create_task(self._run(id, run))

    def _begin_failed(self, _error: Exception, id: str) -> None:
        """Ends a job that could not be begun."""
        job = self._store.find(id)
        if job is not None and id not in self._tasks:
            progress = replace(job.progress, round=job.entry.round)
            self._store.write_progress(
                id, progress.ended(JobState.FAILED, "internal error: the gateway's log tells more")
            )

    @contained()
    def _lose(self, id: str) -> None:
        if id in self._runs:
            logger.warning("the lease of job %s is lost", id)
            self._runs[id].leave()

    async def _run(self, id: str, run: JobRun) -> None:
        try:
            await self._run_to_its_end(run)
        finally:
            del self._runs[id], self._tasks[id]
            if not self._runs:
                sys.setswitchinterval(self._usual_switch_interval_s)
        if run.progress.state is not JobState.RUNNING:
            logger.info(
                "job %s is %s: %d items, %d failed",
                id,
                run.progress.state.value,
                run.progress.done,
                run.progress.failed,
            )
        self._choose()
        if self._leases.holds(_lease(id)):
            self._begin(id)  # something else is wanted of it since

    @contained()
    async def _run_to_its_end(self, run: JobRun) -> None:
        await run.run()


async def _in_threads(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(next, pieces, b""):
        yield piece


def _lease(id: str) -> str:
    return f"job.{id}"
