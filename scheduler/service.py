"""The shell around the policies: feeds bus messages to `ModelScheduler`s and carries out what they decide.

All of it runs in one event loop; a policy call never awaits. What comes in during one turn of the loop is taken in
before anything is dispatched, so that requests that came together can share a batch. Which queues it owns is the matter
of `scheduler.queue_keeper`; whatever comes passes the `Fence`.
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

from bus import subjects
from bus.connection import Bus, Message
from bus.live_queues import LiveQueue
from bus.pull import FramePull
from bus.registry import RegistryView
from bus.reserved_subjects import may_answer
from bus.streams import ensure_streams, live_pull_group
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
from scheduler.queued_request import by_frame, requests_of
from scheduler.record_follower import RecordFollower
from scheduler.strategy_files import StrategyFiles
from scheduler.version_scheduler import NOTHING_ENDED, Ended, Failure
from schemas.drain import pack_drain, unpack_drain
from schemas.frames import unpack_done_rows, unpack_frame_rows
from schemas.messages import BatchOutcome, pack_answers, unpack_cancel
from schemas.registry import Heartbeat
from schemas.wire import MalformedMessage
from telemetry.request_log import log_request, logs_requests

logger = logging.getLogger("weir.scheduler")

PROBE_INTERVAL_S = 0.25
"""How often a worker that holds batches is probed: its death is noticed within this time."""

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
        self._queues: dict[LiveQueue, OwnedModel] = {}
        self._of_model: dict[str, list[OwnedModel]] = defaultdict(list)
        self._former = FormerCounters()
        self._batches: dict[int, OwnedModel] = {}
        self._batch_ids = count(1)
        self._held = AllHeldFrames()
        self._memory = ModelMemory(bus, self.registry, lambda name: LiveQueue(name) in self._queues, scale_to_zero)
        self._follower = RecordFollower(self.registry, StrategyFiles(repositories), self._memory.get)
        self.queues_of = self._follower.queues_of
        self._dirty: set[OwnedModel] = set()  # have something to dispatch, perhaps
        self._pump = self.fence.guard(self._dispatch)
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
        await self._memory.start(self._background)
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
                self._finish(owned.scheduler.complete(clock.now_us(), batch_id, BatchOutcome.NOT_RUN, 0))
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
        for task in self._memory.tasks:
            task.cancel()
        self._bus.publish(subjects.LAST_COUNTERS, self._counters(leaving=True))

    def known_models(self) -> set[str]:
        """The models that workers tell of, or have told of."""
        return {name for view in self.registry.workers.values() for name in view.models} | self._memory.names()

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
        except MalformedMessage as error:
            self._dropped(owned.name, error)
            owned.pull.refuse(ack_subject)
            return
        if not requests:
            owned.pull.ack(ack_subject)
            return
        owned.took(len(data))
        owned.signals.came(requests[0].lane, len(requests))
        refused = owned.scheduler.enqueue(requests)
        if refused:
            self._answer_failures(refused)
        if owned.scheduler.has_given_up:
            self._finish(owned.scheduler.expire(now_us))
        self._touch(owned)

    def _on_done(self, message: Message) -> None:
        try:
            dones = unpack_done_rows(message.data)
        except MalformedMessage as error:
            self._dropped("", error)
            return
        now_us = clock.now_us()
        for batch_id, outcome, busy_us, rescheduled in dones:
            if (owned := self._batches.get(batch_id)) is None:
                continue
            if outcome == BatchOutcome.ANSWERED and not rescheduled:  # as nearly all: it has acknowledged what it ends
                del self._batches[batch_id]
                self._finish(owned.scheduler.complete(now_us, batch_id, outcome, busy_us, rescheduled), batch_id)
            elif outcome == BatchOutcome.REFUSED:
                owned.refuse(batch_id)
                self.on_refused(owned, busy_us)
            else:
                if outcome not in (BatchOutcome.RELEASED, BatchOutcome.HANDED_BACK):
                    del self._batches[batch_id]
                self._finish(owned.complete(now_us, batch_id, outcome, busy_us, rescheduled))
            if owned.scheduler.waiting:
                self._touch(owned)

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

    def _on_heartbeat(self, heartbeat: Heartbeat) -> None:
        lost = self._missing.lost(heartbeat, self._in_flight_on)
        by_queue: dict[OwnedModel, list[int]] = defaultdict(list)
        for batch_id in lost:
            by_queue[self._batches.pop(batch_id)].append(batch_id)
        for owned, batch_ids in by_queue.items():
            logger.warning("model %s: %d batches were lost on the way and are done again", owned.queue, len(batch_ids))
            self._finish(owned.batches_missing(clock.now_us(), sorted(batch_ids)))
            self._touch(owned)

    def _in_flight_on(self, worker: str) -> list[int]:
        queues = (owned for owned in self._queues.values() if not owned.stopped)
        return [batch_id for owned in queues for batch_id in owned.scheduler.in_flight_on(worker)]

    def _on_statistics_query(self, message: Message) -> None:
        if may_answer(message, subjects.counters("")):
            self._bus.publish(message.reply, self._counters())

    def _counters(self, leaving: bool = False) -> bytes:
        models = [owned.told(clock.now_us()) for owned in self._queues.values()]
        models += self._former.told()
        return pack_scheduler(self._id, self._born_ns, models, self.malformed_messages, leaving)

    def _dropped(self, model: str, error: MalformedMessage) -> None:
        self.malformed_messages += 1
        logger.warning("model %r: dropped a message: %s", model, error)

    # Models and workers

    def _on_model_change(self, name: str) -> None:
        for owned in self._of_model.get(name, ()):
            self._follow(owned)
        if name:
            views = self.registry.workers.values()
            self._former.follow(name, [view.models[name] for view in views if name in view.models])

    def _follow(self, owned: OwnedModel) -> None:
        for ended in self._follower.update(owned, clock.now_us()):
            self._finish(ended)
        self._touch(owned)

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

    def _on_worker_lost(self, worker: str) -> None:
        now_us = clock.now_us()
        self._missing.forget(worker)
        for owned in self._queues.values():
            for batch_id in owned.scheduler.in_flight_on(worker):
                self._batches.pop(batch_id, None)
            self._finish(owned.worker_lost(now_us, worker))
            self._touch(owned)

    def _erase(self, worker: str) -> None:
        self._background.create_task(self.registry.try_to_erase(worker))

    def _touch(self, owned: OwnedModel) -> None:
        if not self._dirty:
            self._bus.defer(self._pump)
        self._dirty.add(owned)

    def _dispatch(self) -> None:
        dirty, self._dirty = self._dirty, set()
        now_us = clock.now_us()
        for owned in dirty:
            if owned.stopped:
                continue
            overdue = owned.scheduler.overdue(now_us)
            if overdue is not NOTHING_ENDED:
                self._finish(overdue)
            batches, wake_at_us = owned.scheduler.dispatch(now_us)
            for batch in batches:
                self._send(owned, batch, now_us)
            owned.alarm.set(wake_at_us)

    def _send(self, owned: OwnedModel, batch: Batch, now_us: int) -> None:
        message = batch_message(self._id, owned, batch, now_us)
        if logs_requests(logger):
            where = f"instance {batch.instance.number} of version {batch.version} on {batch.instance.worker}"
            for request in batch.requests:
                log_request(logger, f"in batch {batch.id} for {where}", owned.name, request.gateway, request.key)
        self._batches[batch.id] = owned
        worker = batch.instance.worker
        self._bus.publish(subjects.work(worker), message, subjects.lost(self._id, worker))

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
        expire = self.fence.guard(self._expire)
        while True:
            await asyncio.sleep(PROBE_INTERVAL_S)
            for worker in {worker for owned in self._queues.values() for worker in owned.scheduler.workers()}:
                self._bus.publish(subjects.probe(worker), b"", subjects.lost(self._id, worker))
            seconds += PROBE_INTERVAL_S
            if seconds >= 1.0 and self._bus.is_connected:
                seconds = 0.0
                for worker in self.registry.expire():
                    self._erase(worker)
                expire()

    def _expire(self) -> None:
        for owned in list(self._queues.values()):
            owned.signals.look(clock.now_us())
            if not owned.stopped:
                self._finish(owned.scheduler.expire(clock.now_us()))
