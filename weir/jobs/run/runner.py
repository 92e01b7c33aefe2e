"""`ItemRunner`: runs the items of one job: reads, submits and writes them as its `JobPlan` decides.

Files are read and written in threads. It ends when the job has ended or is stopped, never because of a temporary
condition: it waits for a full disk or an unavailable model.

`ItemReader`: reads the items of a job's input in a thread, a chunk ahead.

`request_for` makes the request of an item; `failure_kind` and `rejection_kind` classify its errors.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from copy import copy
from enum import Enum
from functools import partial
from itertools import islice

from weir.calls.dispatch import RequestDispatcher
from weir.calls.error_classes import ErrorClass, classify_error
from weir.calls.in_flight import PendingRequest
from weir.jobs.formats.items import ItemResult, JobInput, JobItem
from weir.jobs.records.record import JobSpec
from weir.jobs.run.plan import MAX_BACKOFF_S, JobPlan, PlanLimits
from weir.runtime.containment import contained
from weir.schemas.core.errors import ErrorCode, WeirError, internal, invalid
from weir.schemas.core.requests import InferRequest, InferResponse, Lane
from weir.schemas.core.tensors import Tensor

logger = logging.getLogger("weir.gateway")


SUBMITS_A_TURN = 16
"""Items submitted in one turn of the event loop, so that other requests need not wait long."""

TURN_BYTES = 256 << 10

Write = Callable[[Sequence[ItemResult]], int]


class ItemRunner:
    """Runs items. `write` writes consecutive results and returns how many of them failed; it blocks, and raises WeirError
    (UNAVAILABLE if a retry may succeed).
    """

    def __init__(  # noqa: PLR0913 - what a job reads, asks and writes
        self,
        spec: JobSpec,
        inference: RequestDispatcher,
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
        """The first failed item and its error; "" if none has failed."""
        self._items: dict[int, JobItem] = {}
        self._results: dict[int, ItemResult] = {}
        self._pending: dict[int, PendingRequest] = {}
        self._writing: asyncio.Future[int] | None = None
        self._write_at_s = 0.0
        self._write_faults = 0
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @property
    def failed(self) -> int:
        """The number of items of this runner that failed."""
        return self._failed_written + (0 if self._has_ended else self._failed_ahead)

    @property
    def done(self) -> int:
        """The number of items with an outcome; once `run` has returned, of written items."""
        return self.plan.written if self._has_ended else self.plan.settled

    @property
    def is_waiting(self) -> bool:
        """Whether it waits; `note` describes for what."""
        return self.plan.is_paused or self._write_faults > 0

    def stop(self) -> None:
        """Submits nothing more; `run` returns once the items in flight are written."""
        self.plan.stop()
        self._wake.set()

    def cancel(self) -> None:
        """Cancels the items in flight."""
        self.plan.stop()
        for number in self.plan.cancel():
            pending = self._pending.pop(number, None)
            if pending is not None:
                self._inference.cancel(pending)
        self._wake.set()

    async def run(self) -> None:
        """Returns when all items are written, or after `stop`. Raises WeirError if the input can't be read."""
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
            self.cancel()
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
                self._keep(number, ItemResult(item.number, item.source, None, item.inputs, item.kept))
            else:
                number = self.plan.read(size_of(item))
                self._items[number] = item

    def _submit_some(self) -> bool:
        """Submits items; returns whether there may be more to submit now."""
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
            key = f"job {self._spec.output}"  # one version for the whole job
            on_response = partial(self._on_response, number)
            self._pending[number] = self._inference.submit(request, on_response, traffic_key=key)
        except WeirError as error:
            if rejection_kind(error) is FailureKind.SERVER:
                self.note = error.message
                self.plan.pause(self._loop.time(), number)
            else:
                self._settle(number, error)
        return size_of(item)

    def _submit_broken(self, _error: Exception, number: int) -> int:
        """Fails one item that could not be submitted because of an unexpected exception."""
        pending = self._pending.pop(number, None)
        if pending is not None:
            self._inference.cancel(pending)
        if number in self._items:
            self._settle(number, internal("unexpected error while the item was handled: see the server's log"))
        return 0

    def _on_response(self, number: int, outcome: InferResponse | WeirError | None, is_final: bool) -> None:
        pending = self._pending.get(number)
        if pending is None:
            return  # it was cancelled
        now_s = self._loop.time()
        if not is_final:
            self._inference.cancel(pending)
            self._settle(
                number, internal("the model returned more than one response; an item of a job may have one only")
            )
        elif isinstance(outcome, WeirError):
            kind = failure_kind(outcome, pending.request)
            if kind is FailureKind.SERVER:
                self.note = outcome.message
                self.plan.pause(now_s, number)
            elif kind is FailureKind.FINAL or not self.plan.failed_once(now_s, number):
                self._settle(number, outcome)
        else:
            self._settle(number, outcome or internal("the model returned no response"))
        # Not before: an exception above has this called once more, with an internal error.
        del self._pending[number]
        self._wake.set()

    def _settle(self, number: int, outcome: InferResponse | WeirError) -> None:
        if isinstance(outcome, WeirError):
            size_bytes, outputs, error = len(outcome.message), None, outcome
        else:
            size_bytes, outputs, error = sum(tensor.size_bytes for tensor in outcome.outputs), outcome.outputs, None
        item = self._items.pop(number)
        size_bytes += sum(tensor.size_bytes for tensor in item.kept)
        self.note = ""
        self.plan.completed(self._loop.time(), number, size_bytes)
        self._keep(number, ItemResult(item.number, item.source, outputs, error, item.kept))
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
            # The disk may be full or unavailable: it is retried, and meanwhile the limits bound what is read.
            self._write_faults += 1
            self._write_at_s = self._loop.time() + min(MAX_BACKOFF_S, 2.0 ** min(self._write_faults, 5))
            self.note = error.message
            logger.warning("a job can't write its results and retries: %s", error.message)
            self.plan.shard_failed()
            return
        self._write_faults = 0
        cut = self.plan.shard_written()
        self._failed_written += failures
        for number in range(cut.first, cut.first + cut.count):
            self._failed_ahead -= self._results.pop(number).error is not None
        self._wake.set()


