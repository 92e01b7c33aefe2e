"""`JobRunner`: runs one job: items are read, asked, and written, as its `JobPlan` decides.

Files are read and written in threads. It ends when the job has, when it is stopped, and never for the sake of what may
pass: a disk that is full or a model that nobody serves is waited for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from calls.inference import Inference
from calls.pending import Pending
from gateway.jobs.files.items import ItemResult, JobItem
from gateway.jobs.item_reader import ItemReader, size_of
from gateway.jobs.item_requests import Meaning, meaning_of, meaning_of_refusal, request_for
from gateway.jobs.job_plan import MAX_BACKOFF_S, JobPlan, PlanLimits
from gateway.jobs.job_record import JobSpec
from runtime.containment import contained
from schemas.errors import WeirError, internal
from schemas.requests import InferResponse

logger = logging.getLogger("weir.gateway")

SUBMITS_A_TURN = 16
"""Items submitted in one turn of the event loop: live requests are not to wait for a job's."""

TURN_BYTES = 256 << 10

Write = Callable[[Sequence[ItemResult]], int]


class JobRunner:
    """See the module. `write` puts results of items in order on disk and tells how many failed; it blocks.

    It raises WeirError: UNAVAILABLE where it may succeed later.
    """

    def __init__(
        self,
        spec: JobSpec,
        inference: Inference,
        reader: ItemReader,
        write: Write,
        threads: ThreadPoolExecutor,
        first: int,
        limits: PlanLimits,
    ) -> None:
        self._spec = spec
        self._inference = inference
        self._reader = reader
        self._write = write
        self._threads = threads
        self.plan = JobPlan(first, limits)
        self._failed_written = 0
        self._failed_ahead = 0
        self._has_ended = False
        self.note = ""
        self.first_failure = ""
        """Which item failed first, and why; "" while none has."""
        self._items: dict[int, JobItem] = {}
        self._results: dict[int, ItemResult] = {}
        self._pending: dict[int, Pending] = {}
        self._writing: asyncio.Future[int] | None = None
        self._write_at_s = 0.0
        self._write_faults = 0
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @property
    def failed(self) -> int:
        """Items that failed, of those that this runner has seen."""
        return self._failed_written + (0 if self._has_ended else self._failed_ahead)

    @property
    def done(self) -> int:
        """Items that have an outcome; once `run` has returned, those that are written."""
        return self.plan.written if self._has_ended else self.plan.settled

    @property
    def is_held_up(self) -> bool:
        """Whether it waits for something: `note` tells what."""
        return self.plan.is_held_up or self._write_faults > 0

    def stop(self) -> None:
        """Asks nothing more; `run` returns once what is in flight has come and is written."""
        self.plan.stop()
        self._wake.set()

    def give_up(self) -> None:
        """Doesn't wait for what is in flight any more."""
        self.plan.stop()
        for number in self.plan.give_up():
            pending = self._pending.pop(number, None)
            if pending is not None:
                self._inference.abandon(pending)
        self._wake.set()

    async def run(self) -> None:
        """Returns when all is written, or the plan was stopped. Raises WeirError when the input can't be read."""
        reading: asyncio.Future[list[JobItem]] | None = None
        try:
            while not (self.plan.is_done or self.plan.is_idle):
                self._wake.clear()
                if reading is None and self.plan.has_room():
                    reading = self._reader.begin()
                    reading.add_done_callback(self._awake)
                if reading is not None and reading.done():
                    self._take_chunk()
                    reading = None
                    self._wake.set()
                if self._submit_some():
                    await asyncio.sleep(0)  # others' turn
                    self._wake.set()
                self._write_next()
                await self._wait()
        finally:
            self.give_up()
            for thread in (reading, self._writing):
                if thread is not None:
                    await asyncio.gather(thread, return_exceptions=True)
            self._has_ended = True

    async def _wait(self) -> None:
        now_s = self._loop.time()
        wake_s = self.plan.wake_s(now_s)
        if self._write_faults and self._writing is None:
            wake_s = self._write_at_s
        if wake_s is None:
            await self._wake.wait()
            return
        timer = self._loop.call_at(wake_s, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()

    def _awake(self, _future: object = None) -> None:
        self._wake.set()

    # Items

    def _take_chunk(self) -> None:
        chunk = self._reader.take()
        if not chunk:
            self.plan.read_all()
        for item in chunk:
            if isinstance(item.inputs, WeirError):
                number = self.plan.read_unreadable(self._loop.time())
                self._keep(number, ItemResult(item.number, item.source, None, item.inputs))
            else:
                number = self.plan.read(size_of(item))
                self._items[number] = item

    def _submit_some(self) -> bool:
        """Submits what may be now; whether there may be more."""
        submitted, size_bytes = 0, 0
        while submitted < SUBMITS_A_TURN and size_bytes < TURN_BYTES:
            numbers = self.plan.next_submits(self._loop.time(), 1)
            if not numbers:
                return False
            size_bytes += self._submit(numbers[0])
            submitted += 1
        return True

    @contained(on_error="_submit_broken")
    def _submit(self, number: int) -> int:
        item = self._items[number]
        if isinstance(item.inputs, WeirError):
            return 0
        try:
            request = request_for(self._spec, item, item.inputs)
            self._pending[number] = self._inference.submit(request, partial(self._on_answer, number))
        except WeirError as error:
            if meaning_of_refusal(error) is Meaning.NOBODYS_FAULT:
                self.note = error.message
                self.plan.refused(self._loop.time(), number)
            else:
                self._settle(number, error)
        return size_of(item)

    def _submit_broken(self, _error: Exception, number: int) -> int:
        self._settle_broken(_error, number)
        return 0

    def _settle_broken(self, _error: Exception, number: int, *_others: object) -> None:
        """Fails one item whose handling raised an unexpected exception."""
        pending = self._pending.pop(number, None)
        if pending is not None:
            self._inference.abandon(pending)
        if number in self._items:
            self._settle(number, internal("unexpected error while the item was handled: see the gateway's log"))

    @contained(on_error="_settle_broken")
    def _on_answer(self, number: int, outcome: InferResponse | WeirError | None, is_final: bool) -> None:
        if number not in self._pending:
            return  # it was given up
        if not is_final:
            self._inference.abandon(self._pending.pop(number))
            self._settle(number, internal("the model gave more than one response, which a job has no place for"))
            return
        request = self._pending.pop(number).request
        now_s = self._loop.time()
        if isinstance(outcome, WeirError):
            meaning = meaning_of(outcome, request)
            if meaning is Meaning.NOBODYS_FAULT:
                self.note = outcome.message
                self.plan.refused(now_s, number)
            elif meaning is Meaning.FINAL or not self.plan.failed_once(now_s, number):
                self._settle(number, outcome)
        else:
            self._settle(number, outcome or internal("the model gave no response"))
        self._wake.set()

    def _settle(self, number: int, outcome: InferResponse | WeirError) -> None:
        if isinstance(outcome, WeirError):
            size_bytes, outputs, error = len(outcome.message), None, outcome
        else:
            size_bytes, outputs, error = sum(tensor.size_bytes for tensor in outcome.outputs), outcome.outputs, None
        item = self._items.pop(number)
        self.note = ""
        self.plan.answered(self._loop.time(), number, size_bytes)
        self._keep(number, ItemResult(item.number, item.source, outputs, error))
        self._wake.set()

    def _keep(self, number: int, result: ItemResult) -> None:
        self._results[number] = result
        if result.error is not None:
            self._failed_ahead += 1
            self.first_failure = self.first_failure or f"{result.source}: {result.error.message}"

    # Shards

    def _write_next(self) -> None:
        if self._writing is not None and self._writing.done():
            self._end_write(self._writing)
            self._writing = None
        if self._writing is not None or self._loop.time() < self._write_at_s:
            return
        cut = self.plan.next_shard(self._loop.time())
        if cut is not None:
            results = [self._results[number] for number in range(cut.first, cut.first + cut.count)]
            self._writing = self._loop.run_in_executor(self._threads, self._write, results)
            self._writing.add_done_callback(self._awake)

    def _end_write(self, writing: asyncio.Future[int]) -> None:
        try:
            failures = writing.result()
        except WeirError as error:
            if not error.retryable:
                raise
            # The disk may be full, or away: it is tried again, and meanwhile no more is read than may be held.
            self._write_faults += 1
            self._write_at_s = self._loop.time() + min(MAX_BACKOFF_S, 2.0 ** min(self._write_faults, 5))
            self.note = error.message
            logger.warning("a job waits: %s", error.message)
            self.plan.shard_failed()
            return
        self._write_faults = 0
        cut = self.plan.shard_written()
        self._failed_written += failures
        for number in range(cut.first, cut.first + cut.count):
            self._failed_ahead -= self._results.pop(number).error is not None
        self._wake.set()
