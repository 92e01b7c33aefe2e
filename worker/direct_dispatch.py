"""`DirectDispatcher`: runs requests of this worker itself on its own instances, without the broker and the scheduler.

The steps of an ensemble, and the calls of Python models, often name a model that an instance of the same worker is ready to
run. The way through stream `LIVE`, the scheduler and back then costs many times what a small model takes. So a scheduler
that sends a worker a batch with requests of that worker itself may grant it leave (`DirectGrant`) to run further
requests for that queue and version at once, for a fraction of a second. It does so only for models whose waiting requests
start as soon as an instance is free, and that are fast (`VersionQueue.direct_request_us`).

The rules here keep what the scheduler promises:

- A request starts only on an instance that runs nothing, or behind other requests of this worker that were started here,
  never beside or before a batch of a scheduler. While all instances have such batches, requests go to the scheduler, where
  they share batches with those of other callers.
- Requests of one turn of the event loop, and those that wait for the batch before them, share batches by the model's rules.
- A batch of a scheduler that arrives meanwhile waits for what has started here: at most about `MAX_AHEAD_US`.
- Half-way through a grant one request goes to the scheduler, which renews the grant or does not.
- What ran here is reported to the scheduler (`DirectRuns`), for its counters and its estimates.

A request that is not run for any reason goes to the scheduler. The instance, its statistics and its responses are the same
on both ways. A worker that dies takes the requests along: then the request of the ensemble runs again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from itertools import count

from weir.bus.naming import subjects
from weir.bus.naming.identity import lies_elsewhere
from weir.bus.nats.connection import Bus
from weir.calls.in_flight import PendingRequest
from weir.runtime.containment import contained
from weir.schemas.core.requests import Lane
from weir.schemas.core.tensors import PayloadRef
from weir.schemas.wire.batches import (
    BatchCompletion,
    BatchEnded,
    BatchEntry,
    BatchLost,
    BatchMessage,
    BatchReleased,
    DirectGrant,
    DirectRunReport,
    DirectRuns,
)
from weir.telemetry.logs import log_request, logs_requests
from weir.worker.execution.batch import Batch
from weir.worker.execution.instance import ModelInstance
from weir.worker.execution.updates import BatchUpdate
from weir.worker.lifecycle.loader import LoadResult
from weir.worker.lifecycle.served_version import ServedVersion

logger = logging.getLogger("weir.worker")

MAX_AHEAD_US = 2_000
"""The expected time of all requests started here on one instance, for which a batch of a scheduler may have to wait."""

RENEWAL_INTERVAL_S = 0.02
"""How long the request that may renew a grant is awaited before the next one is sent."""

REPORT_DELAY_S = 0.1
"""How long runs are collected for one report."""

SLOW_US = 50_000
"""A batch that takes so long ends the grant. On a busy machine any batch may take longer than expected."""


class _Grant:
    """The leave of one scheduler to run requests for `queue` and version `wanted` (-1: the latest) as version `version`."""

    __slots__ = (
        "busy_us",
        "is_report_due",
        "queue",
        "renew_s",
        "request_us",
        "scheduler",
        "sizes",
        "until_s",
        "version",
        "waiting",
    )

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.scheduler = ""
        self.version = 0
        self.until_s = 0.0
        self.renew_s = 0.0
        self.request_us = 0  # the expected time of one
        self.waiting: deque[tuple[PendingRequest, int]] = deque()  # with the times of their arrival
        # Not reported yet: batches by their number of requests, and how long they kept instances busy.
        self.sizes: Counter[int] = Counter()
        self.busy_us = 0
        self.is_report_due = False


class _DirectBatch:
    """A batch that an instance has. It `is_released` once it does not occupy the instance any more."""

    __slots__ = ("grant", "instance", "is_released", "requests", "running")

    def __init__(self, grant: _Grant, instance: ModelInstance, running: Batch, requests: list[PendingRequest]) -> None:
        self.grant = grant
        self.instance = instance
        self.running = running
        self.requests = requests
        self.is_released = False


class DirectDispatcher:
    """Runs requests of the worker `worker_id` itself. Methods are for the event loop if they do not say otherwise.

    `attach` sets where responses go (`on_responses`, with a responses message) and requests that the scheduler must run
    (`on_requeue`).
    """

    def __init__(self, bus: Bus, worker_id: str) -> None:
        self._bus = bus
        self._worker_id = worker_id
        self._loop = asyncio.get_running_loop()
        self._models: Mapping[str, LoadResult] = {}
        self._find: Callable[[int], PendingRequest | None] = lambda key: None
        self._on_responses: Callable[[bytes], None] = lambda data: None
        self._on_requeue: Callable[[PendingRequest], None] = lambda pending: None
        self._grants: dict[tuple[object, int], _Grant] = {}
        self._batches: dict[int, _DirectBatch] = {}
        self._of_instance: Counter[ModelInstance] = Counter()  # started here and not ended
        # Each request with the batch that it is in, or the grant by which it waits.
        self._by_key: dict[int, tuple[PendingRequest, _DirectBatch | _Grant]] = {}
        self._ids = count(1)
        self._is_flush_scheduled = False
        self._updates: deque[BatchUpdate] = deque()
        self._is_drain_scheduled = False

    def attach(
        self,
        find: Callable[[int], PendingRequest | None],
        on_responses: Callable[[bytes], None],
        on_requeue: Callable[[PendingRequest], None],
    ) -> None:
        """Connects it with the client of this worker, whose pending requests `find` returns by key."""
        self._find, self._on_responses, self._on_requeue = find, on_responses, on_requeue

    def serve(self, models: Mapping[str, LoadResult]) -> None:
        """Sets the loaded models by identity, a mapping that changes with them."""
        self._models = models

    # Grants

    def granted(self, batch: BatchMessage, terms: DirectGrant) -> None:
        """Takes the grant of a batch message, for the versions that the requests of this worker in the batch ask for."""
        now_s = time.monotonic()
        for entry in batch.entries:
            pending = self._find(entry.key) if entry.gateway == self._worker_id else None
            if pending is None or type(pending.queue) is not str:
                continue  # a partition is one of several queues, each with a scheduler of its own
            key = pending.queue, pending.envelope.version
            grant = self._grants.get(key)
            if grant is None:
                grant = self._grants[key] = _Grant(pending.queue)
            elif grant.scheduler != batch.scheduler or grant.version != batch.version:
                self._report(grant)
            grant.scheduler, grant.version = batch.scheduler, batch.version
            grant.request_us = terms.request_us
            grant.until_s = now_s + terms.duration_ms / 1e3
            grant.renew_s = now_s + terms.duration_ms / 2e3

    def forget(self, model: str) -> None:
        """Ends the grants for a model that was reloaded or unloaded."""
        for key in [key for key in self._grants if key[0] == model]:
            grant = self._grants.pop(key)
            self._report(grant)
            self._requeue_waiting(grant)

    # Requests

    def take(self, pending: PendingRequest) -> bool:
        """Whether the request is run here: at the end of this turn of the event loop it starts, or goes to `on_requeue`."""
        envelope = pending.envelope
        grant = self._grants.get((pending.queue, envelope.version))
        if grant is None or envelope.lane != Lane.LIVE:
            return False
        now_s = time.monotonic()
        if now_s >= grant.renew_s:
            # This request asks for the next grant. The others go on as long as the present one lasts.
            grant.renew_s = min(now_s + RENEWAL_INTERVAL_S, grant.until_s)
            return False
        if len(grant.waiting) * grant.request_us > MAX_AHEAD_US or (envelope.payload_host and _lies_elsewhere(pending)):
            return False
        grant.waiting.append((pending, time.monotonic_ns()))
        self._by_key[pending.key] = pending, grant
        if logs_requests(logger):
            step = "started without the scheduler"
            log_request(logger, step, pending.model.name, (self._worker_id, pending.key), pending.request.id)
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            self._bus.defer(self._flush)
        return True

    def cancel(self, pending: PendingRequest) -> None:
        """Cancels a request if it is run here: a waiting one does not start, the instance is told of a started one."""
        _, found = self._by_key.pop(pending.key, (None, None))
        if isinstance(found, _Grant):
            found.waiting = deque(each for each in found.waiting if each[0] is not pending)
        elif found is not None:
            found.running.cancel(self._worker_id, (pending.key,))

    def _flush(self) -> None:
        self._is_flush_scheduled = False
        for grant in list(self._grants.values()):
            if grant.waiting:
                self._start_waiting(grant)

    @contained(on_error="_start_failed")
    def _start_waiting(self, grant: _Grant) -> None:
        result = self._models.get(grant.queue)
        served = None if result is None else result.served.get(grant.version)
        instances = [] if served is None else _direct_instances(served)
        free = [each for each in instances if not each.held]
        if served is not None and free:
            if served.runs_alone:
                self._start_each(grant, free)
            else:
                self._start_batches(grant, free, served.model.config.max_batch_size)
        elif not any(self._of_instance[each] for each in instances):
            self._requeue_waiting(grant)

    def _start_failed(self, _error: Exception, grant: _Grant) -> None:
        """Gives the scheduler all requests of the grant that no instance has."""
        grant.waiting.clear()
        for pending in [pending for pending, found in self._by_key.values() if found is grant]:
            self._requeue(pending)

    def _start_each(self, grant: _Grant, free: list[ModelInstance]) -> None:
        """Starts each request as a batch of its own, one after another on each instance."""
        number = 0
        while grant.waiting:
            self._start(grant, free[number % len(free)], [grant.waiting.popleft()])
            number += 1

    def _start_batches(self, grant: _Grant, free: list[ModelInstance], max_rows: int) -> None:
        """Starts a batch of requests with equal shapes on each instance, as far as there are requests."""
        for instance in free:
            if not grant.waiting:
                return
            first = grant.waiting.popleft()
            batch, rows = [first], first[0].envelope.batch_size
            while grant.waiting:
                envelope = grant.waiting[0][0].envelope
                rows += envelope.batch_size
                if rows > max_rows or envelope.shape_key != first[0].envelope.shape_key:
                    break
                batch.append(grant.waiting.popleft())
            self._start(grant, instance, batch)

    def _start(self, grant: _Grant, instance: ModelInstance, requests: list[tuple[PendingRequest, int]]) -> None:
        now_ns = time.monotonic_ns()
        entries = [
            BatchEntry(
                self._worker_id,
                pending.key,
                (now_ns - arrived_ns) // 1000,
                pending.envelope.body,
                pending.envelope.deadline_ms,
            )
            for pending, arrived_ns in requests
        ]
        batch_id = next(self._ids)
        message = BatchMessage(self._worker_id, batch_id, grant.queue, grant.version, 0, entries)
        running = Batch(message, self._worker_id)
        batch = _DirectBatch(grant, instance, running, [pending for pending, _ in requests])
        instance.submit(running)
        self._batches[batch_id] = batch
        self._of_instance[instance] += 1
        for pending in batch.requests:
            self._by_key[pending.key] = pending, batch

    def _requeue_waiting(self, grant: _Grant) -> None:
        waiting, grant.waiting = grant.waiting, deque()
        for pending, _ in waiting:
            self._requeue(pending)

    def _requeue(self, pending: PendingRequest) -> None:
        if self._by_key.pop(pending.key, None) is not None:
            self._on_requeue(pending)

    # Ends

    def update(self, update: BatchUpdate) -> None:
        """Takes an update of a batch that was started here; called in any thread."""
        self._updates.append(update)
        if not self._is_drain_scheduled:
            self._is_drain_scheduled = True
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._is_drain_scheduled = False  # before the updates are taken: one that comes later schedules another call
        self._is_flush_scheduled = True  # requests that follow from these responses start below
        while self._updates:
            self._apply(self._updates.popleft())
        self._flush()

    @contained(on_error="_apply_failed")
    def _apply(self, update: BatchUpdate) -> None:
        for _, responses in update.responses:
            self._on_responses(responses)
        for completion in update.completions:
            self._complete(completion)

    def _apply_failed(self, _error: Exception, update: BatchUpdate) -> None:
        """Ends the batches; the scheduler runs the requests that have no response."""
        for completion in update.completions:
            self._complete(BatchLost(completion.batch_id))

    def _complete(self, completion: BatchCompletion) -> None:
        """Ends a batch, or frees its instance before. Requests without a response go to the scheduler."""
        is_released, batch_id = isinstance(completion, BatchReleased), completion.batch_id
        batch = self._batches.get(batch_id) if is_released else self._batches.pop(batch_id, None)
        if batch is None:
            return
        if not batch.is_released:
            batch.is_released = True
            self._of_instance[batch.instance] -= 1
            if isinstance(completion, BatchEnded | BatchReleased | BatchLost):
                self._count(batch.grant, len(batch.requests), completion.busy_us)
        if is_released:
            return
        for pending in batch.requests:
            # A response that could not be applied leaves its request without one, although the batch has ended well.
            if isinstance(completion, BatchEnded) and self._find(pending.key) is not pending:
                self._by_key.pop(pending.key, None)
            else:
                self._requeue(pending)

    def _count(self, grant: _Grant, requests: int, busy_us: int) -> None:
        if busy_us > SLOW_US:
            grant.until_s = grant.renew_s = 0.0  # a scheduler must know of batches that are as slow
        if not grant.is_report_due:
            grant.is_report_due = True
            self._loop.call_later(REPORT_DELAY_S, self._report, grant)
        grant.sizes[requests] += 1
        grant.busy_us += busy_us

    @contained()
    def _report(self, grant: _Grant) -> None:
        grant.is_report_due = False
        if not grant.sizes:
            return
        runs = DirectRuns(grant.queue, grant.version, list(grant.sizes.items()), grant.busy_us)
        grant.sizes, grant.busy_us = Counter(), 0
        self._bus.publish(subjects.done(grant.scheduler), DirectRunReport(self._worker_id, [], [runs]).pack())


def _direct_instances(served: ServedVersion) -> list[ModelInstance]:
    return [each for each in served.instances if isinstance(each, ModelInstance) and each.runs_directly]


def _lies_elsewhere(pending: PendingRequest) -> bool:
    return any(isinstance(t.data, PayloadRef) and lies_elsewhere(t.data.segment) for t in pending.request.inputs)
