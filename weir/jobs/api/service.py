"""`JobService`: submits, lists, pauses, resumes, cancels, retries and deletes offline jobs for clients.

It changes the jobs' entries in bucket `jobs`; a `weir.jobs.run.host.JobHost`, in this process or in another, runs them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from msgspec.structs import replace

from weir.calls.catalog import Catalog
from weir.jobs.formats.files import InputFormat, OutputFormat, default_output_format, input_format
from weir.jobs.records.folders import BatchRoots, OutputFolder, Uploads, json_lines
from weir.jobs.records.record import DesiredState, Job, JobEntry, JobSpec, check_model, new_job_id, unix_ms
from weir.jobs.records.store import JobStore, no_job
from weir.schemas.core.errors import WeirError, invalid, unavailable

CANCEL_TIMEOUT_S = 10.0
"""How long the deletion of a running job waits until the job is cancelled."""

OPEN_TIMEOUT_S = 10.0
"""How long a request waits for the jobs to be read: a gateway is ready for inference before they are."""

_POLL_S = 0.05


class Asker(NamedTuple):
    """Who asks about jobs: whose jobs it makes, which it may see, and what raises for models that it may not use."""

    owner: str
    may_see: Callable[[JobEntry], bool]
    check_model: Callable[[str], None]


ANYBODY = Asker("", lambda _entry: True, lambda _model: None)
"""Whoever asks without an access policy."""


class JobService:
    """Carries out clients' requests about jobs. Everything runs in one event loop; files are read in threads."""

    def __init__(self, store: JobStore, roots: BatchRoots, catalog: Catalog) -> None:
        self._store = store
        self._roots = roots
        self._uploads = None if roots.first is None else Uploads(roots.first)
        self._catalog = catalog
        # Of their own: what clients have searched here must not take the threads in which requests are decoded.
        self._threads = ThreadPoolExecutor(2, "jobs")

    async def submit(self, document: Any, asker: Asker = ANYBODY) -> dict[str, Any]:
        """Submits a job. Raises WeirError if it could not run."""
        spec = JobSpec.of(document)
        asker.check_model(spec.model)
        await self._wait_open()
        check_model(self._catalog.resolve(spec.model, spec.version))
        return await self._create(new_job_id(), spec, asker)

    async def submit_items(self, body: bytes, document: dict[str, Any], asker: Asker = ANYBODY) -> dict[str, Any]:
        """Submits a job whose items are JSON Lines in `body`; `document` has the other fields except `output`."""
        await self._wait_open()
        unplaced = JobSpec.of({**document, "input": "-", "output": "-"})
        asker.check_model(unplaced.model)
        check_model(self._catalog.resolve(unplaced.model, unplaced.version))
        uploads, id = self._uploads, new_job_id()
        assert uploads is not None  # noqa: S101 - there is a root
        try:
            source, output = await asyncio.to_thread(uploads.store, id, body)
            placed = replace(unplaced, inputs=(source,), output=output, input_format=InputFormat.JSONL.value)
            return await self._create(id, placed, asker)
        except OSError as error:
            await asyncio.to_thread(uploads.remove, id)
            raise unavailable(f"the items can't be stored: {error.strerror or type(error).__name__}") from error
        except WeirError:
            await asyncio.to_thread(uploads.remove, id)
            raise

    async def _create(self, id: str, spec: JobSpec, asker: Asker) -> dict[str, Any]:
        self._check_output(spec)
        spec = await asyncio.get_running_loop().run_in_executor(self._threads, self._checked, id, spec)
        self._check_output(spec)  # another job may have been stored meanwhile
        entry = JobEntry(id=id, spec=spec, created_ms=unix_ms(), owner=asker.owner)
        await self._store.create(entry)
        return self._store.get(id).to_dict()

    async def list(self, asker: Asker = ANYBODY) -> list[dict[str, Any]]:
        """All jobs that the asker may see, newest first."""
        await self._wait_open(needs_root=False)
        return [job.to_dict() for job in reversed(self._store.all()) if asker.may_see(job.entry)]

    async def status(self, id: str, asker: Asker = ANYBODY) -> dict[str, Any]:
        """One job. Raises WeirError (NOT_FOUND)."""
        return (await self._read(id, asker)).to_dict()

    async def result(self, id: str, asker: Asker = ANYBODY) -> dict[str, Any]:
        """The output folder of a job. Raises WeirError: NOT_FOUND; INVALID_ARG while it has not ended."""
        job = await self._read(id, asker)
        if not job.state.is_final:
            raise invalid(f"job '{id}' is {job.state.value}: it has no result yet")
        return {"id": id, "state": job.state.value, "output": job.entry.spec.output}

    async def result_lines(self, id: str, asker: Asker = ANYBODY) -> AsyncIterator[bytes] | None:
        """The results of a job that has ended, as JSON Lines; None if its output has another format."""
        found = await self.result(id, asker)
        if self._store.get(id).entry.spec.output_format != OutputFormat.JSONL:
            return None
        return _in_threads(json_lines(await asyncio.to_thread(self._roots.output, found["output"])))

    async def cancel(self, id: str, asker: Asker = ANYBODY) -> dict[str, Any]:
        """Cancels a job and keeps its results so far. A job that has ended does not change."""
        return await self._want(id, DesiredState.CANCEL, asker)

    async def pause(self, id: str, asker: Asker = ANYBODY) -> dict[str, Any]:
        """Pauses a job."""
        return await self._want(id, DesiredState.PAUSE, asker)

    async def resume(self, id: str, asker: Asker = ANYBODY) -> dict[str, Any]:
        """Resumes a paused job."""
        return await self._want(id, DesiredState.RUN, asker)

    async def retry(self, id: str, asker: Asker = ANYBODY) -> dict[str, Any]:
        """Runs the failed and the missing items of a job that has ended."""
        job = await self._read(id, asker)
        if not job.state.is_final:
            raise invalid(f"job '{id}' is {job.state.value}: only a job that has ended can be retried")

        def again(entry: JobEntry) -> JobEntry:
            return replace(entry, round=job.progress.round + 1, wanted=DesiredState.RUN)

        return (await self._store.change(id, again)).to_dict()

    async def delete(self, id: str, asker: Asker = ANYBODY) -> None:
        """Deletes a job, after cancelling it; its output stays. An unknown id is not an error."""
        await self._wait_open(needs_root=False)
        await self._refresh(id, asker)
        found = self._store.find(id)
        if found is None or not asker.may_see(found.entry):
            return
        await self._want(id, DesiredState.CANCEL, asker)
        deadline_s = time.monotonic() + CANCEL_TIMEOUT_S
        while (job := self._store.find(id)) is not None and not job.state.is_final:
            if time.monotonic() > deadline_s:
                raise unavailable(f"job '{id}' is being cancelled: delete it again once it is cancelled")
            await asyncio.sleep(_POLL_S)
        await self._store.delete(id)
        if self._uploads is not None:
            await asyncio.to_thread(self._uploads.remove, id)

    async def _wait_open(self, needs_root: bool = True) -> None:
        """Returns once the jobs have been read. Raises WeirError: INVALID_ARG without a batch root, UNAVAILABLE."""
        if needs_root:
            self._roots.check_any()
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await self._store.opened.wait()
        except TimeoutError:
            raise unavailable("the jobs have not been read from the message broker yet") from None

    async def _read(self, id: str, asker: Asker) -> Job:
        """The job as it is stored now. Raises WeirError (NOT_FOUND), also for one that the asker may not see."""
        await self._wait_open(needs_root=False)
        await self._refresh(id, asker)
        job = self._store.get(id)
        if not asker.may_see(job.entry):
            raise no_job(id)
        return job

    async def _refresh(self, id: str, asker: Asker) -> None:
        """Reads the job as it is stored now.

        For one that the asker may not see it asks for one that does not exist: that takes the same time, and tells nothing.
        """
        known = self._store.find(id)
        is_hidden = known is not None and not asker.may_see(known.entry)
        await self._store.refresh(new_job_id() if is_hidden else id)

    async def _want(self, id: str, wanted: DesiredState, asker: Asker) -> dict[str, Any]:
        def change(entry: JobEntry) -> JobEntry:
            state = self._store.get(id).state
            if state.is_final and wanted is DesiredState.CANCEL:
                return entry
            if state.is_final:
                raise invalid(f"job '{id}' has ended: it is {state.value}")
            if entry.wanted is DesiredState.CANCEL and wanted is not DesiredState.CANCEL:
                raise invalid(f"job '{id}' is being cancelled")
            return replace(entry, wanted=wanted)

        await self._read(id, asker)
        return (await self._store.change(id, change)).to_dict()

    def _check_output(self, spec: JobSpec) -> None:
        """Raises WeirError (INVALID_ARG) if another job writes to the same folder. Call it in the event loop."""
        for job in self._store.all():
            if job.needs_runner and job.entry.spec.output == spec.output:
                raise invalid(f"job '{job.id}' writes to output '{spec.output}'")

    def _checked(self, id: str, spec: JobSpec) -> JobSpec:
        """Checks the paths of a job, and completes its formats. Blocks on the file system."""
        checked = self._roots.checked(spec)
        paths = self._roots.inputs(checked.inputs)
        output = self._roots.output(checked.output)
        for path in paths:
            if path == output or path.is_relative_to(output) or output.is_relative_to(path):
                raise invalid("the output folder must not contain the input, or be inside it")
        format = input_format(spec.input_format).value if spec.input_format else ""
        wanted_format = spec.output_format or default_output_format(paths, format or None)
        if wanted_format not in list(OutputFormat):
            raise invalid(f"unknown output format '{wanted_format}': expected one of {', '.join(OutputFormat)}")
        OutputFolder(output, id).check()
        return replace(checked, input_format=format, output_format=str(wanted_format))


async def _in_threads(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(next, pieces, b""):
        yield piece
