"""`JobRun`: one gateway's turn at one job, from when it has the lease until the job ends or the lease is gone.

It holds nothing that is not in the output folder as well: whoever has the next turn goes on at the first item that is in
no shard.
"""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from calls.catalog import Catalog, ServedModel
from calls.inference import Inference
from gateway.jobs.batch_roots import BatchRoots
from gateway.jobs.files.items import ItemResult, JobInput
from gateway.jobs.files.job_files import JobOutput, default_output_format, open_input
from gateway.jobs.item_reader import ItemReader
from gateway.jobs.job_folder import JobFolder
from gateway.jobs.job_pace import Pace
from gateway.jobs.job_plan import PlanLimits
from gateway.jobs.job_record import Job, JobProgress, JobState, Wanted, unix_ms
from gateway.jobs.job_runner import JobRunner, Write
from runtime.containment import contained
from schemas.errors import ErrorCode, WeirError, invalid

REPORT_INTERVAL_S = 1.0

STOPPING_PATIENCE_S = 2.0
"""Wait for what is in flight when the gateway stops or a job is paused; the rest is done again."""

PAUSING_PATIENCE_S = 60.0

_LOOK_AGAIN_S = 0.5

HOPELESS_ITEMS = 100
"""A job of which so many items, and no others, have an outcome, and all of them failed, ends, unless `max_failures` says
otherwise.
"""

MAX_IN_FLIGHT = 4096
"""Items of one job in flight, unless it is told otherwise."""

Report = Callable[[JobProgress], "asyncio.Future[None]"]

