"""`SchedulerService`: the shell around the policies. It feeds bus messages to them and carries out what they decide.

Everything runs in one event loop, and a policy call never awaits. Messages that arrive during one turn of the loop
are taken in before anything is dispatched, so that requests that arrive together can share a batch. Every message
passes the `LeaseGate`, which holds it back while it is uncertain which queues this scheduler owns.

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
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from weir.bus.kv.registry import RegistryView
from weir.bus.kv.sequence_states import CheckpointReader, StoredSequence
from weir.bus.links.link import LinkEnd
from weir.bus.naming import subjects
from weir.bus.naming.live_queues import LiveQueue
from weir.bus.naming.reserved_subjects import may_reply_to
from weir.bus.nats.connection import Bus, Message
from weir.bus.observation import Observed
from weir.bus.streams.declarations import ensure_streams, live_pull_group
from weir.bus.streams.pull import StandingPull
from weir.runtime.containment import contained
from weir.runtime.log_limiter import LogLimiter
from weir.runtime.ticks import next_tick
from weir.scheduler.batching.batch import Batch, BatchReconciler
from weir.scheduler.batching.custom_strategy import StrategyFiles
from weir.scheduler.batching.dispatch import LIVE
from weir.scheduler.batching.outcome import NOTHING_ENDED, Ended, Failure
from weir.scheduler.batching.request import QueuedRequest, by_frame, requests_of
from weir.scheduler.model_scheduler import ModelScheduler
from weir.scheduler.sequences.scheduler import FoundSequence, SoughtSequence
from weir.scheduler.sequences.sequence import replay_of
from weir.scheduler.service import clock
from weir.scheduler.service.former_sequences import SequenceReports, SequenceSurvey
from weir.scheduler.service.known_models import KnownModelStore
from weir.scheduler.service.lease_gate import LeaseGate
from weir.scheduler.service.messages import batch_message, by_message, cancellation_messages, error_responses
from weir.scheduler.service.observation import BatchFeed
from weir.scheduler.service.owned_queue import (
    AckBundle,
    Intake,
    OwnedQueue,
    PulledFrame,
    QueueContext,
    TotalBufferedFrames,
    drain_queue,
    poll_until,
)
from weir.scheduler.service.policy_failure import log_policy_failure
from weir.scheduler.service.registry_watcher import RegistryWatcher
from weir.scheduler.service.statistics import RetiredCounters, pack_scheduler_counters
from weir.scheduler.service.stopped_workers import StoppedWorkers
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
from weir.schemas.wire.model_control import DrainMessage
from weir.schemas.wire.registry import Heartbeat
from weir.telemetry.logs import log_request, logs_requests

logger = logging.getLogger("weir.scheduler")

_Result = TypeVar("_Result")

_limited = LogLimiter(logger)

_contained_in_queue = contained(on_error="_queue_failed", is_logged=False)

PROBE_INTERVAL_S = 0.25
"""How often workers that hold batches are probed: the death of one is noticed within this time."""

_UNDECODABLE = "the request could not be decoded"

_NOT_SENT = "an unexpected error occurred while the request was sent to its worker; the scheduler's log has the details"

_QUEUE_FAILED = "an unexpected error occurred in the model's queue; the scheduler's log has the details"

MAX_LOOKUPS = 64
"""Sequences of former owners that are looked up at a time."""

RECENT_LOSS_S = 10.0
"""Time after the loss of a worker within which a former owner may have died together with it."""

RECONNECT_GRACE_S = 2.0
"""How long after a reconnection no process is considered dead: the others have to reconnect, too."""


class ServiceOptions(NamedTuple):
    """How a scheduler serves its queues.

    `new_policy` creates the policy of a queue from the model's name and a function that draws batch ids. `repositories` are
    the folders in which it looks for models' own batch strategies. With `scale_to_zero` it remembers models whose workers
    have all left.
    """

    new_policy: Callable[[str, Callable[[], int]], ModelScheduler] = ModelScheduler
    repositories: Sequence[Path] = ()
    scale_to_zero: bool = False


class SchedulerService:
    """One scheduler process: serves the queues that it owns and keeps their instances busy.

    `weir.scheduler.ownership` decides which queues those are: it calls `serve`, `release`, `drop` and `resume`. It is
    notified of batches that a worker rejected for a later owner (`on_batch_rejected`, with that owner's epoch) and of
    policies that raised (`on_policy_failed`), and knows which ids were schedulers (`is_lost_scheduler`).
    """

    def __init__(
        self,
        bus: Bus,
        scheduler_id: str,
        background: asyncio.TaskGroup,
        options: ServiceOptions = ServiceOptions(),  # noqa: B008 - immutable
    ) -> None:
        self._new_policy = options.new_policy
        self._bus = bus
        self._background = background
        self._id = scheduler_id
        self._born_ns = time.time_ns()
        self.registry = RegistryView(bus)
        self.lease_gate = LeaseGate()
        self.on_batch_rejected: Callable[[OwnedQueue, int], None] = lambda owned, epoch: None
        self.is_lost_scheduler: Callable[[str], bool] = lambda id: False
        self.on_policy_failed: Callable[[OwnedQueue], None] = lambda owned: None
        self._queues: dict[LiveQueue, OwnedQueue] = {}
        self._of_model: dict[str, list[OwnedQueue]] = defaultdict(list)
        self._retired = RetiredCounters()
        self._batches: dict[int, OwnedQueue] = {}
        self._batch_ids = count(1)
        self._observed = Observed(bus)
        self._feed = BatchFeed(self._observed, scheduler_id)
        self.acks = AckBundle(bus.publish)
        self._context = QueueContext(self._mark_dirty, bus.publish, TotalBufferedFrames(), self.acks)
        self.known = KnownModelStore(bus, self.registry, self._owns, options.scale_to_zero)
        self._watcher = RegistryWatcher(self.registry, StrategyFiles(options.repositories), self.known.get)
        self.queues_of = self._watcher.queues_of
        self._dirty: set[OwnedQueue] = set()  # queues that may have something to dispatch
        self._pump = self.lease_gate.guard(self._dispatch)
        self._expire_requests = self.lease_gate.guard(self._expire)
        self._reconciler = BatchReconciler(scheduler_id)
        self._stopped_workers = StoppedWorkers()
        self._checkpoints = CheckpointReader(bus)
        self._lookups = asyncio.Semaphore(MAX_LOOKUPS)
        self._take_found = self.lease_gate.guard(self._in_queue)
        self._survey = SequenceSurvey(bus, scheduler_id, _limited)
        self._worker_lost_s = -RECENT_LOSS_S
        self._no_deaths_before_s = 0.0
        self._ticker: asyncio.Task[None] | None = None
        self.malformed_messages = 0

    async def start(self) -> None:
        """Connects to the streams and the registry; when it returns, the workers are known and no queue is served yet."""
        await ensure_streams(self._bus)
        await self.listen()
        self.registry.on_model_change(self.lease_gate.guard(self._on_model_change))
        self.registry.on_worker_lost(self._note_lost_worker)
        self.registry.on_worker_lost(self.lease_gate.guard(self._on_worker_lost))
        self.registry.on_heartbeat(self.lease_gate.guard(self._on_heartbeat))
        await self.known.start(self._background)
        await self.registry.start(self._background)
        self._ticker = self._background.create_task(self._tick())
        self._bus.publish(subjects.LAST_COUNTERS, self._counters())

    async def listen(self) -> None:
        """Subscribes to ends of batches, reports of lost workers and statistics queries."""
        await self._bus.subscribe_with_links(subjects.done(self._id), self.lease_gate.guard(self._on_done))
        self._bus.links.on_lost(self.lease_gate.guard(self._on_link_lost))
        await self._bus.subscribe(subjects.lost(self._id, "*"), self.lease_gate.guard(self._on_lost))
        await self._bus.subscribe(subjects.STATISTICS_QUERY, self._on_statistics_query)
        await self._survey.start()
        await self._observed.start()

    async def serve(
        self, queue: LiveQueue, consumer: str, epoch: int = 0, former: SequenceReports | None = None
    ) -> OwnedQueue:
        """Serves a queue with the frames that `consumer` delivers.

        `former`: it had another owner before, whose sequences workers have reported.
        """
        inbox = queue.inbox(self._id)
        on_frame = self.lease_gate.guard(self._on_frame)
        pull = StandingPull(
            self._bus,
            self._bus.live_layout.stream(queue),
            consumer,
            lambda message: on_frame(owned, message.data, message.reply),
        )
        unsubscribe = await self._bus.subscribe(inbox, pull.receive)
        policy = self._new_policy(queue.model, self._batch_ids.__next__)
        if former is not None:
            policy.take_over(clock.now_us(), former.sequences, former.is_complete)
        owned = OwnedQueue(queue, epoch, policy, Intake(pull, unsubscribe), self._context)
        owned.counters = self._retired.restore(queue)
        self._queues[queue] = owned
        self._of_model[queue.model].append(owned)
        for subject, act in (
            (queue.cancel_subject, partial(self._in_queue, owned, self._on_cancel)),
            (queue.drain_subject, partial(self._on_drain, owned)),
        ):
            ends = await self._bus.subscribe(subject, self.lease_gate.guard(act))
            owned.add_subscription(ends)
        self._alone(self._follow, owned)
        pull.start(inbox, live_pull_group(epoch))
        return owned

    async def former_sequences(self, queue: LiveQueue, had_owner: bool) -> SequenceReports | None:
        """Returns the sequences of the former owner of a queue that is about to be served; None if it had none.

        `had_owner`: the queue is known to have had another owner. Without a record of it, the broker may have lost that.
        """
        views = {worker: view for worker, view in self.registry.workers.items() if queue.model in view.models}
        # A worker that still loads the model has no configuration in its record, and no sequences.
        configs = [config for view in views.values() if (config := view.models[queue.model].config) is not None]
        is_stateful = any(config.get("sequence_batching") is not None for config in configs)
        if not is_stateful and (configs or not had_owner):
            return None
        reports = await self._survey.ask(queue, views)
        # A worker that was lost together with the owner has had sequences that no worker reports.
        is_complete = reports.is_complete and time.monotonic() - self._worker_lost_s > RECENT_LOSS_S
        return reports._replace(is_complete=is_complete and bool(configs))

    def _owns(self, model: str) -> bool:
        return LiveQueue(model) in self._queues

    def find(self, queue: LiveQueue) -> OwnedQueue | None:
        """Returns the queue if it is served here, else None."""
        return self._queues.get(queue)

    async def release(self, queue: LiveQueue) -> None:
        """Stops serving a queue after its requests have run; those that do not run in time go to its next owner."""
        owned = self._queues[queue]
        await drain_queue(owned, lambda: owned in self._batches.values())
        self.drop(owned)

    def drop(self, owned: OwnedQueue) -> None:
        """Stops serving a queue that has another owner: none of its requests is answered or acknowledged any more."""
        if self._queues.get(owned.queue) is not owned:
            return
        owned.discard()
        del self._queues[owned.queue]
        self._of_model[owned.name].remove(owned)
        self._batches = {id: of for id, of in self._batches.items() if of is not owned}
        self._retired.add(owned.queue, owned.counters, owned.scheduler)

    def resume(self, owned: OwnedQueue) -> None:
        """Serves a stopped queue again, which is still owned: batches that workers rejected are sent with its new epoch."""
        rejected, owned.rejected_batches, owned.stopped = owned.rejected_batches, [], False
        for batch_id in rejected:
            if self._batches.pop(batch_id, None) is owned:
                self._end_batches(owned, clock.now_us(), [BatchNotRun(batch_id, NotRunReason.SLOW)])
        self._mark_dirty(owned)

    def suspend_death_detection(self) -> None:
        """Considers no process dead for a while: the broker has come back, and others have to reconnect."""
        self._no_deaths_before_s = time.monotonic() + RECONNECT_GRACE_S
        self._reconciler.clear()

    async def stop(self, timeout_s: float) -> None:
        """Waits for running batches. Requests that have no response then stay in the stream for the next owner."""
        for owned in self._queues.values():
            owned.close()
        await poll_until(lambda: not self._batches, timeout_s)
        if self._ticker is not None:
            self._ticker.cancel()
        for task in self.known.tasks:
            task.cancel()
        self.acks.flush()
        self._bus.publish(subjects.LAST_COUNTERS, self._counters(leaving=True))

    def known_models(self) -> set[str]:
        """Returns the models that have a version on a worker, whatever its state, or that are remembered."""
        views = self.registry.workers.values()
        return {name for view in views for name, row in view.models.items() if row.versions} | self.known.names()

    @property
    def unanswered(self) -> int:
        """Requests that were accepted and have not ended."""
        return sum(len(owned.scheduler) for owned in self._queues.values())

    @property
    def owned_queues(self) -> list[tuple[str, int, int]]:
        """Model, partition and epoch of each queue that is served."""
        return [(*queue, owned.epoch) for queue, owned in self._queues.items()]

    def _on_frame(self, owned: OwnedQueue, data: bytes, ack_subject: str) -> None:
        if not ack_subject or owned.stopped:
            return  # not from the stream, and so without a claim to a response; or for the next owner
        now_us = clock.now_us()
        undecodable: list[int] = []

        def on_malformed(key: int | None, error: MalformedMessage) -> None:
            self._log_malformed(owned.name, error)
            if key is not None:
                undecodable.append(key)

        try:
            gateway, envelopes = unpack_frame(data, on_malformed)
        except MalformedMessage as error:
            self._log_malformed(owned.name, error)
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
            self._finish(owned.scheduler.expire(now_us))
        self._mark_dirty(owned)

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
        self._finish(owned.scheduler.sequence_found(sought.version, sought.id, row))
        self._seek(owned)
        self._mark_dirty(owned)

    def _on_done(self, message: Message) -> None:
        try:
            completions, direct_runs = unpack_completions(message.data, self._log_malformed_end)
        except MalformedMessage as error:
            self._log_malformed("", error)
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
            owned = self._queues.get(LiveQueue(runs.model))
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
                    self._alone(self._feed.ended, completion)
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
            self._finish((completed, failures))
        if owned.scheduler.waiting:
            self._mark_dirty(owned)

    def _on_cancel(self, owned: OwnedQueue, message: Message) -> None:
        if owned.stopped:
            return  # the queue may have another owner by now
        try:
            cancellation = Cancellation.unpack(message.data)
        except MalformedMessage as error:
            self._log_malformed(owned.name, error)
            return
        owned.signals.add_caller_rejections(cancellation.rejected)
        gateway, keys = cancellation.gateway, cancellation.keys
        self._finish(owned.scheduler.cancel(gateway, keys))
        for worker, message_to_worker in cancellation_messages(self._id, owned, gateway, keys):
            self._bus.publish(subjects.cancelled(worker), message_to_worker)
        if owned.scheduler.waiting:
            self._mark_dirty(owned)  # a sequence that ends with its request frees its slot

    def _on_lost(self, message: Message) -> None:
        worker = message.subject.rsplit(".", 1)[1]
        is_death = message.status == "503" and time.monotonic() > self._no_deaths_before_s
        if is_death and not self.is_lost_scheduler(worker):
            self._on_worker_gone(worker, "nats-server reports no subscriber")

    def _on_link_lost(self, worker: str, end: LinkEnd) -> None:
        if end is LinkEnd.CUT:
            logger.warning("the link to worker %s has ended, but the worker listens: its batches go on", worker)
        elif end is not LinkEnd.ORDERLY:
            self._on_worker_gone(worker, "its link has ended")

    def _on_worker_gone(self, worker: str, sign: str) -> None:
        if worker in self.registry.workers:
            logger.warning("worker %s is gone: %s; its batches are run again", worker, sign)
            self.registry.drop(worker)
            self._erase(worker)
        else:
            self._on_worker_lost(worker)

    def _on_heartbeat(self, heartbeat: Heartbeat) -> None:
        lost = self._reconciler.lost(heartbeat, self._in_flight_on)
        by_queue: dict[OwnedQueue, list[int]] = defaultdict(list)
        for batch_id in lost:
            owned = self._batches.pop(batch_id, None)
            if owned is not None:
                by_queue[owned].append(batch_id)
        for owned, batch_ids in by_queue.items():
            self._in_queue(owned, self._batches_missing, batch_ids)

    def _batches_missing(self, owned: OwnedQueue, batch_ids: list[int]) -> None:
        _limited.warning(
            "batches lost", "queue %s: %d batches were lost on the way and are run again", owned.queue, len(batch_ids)
        )
        self._finish(owned.scheduler.batches_missing(clock.now_us(), sorted(batch_ids)))
        owned.batches_lost(len(batch_ids), "its batch was lost on the way")
        self._mark_dirty(owned)

    def _in_flight_on(self, worker: str) -> list[int]:
        queues = [owned for owned in self._queues.values() if not owned.stopped]
        return [id for owned in queues for id in self._in_queue(owned, _batches_on, worker) or ()]

    def _on_statistics_query(self, message: Message) -> None:
        if may_reply_to(message, subjects.counters("")):
            self._bus.publish(message.reply, self._counters())

    def _counters(self, leaving: bool = False) -> bytes:
        models = [row for owned in self._queues.values() if (row := self._alone(owned.to_dict, clock.now_us()))]
        models += self._retired.to_dicts()
        return pack_scheduler_counters(self._id, self._born_ns, models, self.malformed_messages, leaving)

    def _log_malformed(self, model: str, error: MalformedMessage) -> None:
        self.malformed_messages += 1
        _limited.warning("malformed message", "model %r: dropped a malformed message: %s", model, error)

    def _log_malformed_end(self, _key: int | None, error: MalformedMessage) -> None:
        self._log_malformed("", error)

    # Models and workers

    def _on_model_change(self, name: str) -> None:
        for owned in list(self._of_model.get(name, ())):
            self._alone(self._follow, owned)
        if name:
            views = self.registry.workers.values()
            self._retired.reset_unloaded_failures(name, [view.models[name] for view in views if name in view.models])

    def _follow(self, owned: OwnedQueue) -> None:
        for ended in self._watcher.update(owned, clock.now_us()):
            self._finish(ended)
        self._mark_dirty(owned)

    def _on_drain(self, owned: OwnedQueue, message: Message) -> None:
        """Answers a worker that wants to unload versions: it may, once no request is left that it must run."""
        try:
            drain = DrainMessage.unpack(message.data)
        except MalformedMessage as error:
            self._log_malformed(owned.name, error)
            return
        free = None if owned.stopped else self._watcher.unneeded_versions(owned, drain, message.reply)
        if free is None:
            return
        if free:
            self._alone(self._follow, owned)
        self._bus.publish(message.reply, DrainMessage.of(self._id, owned.name, free, owned.queue.partition).pack())

    def _note_lost_worker(self, _worker: str) -> None:
        self._worker_lost_s = time.monotonic()

    def _on_worker_lost(self, worker: str) -> None:
        now_us = clock.now_us()
        self._reconciler.forget(worker)
        for owned in list(self._queues.values()):
            self._in_queue(owned, self._lose_worker, worker, now_us)

    def _lose_worker(self, owned: OwnedQueue, worker: str, now_us: int) -> None:
        batch_ids = owned.scheduler.in_flight_on(worker)
        for batch_id in batch_ids:
            self._batches.pop(batch_id, None)
        self._finish(owned.scheduler.worker_lost(now_us, worker))
        owned.batches_lost(len(batch_ids), f"worker {worker} was lost")
        self._mark_dirty(owned)

    def _erase(self, worker: str) -> None:
        self._background.create_task(self._try_to_erase(worker))

    @contained()
    async def _try_to_erase(self, worker: str) -> None:
        await self.registry.try_to_erase(worker)

    def _mark_dirty(self, owned: OwnedQueue) -> None:
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
            self._finish(overdue)
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
                self._alone(self._feed.sent, owned.name, batch, now_us)

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
        self._finish(((), [*failures, *unsent]))
        self._mark_dirty(owned)

    def _finish(self, ended: Ended) -> None:
        completed, failures = ended
        for frame, requests in by_frame(completed):
            frame.requests_ended(requests)
        if failures:
            self._answer_failures(failures)

    def _answer_failures(self, failures: Iterable[Failure]) -> None:
        for gateway, responses in error_responses(failures).items():
            self._bus.publish(subjects.reply(gateway), pack_responses(0, responses))

    async def _tick(self) -> None:
        seconds = 0.0
        while True:
            await next_tick(PROBE_INTERVAL_S)
            self._alone(self._probe_workers)
            self._alone(self._drop_stopped_workers)
            seconds += PROBE_INTERVAL_S
            if seconds >= 1.0 and self._bus.is_connected:
                seconds = 0.0
                self._alone(self._expire_workers)
                self._alone(self._expire_requests)

    def _probe_workers(self) -> None:
        queues = list(self._queues.values())
        for worker in {worker for owned in queues for worker in self._in_queue(owned, _workers_of) or ()}:
            if self._bus.links.has_link(worker):
                continue  # whose end shows its death
            self._bus.publish(subjects.probe(worker), b"", subjects.lost(self._id, worker))

    def _drop_stopped_workers(self) -> None:
        now_s = time.monotonic()
        if not self._bus.is_connected or now_s <= self._no_deaths_before_s:
            return
        for worker in self._stopped_workers.find(now_s, self.registry.workers):
            logger.warning(
                "worker %s stands still: its process is stopped or frozen; its batches are run again, and it has to "
                "register again when it continues",
                worker,
            )
            self.registry.drop(worker)
            self._erase(worker)

    def _expire_workers(self) -> None:
        for worker in self.registry.expire():
            self._erase(worker)

    def _expire(self) -> None:
        for owned in list(self._queues.values()):
            self._alone(owned.signals.update, clock.now_us())
            self._in_queue(owned, self._expire_queue)

    def _expire_queue(self, owned: OwnedQueue) -> None:
        if not owned.stopped:
            self._finish(owned.scheduler.expire(clock.now_us()))

    # Exceptions that nobody foresees

    @contained()
    def _alone(self, act: Callable[..., _Result], *arguments: Any) -> _Result | None:
        """Does a part of what serves all queues: if it raises, the others are done."""
        return act(*arguments)

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
        if self._queues.get(owned.queue) is not owned:
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


def _batches_on(owned: OwnedQueue, worker: str) -> list[int]:
    return owned.scheduler.in_flight_on(worker)


def _workers_of(owned: OwnedQueue) -> set[str]:
    return owned.scheduler.workers()
