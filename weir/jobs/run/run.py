"""`JobRun`: one process's turn at one job, from when it acquires the lease until the job ends or the lease is lost.

It holds nothing that is not in the output folder as well: the next turn continues at the first item that is in no shard.

`ProgressRate`: how fast a job has been in the last seconds, and how long the rest will take.
"""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from weir.calls.catalog import Catalog, ServedModel
from weir.calls.dispatch import RequestDispatcher
from weir.jobs.formats.files import JobOutput, default_output_format, open_input
from weir.jobs.formats.items import ItemResult, JobInput
from weir.jobs.records.folders import BatchRoots, OutputFolder
from weir.jobs.records.record import DesiredState, Job, JobProgress, JobState, check_model, unix_ms
from weir.jobs.run.plan import PlanLimits
from weir.jobs.run.runner import ItemReader, ItemRunner, Write
from weir.runtime.containment import contained
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError, invalid

INTERNAL_ERROR = "internal error: see the log of the process that ran the job"

REPORT_INTERVAL_S = 1.0

STOP_TIMEOUT_S = 2.0
"""How long items in flight may take when the process stops; the rest is run again."""

PAUSE_TIMEOUT_S = 60.0

_RETRY_S = 0.5

MAX_FAILURES_BEFORE_SUCCESS = 100
"""A job ends when all of its items so far have failed, from this number on, unless `max_failures` is set."""

MAX_IN_FLIGHT = 4096
"""The default of the items of one job in flight."""

Report = Callable[[JobProgress], "asyncio.Future[None]"]

Counts = Callable[[], tuple[int, int]]
"""Returns how many items are done, and how many of them failed."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What all runs of a process share."""

    owner_id: str
    inference: RequestDispatcher
    catalog: Catalog
    roots: BatchRoots
    attempts: int


