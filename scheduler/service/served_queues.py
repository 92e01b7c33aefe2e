"""`ServedQueues`: what becomes of requests in the queues that a scheduler serves, from their frames to their ends.

A policy call never awaits. Messages that arrive during one turn of the loop are taken in before anything is dispatched,
so that requests that arrive together can share a batch.

What serves one queue is contained (`_in_queue`). An exception in the policy of a queue may leave its state inconsistent, so
that policy is recreated (`_queue_failed`), and no other queue is affected.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from weir.bus.kv.sequence_states import CheckpointReader, StoredSequence
from weir.bus.naming import subjects
from weir.bus.naming.live_queues import LiveQueue
from weir.bus.nats.connection import Bus, Message
from weir.bus.observation import Observed
from weir.bus.streams.pull import StandingPull
from weir.runtime.containment import contained
from weir.runtime.log_limiter import LogLimiter
from weir.scheduler.batching.batch import Batch
from weir.scheduler.batching.dispatch import LIVE
from weir.scheduler.batching.outcome import NOTHING_ENDED, Ended, Failure
from weir.scheduler.batching.request import QueuedRequest, by_frame, requests_of
from weir.scheduler.model_scheduler import ModelScheduler
from weir.scheduler.sequences.scheduler import FoundSequence, SoughtSequence
from weir.scheduler.sequences.sequence import replay_of
from weir.scheduler.service import clock
from weir.scheduler.service.lease_gate import LeaseGate
from weir.scheduler.service.messages import batch_message, by_message, cancellation_messages, error_responses
from weir.scheduler.service.observation import BatchFeed
from weir.scheduler.service.owned_queue import (
    DRAIN_BATCHES_S,
    DRAIN_WAITING_S,
    AckBundle,
    Intake,
    OwnedQueue,
    PulledFrame,
    QueueContext,
    TotalBufferedFrames,
    poll_until,
)
from weir.scheduler.service.policy_failure import log_policy_failure
from weir.scheduler.service.statistics import RetiredCounters
from weir.schemas.core.errors import internal
from weir.schemas.wire.batches import (
    BatchCompletion,
    BatchEnded,
    Batches,
    BatchLost,
    BatchNotRun,
    BatchRefused,
    BatchReleased,
    DirectRuns,
    NotRunReason,
    unpack_completions,
)
from weir.schemas.wire.calls import Cancellation, pack_error, pack_responses, unpack_frame
from weir.schemas.wire.codec import MalformedMessage
from weir.telemetry.logs import log_request, logs_requests

logger = logging.getLogger("weir.scheduler")

_Result = TypeVar("_Result")
_limited = LogLimiter(logger)
_contained_in_queue = contained(on_error="_queue_failed", is_logged=False)

_UNDECODABLE = "the request could not be decoded"
_NOT_SENT = "an unexpected error occurred while the request was sent to its worker; the scheduler's log has the details"
_QUEUE_FAILED = "an unexpected error occurred in the model's queue; the scheduler's log has the details"

MAX_LOOKUPS = 64
"""Sequences of former owners that are looked up at a time."""


class ServedQueues:
    """The queues of one scheduler, `by_name` and `of_model`, and the batches that they have in flight.

    Its owner is notified of batches that a worker rejected for a later owner of the queue (`on_batch_rejected`, with that
    owner's epoch) and of policies that raised (`on_policy_failed`).
    """

    def __init__(self, bus: Bus, scheduler_id: str, background: asyncio.TaskGroup, lease_gate: LeaseGate) -> None:
        self._bus = bus
        self._id = scheduler_id
        self._background = background
        self._guard = lease_gate.guard
        self.on_batch_rejected: Callable[[OwnedQueue, int], None] = lambda owned, epoch: None
        self.on_policy_failed: Callable[[OwnedQueue], None] = lambda owned: None
        self.by_name: dict[LiveQueue, OwnedQueue] = {}
        self.of_model: dict[str, list[OwnedQueue]] = defaultdict(list)
        self.retired = RetiredCounters()
        self._batches: dict[int, OwnedQueue] = {}
        self._observed = Observed(bus)
        self._feed = BatchFeed(self._observed, scheduler_id)
        self.acks = AckBundle(bus.publish)
        self._context = QueueContext(self.mark_dirty, bus.publish, TotalBufferedFrames(), self.acks)
        self._dirty: set[OwnedQueue] = set()  # queues that may have something to dispatch
        self._pump = self._guard(self._dispatch)
        self._checkpoints = CheckpointReader(bus)
        self._lookups = asyncio.Semaphore(MAX_LOOKUPS)
        self._take_found = self._guard(self._in_queue)
        self.malformed_messages = 0

    async def start(self) -> None:
        """Subscribes to ends of batches and leases of observers."""
        await self._bus.subscribe_with_links(subjects.done(self._id), self._guard(self._on_done))
        await self._observed.start()

    async def add(self, queue: LiveQueue, consumer: str, epoch: int, policy: ModelScheduler) -> OwnedQueue:
        """Returns a queue that is served from now on; what `consumer` delivers arrives once its pull is started."""
        stream, on_frame = self._bus.live_layout.stream(queue), self._guard(self._on_frame)
        pull = StandingPull(self._bus, stream, consumer, lambda message: on_frame(owned, message.data, message.reply))
        unsubscribe = await self._bus.subscribe(queue.inbox(self._id), pull.receive)
        owned = OwnedQueue(queue, epoch, policy, Intake(pull, unsubscribe), self._context)
        owned.counters = self.retired.restore(queue)
        self.by_name[queue] = owned
        self.of_model[queue.model].append(owned)
        act = self._guard(partial(self._in_queue, owned, self._on_cancel))
        owned.add_subscription(await self._bus.subscribe(queue.cancel_subject, act))
        return owned

    async def release(self, queue: LiveQueue) -> None:
        """Stops serving a queue after its requests have run; those that do not run in time go to its next owner."""
        owned = self.by_name[queue]
        owned.close()
        await poll_until(lambda: not len(owned.scheduler), DRAIN_WAITING_S)
        owned.stopped = True
        await poll_until(lambda: owned not in self._batches.values(), DRAIN_BATCHES_S)
        self.drop(owned)

    def drop(self, owned: OwnedQueue) -> None:
        """Stops serving a queue that has another owner: none of its requests is answered or acknowledged any more."""
        if self.by_name.get(owned.queue) is not owned:
            return
        owned.discard()
        del self.by_name[owned.queue]
        self.of_model[owned.name].remove(owned)
        self._batches = {id: of for id, of in self._batches.items() if of is not owned}
        self.retired.add(owned.queue, owned.counters, owned.scheduler)

    def resume(self, owned: OwnedQueue) -> None:
        """Serves a stopped queue again, which is still owned: batches that workers rejected are sent with its new epoch."""
        rejected, owned.rejected_batches, owned.stopped = owned.rejected_batches, [], False
        for batch_id in rejected:
            if self._batches.pop(batch_id, None) is owned:
                self._end_batches(owned, clock.now_us(), [BatchNotRun(batch_id, NotRunReason.SLOW)])
        self.mark_dirty(owned)

    async def stop(self, timeout_s: float) -> None:
        """Waits for running batches. Requests that have no response then stay in the stream for the next owner."""
        for owned in self.by_name.values():
            owned.close()
        await poll_until(lambda: not self._batches, timeout_s)
        self.acks.flush()

    def to_dicts(self) -> list[dict[str, Any]]:
        """Returns the counters of the queues that are served, and of those that were before."""
        rows = [row for owned in self.by_name.values() if (row := alone(owned.to_dict, clock.now_us()))]
        return rows + self.retired.to_dicts()

    # Requests

    def _on_frame(self, owned: OwnedQueue, data: bytes, ack_subject: str) -> None:
        if not ack_subject or owned.stopped:
            return  # not from the stream, and so without a claim to a response; or for the next owner
        now_us = clock.now_us()
        undecodable: list[int] = []

        def on_malformed(key: int | None, error: MalformedMessage) -> None:
            self.log_malformed(owned.name, error)
            if key is not None:
                undecodable.append(key)

        try:
            gateway, envelopes = unpack_frame(data, on_malformed)
        except MalformedMessage as error:
            self.log_malformed(owned.name, error)
            owned.pull.reject(ack_subject)
            return
        if undecodable:
            responses = [pack_error(key, internal(_UNDECODABLE)) for key in undecodable]
            self._bus.publish(subjects.reply(gateway), pack_responses(0, responses))
        owned.counters.frame_received(ack_subject)
        if not envelopes:
            owned.pull.ack(ack_subject)
            return
        frame = PulledFrame(owned, ack_subject, len(data), len(envelopes))
        owned.frame_received(len(data))
        self._enqueue(owned, requests_of(gateway, envelopes, now_us, frame, clock.at_unix_ms), now_us)

    @_contained_in_queue
    def _enqueue(self, owned: OwnedQueue, requests: list[QueuedRequest], now_us: int) -> None:
        owned.signals.add_arrivals(requests[0].terms.lane, len(requests))
        refused = owned.scheduler.enqueue(requests)
        if refused:
            self._answer_failures(refused)
        if owned.scheduler.may_seek:
            self._seek(owned)
        if owned.scheduler.has_withdrawn:
            self.finish(owned.scheduler.expire(now_us))
        self.mark_dirty(owned)

    def _seek(self, owned: OwnedQueue) -> None:
        """Looks up sequences of a former owner whose states are checkpointed."""
        for sought in owned.scheduler.take_sought():
            self._background.create_task(self._look_up(owned, sought))

    @contained(on_error="_look_up_failed")
    async def _look_up(self, owned: OwnedQueue, sought: SoughtSequence) -> None:
        async with self._lookups:
            found = await self._checkpoints.find(owned.name, *sought)
        self._take_found(owned, self._take_sequence, sought, found)

    def _look_up_failed(self, _error: Exception, owned: OwnedQueue, sought: SoughtSequence) -> None:
        """Ends the sequence as one of which nothing is stored: its requests wait for the lookup."""
        self._take_found(owned, self._take_sequence, sought, None)

    def _take_sequence(self, owned: OwnedQueue, sought: SoughtSequence, found: StoredSequence | None) -> None:
        if owned.stopped:
            return  # the queue may have another owner by now
        row = None
        if found is not None:
            requests = [replay_of(each, sought.version, sought.id) for each in found.requests]
            row = FoundSequence(*found.origin, found.checkpoint, *found.last, found.age_us, requests)
        self.finish(owned.scheduler.sequence_found(sought.version, sought.id, row))
        self._seek(owned)
        self.mark_dirty(owned)

    def _on_done(self, message: Message) -> None:
        try:
            completions, direct_runs = unpack_completions(message.data, lambda _, error: self.log_malformed("", error))
        except MalformedMessage as error:
            self.log_malformed("", error)
            return
        now_us = clock.now_us()
        by_queue: dict[OwnedQueue, list[BatchCompletion]] = {}
        for completion in completions:
            owned = self._batches.get(completion.batch_id)
            if owned is not None:
                by_queue.setdefault(owned, []).append(completion)
        for owned, of_queue in by_queue.items():
            self._end_batches(owned, now_us, of_queue)
        for runs in direct_runs:
            owned = self.by_name.get(LiveQueue(runs.model))
            if owned is not None:
                self._in_queue(owned, self._count_direct_runs, now_us, runs)

    def _count_direct_runs(self, owned: OwnedQueue, now_us: int, runs: DirectRuns) -> None:
        requests = 0
        for size, batches in runs.sizes:
            owned.counters.batch_requests.add(size, batches)
            requests += size * batches
        owned.signals.add_arrivals(LIVE, requests)
        owned.scheduler.record_direct_runs(now_us, runs.version, requests, runs.busy_us)

    @_contained_in_queue
    def _end_batches(self, owned: OwnedQueue, now_us: int, completions: Sequence[BatchCompletion]) -> None:
        completed: list[QueuedRequest] = []
        failures: list[Failure] = []
        try:
            for completion in completions:
                if self._feed.is_on:
                    alone(self._feed.ended, completion)
                if type(completion) is not BatchReleased and type(completion) is not BatchRefused:
                    self._batches.pop(completion.batch_id, None)
                if isinstance(completion, BatchRefused):
                    owned.batch_rejected(completion.batch_id)
                    self.on_batch_rejected(owned, completion.epoch)
                    continue
                ended = owned.scheduler.complete(now_us, completion)
                completed += ended[0]
                failures += ended[1]
                if isinstance(completion, BatchLost):
                    owned.batches_lost(1, "its process died")
                elif isinstance(completion, BatchNotRun):  # by which sequences lose their states
                    owned.batches_lost(0, "its batch did not run")
        finally:  # also those that have ended before one on which the policy raises
            self.finish((completed, failures))
        if owned.scheduler.waiting:
            self.mark_dirty(owned)

    def _on_cancel(self, owned: OwnedQueue, message: Message) -> None:
        if owned.stopped:
            return  # the queue may have another owner by now
        try:
            cancellation = Cancellation.unpack(message.data)
        except MalformedMessage as error:
            self.log_malformed(owned.name, error)
            return
        owned.signals.add_caller_rejections(cancellation.rejected)
        gateway, keys = cancellation.gateway, cancellation.keys
        self.finish(owned.scheduler.cancel(gateway, keys))
        for worker, message_to_worker in cancellation_messages(self._id, owned, gateway, keys):
            self._bus.publish(subjects.cancelled(worker), message_to_worker)
        if owned.scheduler.waiting:
            self.mark_dirty(owned)  # a sequence that ends with its request frees its slot

    def expire(self) -> None:
        """Ends requests that have waited too long. Called once a second, it also updates the measured load."""
        for owned in list(self.by_name.values()):
            alone(owned.signals.update, clock.now_us())
            self._in_queue(owned, self._expire_queue)

    def _expire_queue(self, owned: OwnedQueue) -> None:
        if not owned.stopped:
            self.finish(owned.scheduler.expire(clock.now_us()))

    def mark_dirty(self, owned: OwnedQueue) -> None:
        """Dispatches a queue at the end of the turn."""
        if not self._dirty:
            self._bus.defer(self._pump)
        self._dirty.add(owned)

    def _dispatch(self) -> None:
        dirty, self._dirty = self._dirty, set()
        now_us = clock.now_us()
        for owned in dirty:
            if not owned.stopped:
                self._dispatch_queue(owned, now_us)

    @_contained_in_queue
    def _dispatch_queue(self, owned: OwnedQueue, now_us: int) -> None:
        overdue = owned.scheduler.overdue(now_us)
        if overdue is not NOTHING_ENDED:
            self.finish(overdue)
        batches, wake_at_us = owned.scheduler.dispatch(now_us)
        for together in by_message(batches):
            self._send(owned, together, now_us)
        owned.timer.set(wake_at_us)

    @contained(on_error="_sending_failed")
    def _send(self, owned: OwnedQueue, batches: Sequence[Batch], now_us: int) -> None:
        """Sends batches for one worker in one message."""
        is_observed = self._feed.is_on
        sent_ns = time.time_ns() if is_observed else 0
        messages = [batch_message(self._id, owned, batch, now_us, sent_ns) for batch in batches]
        message = Batches(messages).pack()
        worker = batches[0].instance.worker
        logs = logs_requests(logger)
        for batch in batches:
            self._batches[batch.id] = owned
            if logs:
                where = f"instance {batch.instance.number} of version {batch.version} on {worker}"
                for request in batch.requests:
                    log_request(logger, f"in batch {batch.id} for {where}", owned.name, (request.gateway, request.key))
        self._bus.publish(subjects.work(worker), message, subjects.lost(self._id, worker))
        if is_observed:
            for batch in batches:
                alone(self._feed.sent, owned.name, batch, now_us)

    def _sending_failed(self, _error: Exception, owned: OwnedQueue, batches: Sequence[Batch], now_us: int) -> None:
        if len(batches) > 1:
            for batch in batches:
                self._send(owned, [batch], now_us)
            return
        (batch,) = batches
        self._batches.pop(batch.id, None)
        self._in_queue(owned, self._end_unsent, batch, now_us)

    def _end_unsent(self, owned: OwnedQueue, batch: Batch, now_us: int) -> None:
        """Ends a batch that could not be packed: its requests get an error, and its instance is free."""
        completed, failures = owned.scheduler.complete(now_us, BatchEnded(batch.id))
        unsent = [Failure(request, internal(_NOT_SENT)) for request in completed]
        self.finish(((), [*failures, *unsent]))
        self.mark_dirty(owned)

    def finish(self, ended: Ended) -> None:
        """Sends errors for requests that have failed, and counts all that have ended off their frames."""
        completed, failures = ended
        for frame, requests in by_frame(completed):
            frame.requests_ended(requests)
        if failures:
            self._answer_failures(failures)

    def _answer_failures(self, failures: Iterable[Failure]) -> None:
        for gateway, responses in error_responses(failures).items():
            self._bus.publish(subjects.reply(gateway), pack_responses(0, responses))

    def log_malformed(self, model: str, error: MalformedMessage) -> None:
        """Counts and logs a message that was dropped."""
        self.malformed_messages += 1
        _limited.warning("malformed message", "model %r: dropped a malformed message: %s", model, error)

    # Workers

    def workers(self) -> set[str]:
        """Returns the workers that hold batches."""
        queues = list(self.by_name.values())
        return {worker for owned in queues for worker in self._in_queue(owned, lambda of: of.scheduler.workers()) or ()}

    def in_flight_on(self, worker: str) -> list[int]:
        """Returns the batches that a worker holds, without those of stopped queues."""
        queues = [owned for owned in self.by_name.values() if not owned.stopped]
        held = [self._in_queue(owned, lambda of: of.scheduler.in_flight_on(worker)) or () for owned in queues]
        return list(chain.from_iterable(held))

    def lose_worker(self, worker: str) -> None:
        """Runs the batches of a lost worker again."""
        now_us = clock.now_us()
        for owned in list(self.by_name.values()):
            self._in_queue(owned, self._lose_worker, worker, now_us)

    def _lose_worker(self, owned: OwnedQueue, worker: str, now_us: int) -> None:
        batch_ids = owned.scheduler.in_flight_on(worker)
        for batch_id in batch_ids:
            self._batches.pop(batch_id, None)
        self.finish(owned.scheduler.worker_lost(now_us, worker))
        owned.batches_lost(len(batch_ids), f"worker {worker} was lost")
        self.mark_dirty(owned)

    def lose_batches(self, missing: Iterable[int]) -> None:
        """Runs batches again that were lost on the way to their workers."""
        by_queue: dict[OwnedQueue, list[int]] = defaultdict(list)
        for batch_id in missing:
            owned = self._batches.pop(batch_id, None)
            if owned is not None:
                by_queue[owned].append(batch_id)
        for owned, batch_ids in by_queue.items():
            self._in_queue(owned, self._batches_missing, batch_ids)

    def _batches_missing(self, owned: OwnedQueue, batch_ids: list[int]) -> None:
        _limited.warning(
            "batches lost", "queue %s: %d batches were lost on the way and are run again", owned.queue, len(batch_ids)
        )
        self.finish(owned.scheduler.batches_missing(clock.now_us(), sorted(batch_ids)))
        owned.batches_lost(len(batch_ids), "its batch was lost on the way")
        self.mark_dirty(owned)

    # Unexpected exceptions

    @_contained_in_queue
    def _in_queue(self, owned: OwnedQueue, act: Callable[..., _Result], *arguments: Any) -> _Result | None:
        """Does what serves one queue, but for the three steps of each request, which are contained themselves."""
        return act(owned, *arguments)

    def _queue_failed(self, error: Exception, owned: OwnedQueue, *arguments: object) -> None:
        """Drops a queue whose policy raised, perhaps in the middle of a change, so that its state is not reliable.

        Requests that were not sent to a worker end with an internal error; otherwise the request that makes the
        policy fail would return with its frame forever. Batches that were sent are answered by their workers. Their
        frames are not acknowledged here, so they are delivered again to the next server of the queue, which is this
        scheduler with a new policy.
        """
        if self.by_name.get(owned.queue) is not owned:
            logger.error("queue %s: another exception, in the policy that was dropped", owned.queue, exc_info=error)
            return
        coming = [each for some in arguments if isinstance(some, list) for each in some]
        waiting = dict.fromkeys(owned.scheduler.outside(self._batches))
        waiting.update(dict.fromkeys(each for each in coming if isinstance(each, QueuedRequest)))
        with ExitStack() as ends:  # from the last one to the first, each whatever the others raise
            ends.callback(self.on_policy_failed, owned)
            ends.callback(self.drop, owned)
            ends.callback(self._answer_failures, [Failure(request, internal(_QUEUE_FAILED)) for request in waiting])
            log_policy_failure(error, owned, self, self._batches, len(waiting))


@contained()
def alone(act: Callable[..., _Result], *arguments: Any) -> _Result | None:
    """Does a part of what serves all queues: if it raises, the others are done."""
    return act(*arguments)