Counts = Callable[[], tuple[int, int]]
"""Tells how many items are done, and how many of them failed."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTools:
    """What every run works with."""

    gateway_id: str
    inference: Inference
    catalog: Catalog
    roots: BatchRoots
    attempts: int


class JobRun:
    """See the module. `report` is told how far the job is, about once a second and at the end."""

    def __init__(self, job: Job, tools: RunTools, report: Report) -> None:
        self._job = job
        self._tools = tools
        self._report = report
        before = job.progress
        self.progress = replace(
            before,
            round=job.entry.round,
            state=JobState.RUNNING,
            owner=tools.gateway_id,
            started_ms=before.started_ms or unix_ms(),
            ended_ms=0,
            error="",
            note="",
        )
        self._wanted = job.entry.wanted
        self._is_leaving = False
        self._first_failure = ""
        self._runner: JobRunner | None = None
        self._stopped = asyncio.Event()
        self._threads = ThreadPoolExecutor(max_workers=3, thread_name_prefix="job")
        self._loop = asyncio.get_running_loop()

    def want(self, wanted: Wanted) -> None:
        """Something else is wanted of the job."""
        if wanted is self._wanted or self._wanted is Wanted.CANCEL:
            return
        if wanted is Wanted.RUN:
            return  # it was pausing: the next turn goes on
        self._wanted = wanted
        self._stopped.set()
        self._stop_runner()

    def leave(self) -> None:
        """The gateway stops, or has lost the lease: the job is left as it stands."""
        self._is_leaving = True
        self._stopped.set()
        self._stop_runner()

    def _stop_runner(self) -> None:
        runner = self._runner
        if runner is None:
            return
        runner.stop()
        if self._wanted is Wanted.CANCEL:
            runner.give_up()
        else:
            patience_s = STOPPING_PATIENCE_S if self._is_leaving else PAUSING_PATIENCE_S
            self._loop.call_later(patience_s, runner.give_up)

    async def run(self) -> None:
        """Runs it. Whatever comes of it is reported; nothing is raised but cancellation."""
        try:
            problem = await self._run_while_wanted()
            if problem and not self._is_leaving:
                await self._end(self.progress.ended(JobState.FAILED, problem))
        finally:
            # Threads end what they have begun with: files are not written any more when this returns.
            await asyncio.shield(asyncio.to_thread(self._threads.shutdown))

    @contained(on_error="_unforeseen")
    async def _run_while_wanted(self) -> str:
        """Runs it to its end, or until something else is wanted; why it has failed, "" where it has not."""
        try:
            if self._wanted is Wanted.RUN:
                self._note()
                await self._work()
            if not self._is_leaving and not self.progress.state.is_final:
                if self._wanted is Wanted.CANCEL:
                    await self._end(self.progress.ended(JobState.CANCELLED))
                elif self._wanted is Wanted.PAUSE:
                    await self._end(replace(self.progress, state=JobState.PAUSED, note="", rate=0.0, left_s=-1.0))
        except WeirError as error:
            return error.message
        except OSError as error:
            return f"the job's files can't be used: {error.strerror or type(error).__name__}"
        return ""

    def _unforeseen(self, _error: Exception) -> str:
        return "internal error: the gateway's log tells more"

    async def _work(self) -> None:
        model = await self._until_served()
        if model is None:
            return
        spec, roots = self._job.entry.spec, self._tools.roots
        paths = await self._in_thread(roots.inputs, spec.inputs)
        folder = JobFolder(await self._in_thread(roots.output, spec.output), self._job.id)
        source = await self._in_thread(open_input, paths, spec.input_format or None, model.config)
        fingerprint = await self._in_thread(source.fingerprint)
        if not await self._claim(folder, fingerprint):
            return
        try:
            format = spec.output_format or await self._in_thread(
                default_output_format, paths, spec.input_format or None
            )
            output = await self._in_thread(JobOutput, folder.path, format, model.config.output)
            await self._convert(model.config.max_batch_size, source, output)
        finally:
            folder.release()

    async def _convert(self, max_batch_size: int, source: JobInput, output: JobOutput) -> None:
        covered = await self._in_thread(output.covered)
        shards = await self._in_thread(lambda: list(output.failures()))
        failed = sum(len(numbers) for _, numbers in shards)
        self._note(done=covered, failed=failed, note="the items of the input are counted")
        total = await self._in_thread(source.count)
        self._note(done=covered, failed=failed, total=-1 if total is None else total)
        if shards and self._job.entry.round:
            failed = await self._retry(source, output, shards, covered, max_batch_size)
        if self._stopped.is_set():
            return
        reader = ItemReader(source, self._threads, start=covered)

        def write(results: Sequence[ItemResult]) -> int:
            return output.write(results[0].number, results)

        runner = self._runner_of(reader, write, covered, max_batch_size)
        if not await self._run_runner(runner, lambda: (runner.done, failed + runner.failed)):
            return
        done, failed = self.progress.done, self.progress.failed
        self.progress = replace(self.progress, total=done)
        ended = self._outcome(done, failed)
        summary = {**Job(self._job.entry, ended).told(), "succeeded": done - failed}
        await self._in_thread(output.finish, summary)
        await self._end(ended)

    def _outcome(self, done: int, failed: int) -> JobProgress:
        """How a job ends whose items all have an outcome."""
        has_failed = 0 < done == failed and self._job.entry.spec.max_failures < 0
        told = f"{f'all {failed}' if failed == done else failed} items failed{self._first()}" if failed else ""
        return self.progress.ended(JobState.FAILED if has_failed else JobState.SUCCEEDED, told)

    def _first(self) -> str:
        return f"; the first was {self._first_failure}" if self._first_failure else ""

    async def _retry(
        self,
        source: JobInput,
        output: JobOutput,
        shards: list[tuple[int, list[int]]],
        covered: int,
        max_batch_size: int,
    ) -> int:
        """Asks all failures once more and puts what comes of them in their places; how many are left."""
        firsts = [first for first, _ in shards]
        left = {first: len(numbers) for first, numbers in shards}
        before = sum(left.values())

        def write(results: Sequence[ItemResult]) -> int:
            by_shard: dict[int, list[ItemResult]] = {}
            for result in results:
                by_shard.setdefault(firsts[bisect_right(firsts, result.number) - 1], []).append(result)
            for first, replacements in by_shard.items():
                left[first] = output.rewrite(first, replacements)
            return sum(result.error is not None for result in results)

        numbers = (number for _, failures in shards for number in failures)
        runner = self._runner_of(ItemReader(source, self._threads, numbers), write, 0, max_batch_size)
        await self._run_runner(runner, lambda: (covered, before - runner.done + runner.failed), False)
        return sum(left.values())

    # Runners

    def _runner_of(self, reader: ItemReader, write: Write, first: int, max_batch_size: int) -> JobRunner:
        spec = self._job.entry.spec
        limits = PlanLimits(
            window=max(64, 4 * max_batch_size),
            most_in_flight=spec.max_in_flight or MAX_IN_FLIGHT,
            attempts=self._tools.attempts,
        )
        return JobRunner(spec, self._tools.inference, reader, write, self._threads, first, limits)

    async def _run_runner(self, runner: JobRunner, counts: Counts, limits_failures: bool = True) -> bool:
        """Runs it, and tells how far it is meanwhile. Whether it has come to its end."""
        self._runner = runner
        if self._stopped.is_set():
            self._stop_runner()
        pace = Pace()
        ticking = self._loop.create_task(self._tick(runner, counts, pace, limits_failures))
        try:
            await runner.run()
        finally:
            ticking.cancel()
            await asyncio.wait((ticking,))
            self._runner = None
            self._first_failure = self._first_failure or runner.first_failure
            done, failed = counts()
            pace.note(self._loop.time(), runner.done)
            self._note(done=done, failed=failed, rate=pace.rate)
        if limits_failures:
            self._check_failures(runner.plan.is_done)
        return runner.plan.is_done

    async def _tick(self, runner: JobRunner, counts: Counts, pace: Pace, limits_failures: bool) -> None:
        while True:
            self._tell(runner, counts, pace)
            if limits_failures and self._has_too_many_failures():
                runner.give_up()
            await asyncio.sleep(REPORT_INTERVAL_S)

    @contained()
    def _tell(self, runner: JobRunner, counts: Counts, pace: Pace) -> None:
        done, failed = counts()
        pace.note(self._loop.time(), runner.done)
        left = max(0, self.progress.total - done) if self.progress.total >= 0 else -1
        note = runner.note if runner.is_held_up else ""
        self._note(done=done, failed=failed, rate=pace.rate, left_s=pace.left_s(left), note=note)

    def _has_too_many_failures(self) -> bool:
        most, failed = self._job.entry.spec.max_failures, self.progress.failed
        return failed > most if most >= 0 else HOPELESS_ITEMS <= self.progress.done == failed

    def _check_failures(self, is_done: bool) -> None:
        # A job that is through without a single success is told so at its end, with its summary written.
        is_through = is_done and self._job.entry.spec.max_failures < 0
        if self._has_too_many_failures() and not self._stopped.is_set() and not is_through:
            most, failed = self._job.entry.spec.max_failures, self.progress.failed
            why = f"the job was to stop after {most}" if most >= 0 else "no item succeeded"
            raise invalid(f"{failed} items failed, and {why}{self._first()}")

    # Steps

    async def _until_served(self) -> ServedModel | None:
        """The model, once there is one; None when the job was stopped before."""
        spec = self._job.entry.spec
        while not self._stopped.is_set():
            try:
                model = self._tools.catalog.resolve(spec.model, spec.version)
            except WeirError as error:
                if error.code is ErrorCode.INVALID_ARG:
                    raise
                if self.progress.note != error.message:
                    self._note(note=error.message)
                await self._rest()
            else:
                check_model(model)
                return model
        return None

    async def _claim(self, folder: JobFolder, fingerprint: str) -> bool:
        while not self._stopped.is_set():
            try:
                await self._in_thread(folder.claim, fingerprint)
                return True
            except WeirError as error:
                if not error.retryable:
                    raise
                await self._rest()
        return False

    async def _rest(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), _LOOK_AGAIN_S)

    def _in_thread(self, call: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        return self._loop.run_in_executor(self._threads, call, *arguments)

    # What is told

    def _note(self, **changed: Any) -> None:
        self.progress = replace(self.progress, updated_ms=unix_ms(), **{"note": "", **changed})
        self._report(self.progress)

    async def _end(self, progress: JobProgress) -> None:
        self.progress = replace(progress, updated_ms=unix_ms())
        await self._report(self.progress)


def check_model(model: ServedModel) -> None:
    """Raises WeirError (INVALID_ARG) for a model that jobs can't ask."""
    if model.config.is_decoupled:
        raise invalid(f"model '{model.name}' is decoupled: a job has a place for one response to each item alone")
    if model.config.sequence_batching is not None:
        raise invalid(f"model '{model.name}' takes sequences, which the items of a job are not")