class JobRun:
    """Runs one job. `report` is called with its progress about once a second and at the end."""

    def __init__(self, job: Job, context: RunContext, report: Report) -> None:
        self._job = job
        self._context = context
        self._report = report
        before = job.progress
        self.progress = replace(
            before,
            round=job.entry.round,
            state=JobState.RUNNING,
            owner=context.owner_id,
            started_ms=before.started_ms or unix_ms(),
            ended_ms=0,
            error="",
            note="",
        )
        self._desired = job.entry.wanted
        self._is_leaving = False
        self._first_failure = ""
        self._runner: ItemRunner | None = None
        self._stopped = asyncio.Event()
        self._threads = ThreadPoolExecutor(max_workers=3, thread_name_prefix="job")
        self._loop = asyncio.get_running_loop()

    def set_desired(self, desired: DesiredState) -> None:
        """Applies another desired state of the job."""
        if desired is self._desired or self._desired is DesiredState.CANCEL:
            return
        if desired is DesiredState.RUN:
            return  # it was about to pause: the next turn continues
        self._desired = desired
        self._stopped.set()
        self._stop_runner()

    def leave(self) -> None:
        """Ends the turn without ending the job: the process stops, or has lost the lease."""
        self._is_leaving = True
        self._stopped.set()
        self._stop_runner()

    def _stop_runner(self) -> None:
        runner = self._runner
        if runner is None:
            return
        runner.stop()
        if self._desired is DesiredState.CANCEL:
            runner.cancel()
        else:
            timeout_s = STOP_TIMEOUT_S if self._is_leaving else PAUSE_TIMEOUT_S
            self._loop.call_later(timeout_s, runner.cancel)

    async def run(self) -> None:
        """Runs the job and reports the outcome. Raises nothing but cancellation."""
        try:
            problem = await self._run_while_wanted()
            if problem and not self._is_leaving:
                await self._end(self.progress.ended(JobState.FAILED, problem))
        finally:
            # Threads finish their current step: no file is written after this returns.
            await asyncio.shield(asyncio.to_thread(self._threads.shutdown))

    @contained(on_error="_on_unexpected_error")
    async def _run_while_wanted(self) -> str:
        """Runs the job until it ends or another state is desired; returns why it failed, "" if it did not."""
        try:
            if self._desired is DesiredState.RUN:
                self._note()
                await self._work()
            if not self._is_leaving and not self.progress.state.is_final:
                if self._desired is DesiredState.CANCEL:
                    await self._end(self.progress.ended(JobState.CANCELLED))
                elif self._desired is DesiredState.PAUSE:
                    await self._end(replace(self.progress, state=JobState.PAUSED, note="", rate=0.0, left_s=-1.0))
        except WeirError as error:
            return error.message
        except OSError as error:
            return f"the job's files can't be used: {error.strerror or type(error).__name__}"
        return ""

    def _on_unexpected_error(self, _error: Exception) -> str:
        return INTERNAL_ERROR

    async def _work(self) -> None:
        model = await self._until_served()
        if model is None:
            return
        spec, roots = self._job.entry.spec, self._context.roots
        paths = await self._in_thread(roots.inputs, spec.inputs)
        folder = OutputFolder(await self._in_thread(roots.output, spec.output), self._job.id)
        source = await self._in_thread(open_input, paths, spec.input_format or None, model.config, None, spec.columns)
        try:
            await self._run_on(paths, source, folder, model.config)
        finally:
            await self._in_thread(source.close)

    async def _run_on(self, paths: Sequence[Path], source: JobInput, folder: OutputFolder, config: ModelConfig) -> None:
        spec = self._job.entry.spec
        fingerprint = await self._in_thread(source.fingerprint)
        if not await self._claim(folder, fingerprint):
            return
        try:
            format = spec.output_format or await self._in_thread(
                default_output_format, paths, spec.input_format or None
            )
            output = await self._in_thread(JobOutput, folder.path, format, config.output, source.kept)
            await self._convert(config.max_batch_size, source, output)
        finally:
            folder.release()

    async def _convert(self, max_batch_size: int, source: JobInput, output: JobOutput) -> None:
        covered = await self._in_thread(output.covered)
        shards = await self._in_thread(lambda: list(output.failures()))
        failed = sum(len(numbers) for _, numbers in shards)
        self._note(done=covered, failed=failed, note="counting the items of the input")
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
        summary = {**Job(self._job.entry, ended).to_dict(), "succeeded": done - failed}
        await self._in_thread(output.finish, summary)
        await self._end(ended)

    def _outcome(self, done: int, failed: int) -> JobProgress:
        """The final progress of a job whose items all have an outcome."""
        has_failed = 0 < done == failed and self._job.entry.spec.max_failures < 0
        error = f"{f'all {failed}' if failed == done else failed} items failed{self._first()}" if failed else ""
        return self.progress.ended(JobState.FAILED if has_failed else JobState.SUCCEEDED, error)

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
        """Runs all failed items again and replaces their results; returns how many failures are left."""
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

    def _runner_of(self, reader: ItemReader, write: Write, first: int, max_batch_size: int) -> ItemRunner:
        spec = self._job.entry.spec
        limits = PlanLimits(
            window=max(64, 4 * max_batch_size),
            most_in_flight=spec.max_in_flight or MAX_IN_FLIGHT,
            attempts=self._context.attempts,
        )
        return ItemRunner(spec, self._context.inference, reader, write, self._threads, first, limits)

    async def _run_runner(self, runner: ItemRunner, counts: Counts, limits_failures: bool = True) -> bool:
        """Runs a runner and reports the progress meanwhile; returns whether it has come to its end."""
        self._runner = runner
        if self._stopped.is_set():
            self._stop_runner()
        rate = ProgressRate()
        self._tick(runner, counts, rate, limits_failures)
        try:
            await runner.run()
        finally:
            self._runner = None
            self._first_failure = self._first_failure or runner.first_failure
            done, failed = counts()
            rate.note(self._loop.time(), runner.done)
            self._note(done=done, failed=failed, rate=rate.rate)
        if limits_failures:
            self._check_failures(runner.plan.is_done)
        return runner.plan.is_done

    def _tick(self, runner: ItemRunner, counts: Counts, rate: ProgressRate, limits_failures: bool) -> None:
        """Reports the progress now and periodically, and ends the job if too many items fail, while the runner runs."""
        if self._runner is not runner:
            return
        self._loop.call_later(REPORT_INTERVAL_S, self._tick, runner, counts, rate, limits_failures)
        done, failed = counts()
        rate.note(self._loop.time(), runner.done)
        left = max(0, self.progress.total - done) if self.progress.total >= 0 else -1
        note = runner.note if runner.is_waiting else ""
        self._note(done=done, failed=failed, rate=rate.rate, left_s=rate.left_s(left), note=note)
        if limits_failures and self._has_too_many_failures():
            runner.cancel()

    def _has_too_many_failures(self) -> bool:
        most, failed = self._job.entry.spec.max_failures, self.progress.failed
        return failed > most if most >= 0 else MAX_FAILURES_BEFORE_SUCCESS <= self.progress.done == failed

    def _check_failures(self, is_done: bool) -> None:
        # A job that has processed all items without a success fails at its end, with its summary written.
        is_through = is_done and self._job.entry.spec.max_failures < 0
        if self._has_too_many_failures() and not self._stopped.is_set() and not is_through:
            most, failed = self._job.entry.spec.max_failures, self.progress.failed
            why = f"max_failures is {most}" if most >= 0 else "no item succeeded"
            raise invalid(f"{failed} items failed, and {why}{self._first()}")

    # Steps

    async def _until_served(self) -> ServedModel | None:
        """The model, once it is served; None if the job was stopped before."""
        spec = self._job.entry.spec
        while not self._stopped.is_set():
            try:
                model = self._context.catalog.resolve(spec.model, spec.version)
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

    async def _claim(self, folder: OutputFolder, fingerprint: str) -> bool:
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
            await asyncio.wait_for(self._stopped.wait(), _RETRY_S)

    def _in_thread(self, call: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        return self._loop.run_in_executor(self._threads, call, *arguments)

    # Progress

    def _note(self, **changed: Any) -> None:
        self.progress = replace(self.progress, updated_ms=unix_ms(), **{"note": "", **changed})
        self._report(self.progress)

    async def _end(self, progress: JobProgress) -> None:
        self.progress = replace(progress, updated_ms=unix_ms())
        await self._report(self.progress)


_RATE_WINDOW_S = 15.0


class ProgressRate:
    """Computes the rate from the counts of done items of one run."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def note(self, now_s: float, done: int) -> None:
        """Notes how many items are done."""
        self._points.append((now_s, done))
        while len(self._points) > 2 and self._points[1][0] <= now_s - _RATE_WINDOW_S:
            self._points.popleft()

    @property
    def rate(self) -> float:
        """Items/s; 0 while unknown."""
        if len(self._points) < 2:
            return 0.0
        (began_s, before), (now_s, done) = self._points[0], self._points[-1]
        return (done - before) / (now_s - began_s) if now_s > began_s else 0.0

    def left_s(self, left: int) -> float:
        """How long `left` items will take, in seconds; -1 if unknown."""
        rate = self.rate
        return left / rate if rate > 0 and left >= 0 else -1.0