CHUNK_ITEMS = 128
CHUNK_BYTES = 4 << 20
"""Bytes of a chunk, which ends with the item that exceeds them."""


class ItemReader:
    """Reads items in chunks, one ahead of the one that was taken."""

    def __init__(
        self, source: JobInput, threads: Executor, numbers: Iterator[int] | None = None, start: int = 0
    ) -> None:
        """Reads all items from `start` on, or those of these `numbers` alone."""
        self._items = source.items(start) if numbers is None else _picked(source, numbers)
        self._threads = threads
        self._ahead: asyncio.Future[list[JobItem]] | None = None

    def begin(self) -> asyncio.Future[list[JobItem]]:
        """The chunk that is being read; the same one until it is taken."""
        if self._ahead is None:
            self._ahead = asyncio.get_running_loop().run_in_executor(self._threads, _chunk, self._items)
        return self._ahead

    def take(self) -> list[JobItem]:
        """Takes the chunk, which must be complete; empty at the end. Raises WeirError or OSError if reading failed."""
        assert self._ahead is not None  # noqa: S101 - `begin` was called
        chunk, self._ahead = self._ahead.result(), None
        return chunk


def size_of(item: JobItem) -> int:
    """Bytes of the tensors of an item."""
    return 0 if isinstance(item.inputs, WeirError) else sum(tensor.size_bytes for tensor in (*item.inputs, *item.kept))


def _chunk(items: Iterator[JobItem]) -> list[JobItem]:
    chunk: list[JobItem] = []
    size_bytes = 0
    for item in items:
        chunk.append(item)
        size_bytes += size_of(item)
        if size_bytes >= CHUNK_BYTES or len(chunk) >= CHUNK_ITEMS:
            break
    return chunk


def _picked(source: JobInput, numbers: Iterator[int]) -> Iterator[JobItem]:
    """The items with these ascending numbers; consecutive ones are read in one pass."""
    items: Iterator[JobItem] = iter(())
    following = -1
    for number in numbers:
        if number != following:
            items = source.items(number)
        yield from islice(items, 1)
        following = number + 1


class FailureKind(Enum):
    """What an error means for the item that got it."""

    FINAL = "final"
    """The item would fail again."""
    TRANSIENT = "transient"
    """The item may succeed when it is retried, which is done a limited number of times."""
    SERVER = "server"
    """The error is independent of the item: no worker serves the model, or a queue is full. The job waits and retries.
    """


def failure_kind(error: WeirError, request: InferRequest) -> FailureKind:
    """What `error` means, which was the response to an item's `request`."""
    kind = classify_error(error, request.timeout_us > 0)
    if kind is ErrorClass.SERVER or kind is ErrorClass.UNKNOWN_MODEL:
        return FailureKind.SERVER
    return FailureKind.TRANSIENT if kind is ErrorClass.TRANSIENT else FailureKind.FINAL


def rejection_kind(error: WeirError) -> FailureKind:
    """What `error` means, which was raised when an item was submitted: an unknown model may be loaded later."""
    return FailureKind.SERVER if error.retryable or error.code is ErrorCode.NOT_FOUND else FailureKind.FINAL


def request_for(spec: JobSpec, item: JobItem, inputs: list[Tensor]) -> InferRequest:
    """The request of an item. Raises WeirError for an item that is not supported in jobs."""
    # A submitted request is modified, and the item may be submitted again.
    request = copy(item.request) if item.request is not None else InferRequest(spec.model, id=item.source)
    if request.regions or any(output.region is not None for output in request.outputs):
        raise invalid("shared-memory regions are not supported in jobs")
    request.inputs = [Tensor(tensor.name, tensor.datatype, tensor.shape, tensor.data) for tensor in inputs]
    request.model_name, request.model_version = spec.model, spec.version
    if spec.priority:
        request.priority = spec.priority
    request.lane = Lane.BATCH
    return request
