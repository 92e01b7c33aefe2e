"""The shell around the policies: feeds bus messages to `ModelScheduler`s and carries out what they decide.

All of it runs in one event loop; a policy call never awaits. What comes in during one turn of the loop is taken in
before anything is dispatched, so that requests that came together can share a batch. Which queues it owns is the matter
of `scheduler.queue_keeper`; whatever comes passes the `Fence`.

Each function that serves one queue is contained (`runtime.containment`). An exception in the policy of a queue may leave
its state inconsistent, so that queue is begun again (`_queue_failed`), and no other queue is touched.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from bus import subjects
from bus.connection import Bus, Message
from bus.live_queues import LiveQueue
from bus.pull import FramePull
from bus.registry import RegistryView
from bus.reserved_subjects import may_answer
from bus.streams import ensure_streams, live_pull_group
from runtime.containment import contained
from runtime.log_limiter import LogLimiter
from scheduler import policy_clock as clock
from scheduler.batch import Batch
from scheduler.batch_messages import abandoned_of, answers_of, batch_message
from scheduler.counters import pack_scheduler
from scheduler.event_log import RecordedModelScheduler
from scheduler.fence import Fence
from scheduler.former_counters import FormerCounters
from scheduler.held_frames import AllHeldFrames, HeldFrames
from scheduler.missing_batches import MissingBatches
from scheduler.model_memory import ModelMemory
from scheduler.owned_model import LiveFrame, NewModel, OwnedModel, new_policy
from scheduler.queue_release import let_run, wait_until
from scheduler.queued_request import QueuedRequest, by_frame, requests_of
from scheduler.record_follower import RecordFollower
from scheduler.strategy_files import StrategyFiles
from scheduler.version_scheduler import NOTHING_ENDED, Ended, Failure
from schemas.drain import pack_drain, unpack_drain
from schemas.errors import internal
from schemas.frames import unpack_done_rows, unpack_frame_rows
from schemas.messages import BatchOutcome, pack_answers, pack_error, unpack_cancel
from schemas.registry import Heartbeat
from schemas.wire import MalformedMessage
from telemetry.request_log import log_request, logs_requests

logger = logging.getLogger("weir.scheduler")

_limited = LogLimiter(logger)

PROBE_INTERVAL_S = 0.25
"""How often a worker that holds batches is probed: its death is noticed within this time."""

_UNDECODABLE = "the request could not be decoded"

_NOT_SENT = "an unexpected error occurred while the request was sent to its worker; the scheduler's log has the details"

_QUEUE_FAILED = "an unexpected error occurred in the model's queue; the scheduler's log has the details"

RECONNECT_GRACE_S = 2.0
"""After a reconnection other roles need a moment too: nobody is taken for dead meanwhile."""


class SchedulerService:
    """One scheduler process: owns the queues of models and keeps their instances busy.

    `new_model` makes the policy of a queue. `repositories` are the folders in which it looks for models' own batch
    strategies. With `scale_to_zero` it keeps models known whose workers have all gone.
    """

    def __init__(
        self,
        bus: Bus,
        scheduler_id: str,
        background: asyncio.TaskGroup,
        new_model: NewModel = new_policy,
        repositories: Sequence[Path] = (),
        scale_to_zero: bool = False,
    ) -> None:
        self._new_model = new_model
        self._bus = bus
        self._background = background
        self._id = scheduler_id
        self._born_ns = time.time_ns()
        self.registry = RegistryView(bus)
        self.fence = Fence()
        self.on_refused: Callable[[OwnedModel, int], None] = lambda owned, epoch: None
        self.is_scheduler_gone: Callable[[str], bool] = lambda id: False
        self.on_failed: Callable[[OwnedModel], None] = lambda owned: None
        self._queues: dict[LiveQueue, OwnedModel] = {}
        self._of_model: dict[str, list[OwnedModel]] = defaultdict(list)
        self._former = FormerCounters()
        self._batches: dict[int, OwnedModel] = {}
        self._batch_ids = count(1)
        self._held = AllHeldFrames()
        self.memory = ModelMemory(bus, self.registry, lambda name: LiveQueue(name) in self._queues, scale_to_zero)
        self._follower = RecordFollower(self.registry, StrategyFiles(repositories), self.memory.get)
        self.queues_of = self._follower.queues_of
        self._dirty: set[OwnedModel] = set()  # have something to dispatch, perhaps
        self._pump = self.fence.guard(self._dispatch)
        self._expire_requests = self.fence.guard(self._expire)
        self._missing = MissingBatches(scheduler_id)
        self._no_deaths_before_s = 0.0
        self._ticker: asyncio.Task[None] | None = None
        self.malformed_messages = 0

    async def start(self) -> None:
        """Knows the workers and their models when it returns, and owns nothing yet."""
        await ensure_streams(self._bus)
        await self.listen()
        self.registry.on_model_change(self.fence.guard(self._on_model_change))
        self.registry.on_worker_lost(self.fence.guard(self._on_worker_lost))
        self.registry.on_heartbeat(self.fence.guard(self._on_heartbeat))
        await self.memory.start(self._background)
        await self.registry.start(self._background)
        self._ticker = self._background.create_task(self._tick())
        self._bus.publish(subjects.LAST_COUNTERS, self._counters())

    async def listen(self) -> None:
        """Takes the ends of batches from now on, and word of workers that are gone."""
        await self._bus.subscribe(subjects.done(self._id), self.fence.guard(self._on_done))
        await self._bus.subscribe(subjects.lost(self._id, "*"), self.fence.guard(self._on_lost))
        await self._bus.subscribe(subjects.STATISTICS_QUERY, self._on_statistics_query)

    async def own(self, queue: LiveQueue, consumer: str, epoch: int = 0, is_heir: bool = False) -> OwnedModel:
        """Serves the queue from now on with what `consumer` delivers. `is_heir`: somebody else did before."""
        inbox = queue.inbox(self._id)
        on_frame = self.fence.guard(self._on_frame)
        pull = FramePull(
            self._bus,
            self._bus.live_layout.stream(queue),
            consumer,
            inbox,
            lambda data, ack_subject: on_frame(owned, data, ack_subject),
            live_pull_group(epoch),
        )
        unsubscribe = await self._bus.subscribe(inbox, pull.receive)
        draw, held = self._batch_ids.__next__, HeldFrames(self._held)
        scheduler = self._new_model(queue, draw, is_heir=1) if is_heir else self._new_model(queue, draw)
        counters = self._former.taken_again(queue)
        owned = OwnedModel(queue, scheduler, pull, self._touch, unsubscribe, self._bus.publish, held, counters, epoch)
        self._queues[queue] = owned
        self._of_model[queue.model].append(owned)
        for subject, act in ((queue.cancel_subject, self._on_cancel), (queue.drain_subject, self._on_drain)):
            ends = await self._bus.subscribe(subject, self.fence.guard(partial(act, owned)))
            owned.also_ends(ends)
        self._follow(owned)
        pull.start()
        return owned

    def find(self, queue: LiveQueue) -> OwnedModel | None:
        """The queue, if it is owned here."""
        return self._queues.get(queue)

    async def release(self, queue: LiveQueue) -> None:
        """Serves the queue no more once what is here has run; what has not in time, its next owner is delivered again."""
        owned = self._queues[queue]
        await let_run(owned, lambda: owned in self._batches.values())
        self.drop(owned)

    def drop(self, owned: OwnedModel) -> None:
        """The queue is another's: nothing that is here of it is answered or acknowledged any more."""
        if self._queues.get(owned.queue) is not owned:
            return
        owned.forget()
        del self._queues[owned.queue]
        self._of_model[owned.name].remove(owned)
        self._batches = {id: of for id, of in self._batches.items() if of is not owned}
        self._former.dropped(owned)
        if isinstance(owned.scheduler, RecordedModelScheduler):
            owned.scheduler.log.close()

    def resume(self, owned: OwnedModel) -> None:
        """The queue is ours after all: what workers refused is sent again, by the epoch that it has now."""
        refused, owned.refused, owned.stopped = owned.refused, [], False
        for batch_id in refused:
            if self._batches.pop(batch_id, None) is owned:
                self._end_batch(owned, clock.now_us(), batch_id, BatchOutcome.NOT_RUN, 0, ())
        self._touch(owned)

    def told_nobody_is_gone(self) -> None:
        """The broker has come back: other roles need a moment too."""
        self._no_deaths_before_s = time.monotonic() + RECONNECT_GRACE_S
        self._missing.clear()

    async def stop(self, timeout_s: float) -> None:
        """Waits for what is being run. What is not answered then stays in the stream for the next owner."""
        for owned in self._queues.values():
            owned.close()
        await wait_until(lambda: not self._batches, timeout_s)
        if self._ticker is not None:
            self._ticker.cancel()
        for task in self.memory.tasks:
            task.cancel()
        self._bus.publish(subjects.LAST_COUNTERS, self._counters(leaving=True))

    def known_models(self) -> set[str]:
        """The models that workers tell of, or have told of."""
        return {name for view in self.registry.workers.values() for name in view.models} | self.memory.names()

    @property
    def unanswered(self) -> int:
        """Requests this scheduler is responsible for."""
        return sum(len(owned.scheduler) for owned in self._queues.values())

    @property
    def owned_queues(self) -> list[tuple[str, int, int]]:
        """Model, partition and epoch of the queues that it owns."""
        return [(*queue, owned.epoch) for queue, owned in self._queues.items()]

    def _on_frame(self, owned: OwnedModel, data: bytes, ack_subject: str) -> None:
        if not ack_subject or owned.stopped:
            return  # not from the stream (whoever sent it to the inbox itself gets no answer), or for the next owner
        now_us = clock.now_us()
        try:
            gateway, rows = unpack_frame_rows(data)
            frame = LiveFrame(owned, ack_subject, len(data), len(rows))
            owned.counters.frame_came(ack_subject)
            requests = requests_of(gateway, rows, now_us, frame, clock.at_unix_ms)
        except MalformedMessage:
            requests = self._requests_of_malformed(owned, data, ack_subject, now_us)
        else:
            if not requests:
                owned.pull.ack(ack_subject)
        if requests:
            owned.took(len(data))
            self._enqueue(owned, requests, now_us)

    def _requests_of_malformed(
        self, owned: OwnedModel, data: bytes, ack_subject: str, now_us: int
    ) -> list[QueuedRequest]:
        """The requests of a frame of which not everything can be decoded; the others are answered with an error."""
        malformed: list[int | None] = []

        def on_malformed(key: int | None, error: MalformedMessage) -> None:
            malformed.append(key)
            self._dropped(owned.name, error)

        try:
            gateway, rows = unpack_frame_rows(data)
        except MalformedMessage as error:
            self._dropped(owned.name, error)
            owned.pull.refuse(ack_subject)
            return []
        frame = LiveFrame(owned, ack_subject, len(data), len(rows))
        requests = requests_of(gateway, rows, now_us, frame, clock.at_unix_ms, on_malformed)
        answers = [pack_error(key, internal(_UNDECODABLE)) for key in malformed if key is not None]
        if answers:
            self._bus.publish(subjects.reply(gateway), pack_answers(0, answers))
        if requests:
            frame.requests_ended(len(malformed), 0)
        else:
            owned.pull.ack(ack_subject)
        return requests

    @contained(on_error="_queue_failed")
    def _enqueue(self, owned: OwnedModel, requests: list[QueuedRequest], now_us: int) -> None:
        owned.signals.came(requests[0].lane, len(requests))
        refused = owned.scheduler.enqueue(requests)
        if refused:
            self._answer_failures(refused)
        if owned.scheduler.has_given_up:
            self._finish(owned.scheduler.expire(now_us))
        self._touch(owned)

    def _on_done(self, message: Message) -> None:
        try:
            dones = unpack_done_rows(message.data, self._dropped_end)
        except MalformedMessage as error:
            self._dropped("", error)
            return
        now_us = clock.now_us()
        for batch_id, outcome, busy_us, rescheduled in dones:
            owned = self._batches.get(batch_id)
            if owned is not None:
                self._end_batch(owned, now_us, batch_id, outcome, busy_us, rescheduled)

    @contained(on_error="_queue_failed")
    def _end_batch(
        self, owned: OwnedModel, now_us: int, batch_id: int, outcome: int, busy_us: int, rescheduled: Sequence[int]
    ) -> None:
        if outcome == BatchOutcome.ANSWERED and not rescheduled:  # as nearly all: it has acknowledged what it ends
            self._batches.pop(batch_id, None)
            self._finish(owned.scheduler.complete(now_us, batch_id, outcome, busy_us, rescheduled), batch_id)
        elif outcome == BatchOutcome.REFUSED:
            owned.refuse(batch_id)
            self.on_refused(owned, busy_us)
        else:
            if outcome not in (BatchOutcome.RELEASED, BatchOutcome.HANDED_BACK):
                self._batches.pop(batch_id, None)
            self._finish(owned.complete(now_us, batch_id, outcome, busy_us, rescheduled))
        if owned.scheduler.waiting:
            self._touch(owned)

    @contained(on_error="_queue_failed")
    def _on_cancel(self, owned: OwnedModel, message: Message) -> None:
        if owned.stopped:
            return  # by the time that is looked at, the queue is another's, perhaps
        try:
            gateway, keys, turned_away = unpack_cancel(message.data)
        except MalformedMessage as error:
            self._dropped(owned.name, error)
            return
        owned.signals.turned_away(turned_away)
        self._finish(owned.scheduler.cancel(gateway, keys))
        for worker, abandoned in abandoned_of(self._id, owned, gateway, keys):
            self._bus.publish(subjects.abandoned(worker), abandoned)
        if owned.scheduler.waiting:
            self._touch(owned)  # a sequence that ends with its request leaves its slot to another

    def _on_lost(self, message: Message) -> None:
        worker = message.subject.rsplit(".", 1)[1]
        if message.status == "503" and time.monotonic() > self._no_deaths_before_s:
            if self.is_scheduler_gone(worker):
                return
            if worker in self.registry.workers:
                logger.warning("worker %s is gone: its batches are done again", worker)
                self.registry.drop(worker)
                self._erase(worker)
            else:
                self._on_worker_lost(worker)

    @contained()
    def _on_heartbeat(self, heartbeat: Heartbeat) -> None:
        lost = self._missing.lost(heartbeat, self._in_flight_on)
        by_queue: dict[OwnedModel, list[int]] = defaultdict(list)
        for batch_id in lost:
            owned = self._batches.pop(batch_id, None)
            if owned is not None:
                by_queue[owned].append(batch_id)
        for owned, batch_ids in by_queue.items():
            self._batches_missing(owned, batch_ids)

    @contained(on_error="_queue_failed")
    def _batches_missing(self, owned: OwnedModel, batch_ids: list[int]) -> None:
        _limited.warning(
            "batches lost", "model %s: %d batches were lost on the way and are run again", owned.queue, len(batch_ids)
        )
        self._finish(owned.batches_missing(clock.now_us(), sorted(batch_ids)))
        self._touch(owned)

    def _in_flight_on(self, worker: str) -> list[int]:
        queues = [owned for owned in self._queues.values() if not owned.stopped]
        return [batch_id for owned in queues for batch_id in self._batches_of(owned, worker) or ()]

    @contained(on_error="_queue_failed")
    def _batches_of(self, owned: OwnedModel, worker: str) -> list[int] | None:
        return owned.scheduler.in_flight_on(worker)

    def _on_statistics_query(self, message: Message) -> None:
        if may_answer(message, subjects.counters("")):
            self._bus.publish(message.reply, self._counters())

    def _counters(self, leaving: bool = False) -> bytes:
        models = [row for owned in self._queues.values() if (row := self._told(owned)) is not None]
        models += self._former.told()
        return pack_scheduler(self._id, self._born_ns, models, self.malformed_messages, leaving)

    @contained()
    def _told(self, owned: OwnedModel) -> dict[str, Any] | None:
        return owned.told(clock.now_us())

    def _dropped(self, model: str, error: MalformedMessage) -> None:
        self.malformed_messages += 1
        _limited.warning("malformed message", "model %r: dropped a malformed message: %s", model, error)

    def _dropped_end(self, error: MalformedMessage) -> None:
        self._dropped("", error)

    # Models and workers

    @contained()
    def _on_model_change(self, name: str) -> None:
        for owned in list(self._of_model.get(name, ())):
            self._follow(owned)
        if name:
            views = self.registry.workers.values()
            self._former.follow(name, [view.models[name] for view in views if name in view.models])

    @contained()
    def _follow(self, owned: OwnedModel) -> None:
        for ended in self._follower.update(owned, clock.now_us()):
            self._finish(ended)
        self._touch(owned)

    @contained()
    def _on_drain(self, owned: OwnedModel, message: Message) -> None:
        """A worker unloads versions: it may, once nothing is left that it must run."""
        try:
            drain = unpack_drain(message.data)
        except MalformedMessage as error:
            self._dropped(owned.name, error)
            return
        free = None if owned.stopped else self._follower.needless(owned, drain, message.reply)
        if free is None:
            return
        if free:
            self._follow(owned)
        self._bus.publish(message.reply, pack_drain(self._id, owned.name, free, owned.queue.partition))

    @contained()
    def _on_worker_lost(self, worker: str) -> None:
        now_us = clock.now_us()
        self._missing.forget(worker)
        for owned in list(self._queues.values()):
            self._lose_worker(owned, worker, now_us)

    @contained(on_error="_queue_failed")
    def _lose_worker(self, owned: OwnedModel, worker: str, now_us: int) -> None:
        for batch_id in owned.scheduler.in_flight_on(worker):
            self._batches.pop(batch_id, None)
        self._finish(owned.worker_lost(now_us, worker))
        self._touch(owned)

    def _erase(self, worker: str) -> None:
        self._background.create_task(self._try_to_erase(worker))

    @contained()
    async def _try_to_erase(self, worker: str) -> None:
        await self.registry.try_to_erase(worker)

    def _touch(self, owned: OwnedModel) -> None:
        if not self._dirty:
            self._bus.defer(self._pump)
        self._dirty.add(owned)

    def _dispatch(self) -> None:
        dirty, self._dirty = self._dirty, set()
        now_us = clock.now_us()
        for owned in dirty:
            if not owned.stopped:
                self._dispatch_queue(owned, now_us)

    @contained(on_error="_queue_failed")
    def _dispatch_queue(self, owned: OwnedModel, now_us: int) -> None:
        overdue = owned.scheduler.overdue(now_us)
        if overdue is not NOTHING_ENDED:
            self._finish(overdue)
        batches, wake_at_us = owned.scheduler.dispatch(now_us)
        for batch in batches:
            self._send(owned, batch, now_us)
        owned.alarm.set(wake_at_us)

    @contained(on_error="_sending_failed")
    def _send(self, owned: OwnedModel, batch: Batch, now_us: int) -> None:
        message = batch_message(self._id, owned, batch, now_us)
        if logs_requests(logger):
            where = f"instance {batch.instance.number} of version {batch.version} on {batch.instance.worker}"
            for request in batch.requests:
                log_request(logger, f"in batch {batch.id} for {where}", owned.name, request.gateway, request.key)
        self._batches[batch.id] = owned
        worker = batch.instance.worker
        self._bus.publish(subjects.work(worker), message, subjects.lost(self._id, worker))

    def _sending_failed(self, _error: Exception, owned: OwnedModel, batch: Batch, now_us: int) -> None:
        self._batches.pop(batch.id, None)
        self._end_unsent(owned, batch, now_us)

    @contained(on_error="_queue_failed")
    def _end_unsent(self, owned: OwnedModel, batch: Batch, now_us: int) -> None:
        """The batch could not be packed: its requests end with an error, and its instance is free."""
        answered, failures = owned.scheduler.complete(now_us, batch.id, BatchOutcome.ANSWERED, 0)
        unsent = [Failure(request, internal(_NOT_SENT)) for request in answered]
        self._finish(((), [*failures, *unsent]))
        self._touch(owned)

    def _finish(self, ended: Ended, batch_id: int = 0) -> None:
        answered, failures = ended
        for frame, requests in by_frame(answered):
            frame.requests_ended(requests, batch_id)
        if failures:
            self._answer_failures(failures)

    def _answer_failures(self, failures: Iterable[Failure]) -> None:
        for gateway, answers in answers_of(failures).items():
            self._bus.publish(subjects.reply(gateway), pack_answers(0, answers))

    async def _tick(self) -> None:
        seconds = 0.0
        while True:
            await asyncio.sleep(PROBE_INTERVAL_S)
            self._probe_workers()
            seconds += PROBE_INTERVAL_S
            if seconds >= 1.0 and self._bus.is_connected:
                seconds = 0.0
                self._expire_workers()
                self._expire_requests()

    @contained()
    def _probe_workers(self) -> None:
        queues = list(self._queues.values())
        for worker in {worker for owned in queues for worker in self._workers_of(owned) or ()}:
            self._bus.publish(subjects.probe(worker), b"", subjects.lost(self._id, worker))

    @contained(on_error="_queue_failed")
    def _workers_of(self, owned: OwnedModel) -> set[str] | None:
        return owned.scheduler.workers()

    @contained()
    def _expire_workers(self) -> None:
        for worker in self.registry.expire():
            self._erase(worker)

    def _expire(self) -> None:
        for owned in list(self._queues.values()):
            self._look_at_load(owned)
            self._expire_queue(owned)

    @contained()
    def _look_at_load(self, owned: OwnedModel) -> None:
        owned.signals.look(clock.now_us())

    @contained(on_error="_queue_failed")
    def _expire_queue(self, owned: OwnedModel) -> None:
        if not owned.stopped:
            self._finish(owned.scheduler.expire(clock.now_us()))

    # A policy that has failed

    def _queue_failed(self, _error: Exception, owned: OwnedModel, *arguments: object) -> None:
        """The policy of a queue has raised, perhaps in the middle of a change: its state can't be relied on any more.

        What no worker has been sent ends with an internal error, or the request that makes the policy fail would come
        back with its frame for ever. What has been sent is answered by its worker; its frames are not acknowledged
        here, so they are delivered again to whoever serves the queue next, and that is this scheduler, with a new policy.
        """
        if self._queues.get(owned.queue) is not owned:
            return  # something else of it has failed before
        coming = arguments[0] if arguments and isinstance(arguments[0], list) else []
        waiting = dict.fromkeys(owned.scheduler.not_in(self._batches))
        waiting.update(dict.fromkeys(each for each in coming if isinstance(each, QueuedRequest)))
        logger.error("queue %s: begun again; %d waiting requests end with an error", owned.queue, len(waiting))
        try:
            self._answer_failures(Failure(request, internal(_QUEUE_FAILED)) for request in waiting)
        finally:
            self.drop(owned)
            self.on_failed(owned)
