"""`SchedulerService`: one scheduler process. It learns which workers and models there are, and which workers are gone.

Everything runs in one event loop. What becomes of the requests is up to its `ServedQueues`. Every message that concerns
them passes the `LeaseGate`, which holds it back while it is uncertain which queues this scheduler owns.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

from weir.bus.kv.registry import RegistryView
from weir.bus.links.link import LinkEnd
from weir.bus.naming import subjects
from weir.bus.naming.live_queues import LiveQueue
from weir.bus.naming.reserved_subjects import may_reply_to
from weir.bus.nats.connection import Bus, Message
from weir.bus.streams.declarations import ensure_streams, live_pull_group
from weir.runtime.ticks import next_tick
from weir.scheduler.batching.batch import BatchReconciler
from weir.scheduler.batching.custom_strategy import StrategyFiles
from weir.scheduler.model_scheduler import ModelScheduler
from weir.scheduler.service import clock
from weir.scheduler.service.former_sequences import SequenceReports, SequenceSurvey
from weir.scheduler.service.known_models import KnownModelStore
from weir.scheduler.service.lease_gate import LeaseGate
from weir.scheduler.service.owned_queue import OwnedQueue
from weir.scheduler.service.registry_watcher import RegistryWatcher
from weir.scheduler.service.served_queues import ServedQueues, alone
from weir.scheduler.service.statistics import pack_scheduler_counters
from weir.scheduler.service.stopped_workers import StoppedWorkers
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.model_control import DrainMessage
from weir.schemas.wire.registry import Heartbeat

logger = logging.getLogger("weir.scheduler")

PROBE_INTERVAL_S = 0.25
"""How often workers that hold batches are probed: the death of one is noticed within this time."""

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
    """One scheduler process: serves queues with its `queues`, and notices what happens to their workers and models.

    `weir.scheduler.ownership` decides which queues those are, and knows which ids were schedulers (`is_lost_scheduler`).
    """

    def __init__(
        self,
        bus: Bus,
        scheduler_id: str,
        background: asyncio.TaskGroup,
        options: ServiceOptions = ServiceOptions(),  # noqa: B008 - immutable
    ) -> None:
        self._new_policy = options.new_policy
        self._batch_ids = count(1)
        self._bus = bus
        self._background = background
        self._id = scheduler_id
        self._born_ns = time.time_ns()
        self.registry = RegistryView(bus)
        self.lease_gate = LeaseGate()
        self.is_lost_scheduler: Callable[[str], bool] = lambda id: False
        self.queues = ServedQueues(bus, scheduler_id, background, self.lease_gate)
        self.known = KnownModelStore(
            bus, self.registry, lambda model: LiveQueue(model) in self.queues.by_name, options.scale_to_zero
        )
        self._watcher = RegistryWatcher(self.registry, StrategyFiles(options.repositories), self.known.models.get)
        self.queues_of = self._watcher.queues_of
        self._expire_requests = self.lease_gate.guard(self.queues.expire)
        self._reconciler = BatchReconciler(scheduler_id)
        self._stopped_workers = StoppedWorkers()
        self._survey = SequenceSurvey(bus, scheduler_id)
        self._worker_lost_s = -RECENT_LOSS_S
        self._no_deaths_before_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []

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
        self._tasks.append(self._background.create_task(self._tick()))
        self._bus.publish(subjects.LAST_COUNTERS, self._counters())

    async def listen(self) -> None:
        """Subscribes to ends of batches, reports of lost workers and statistics queries."""
        await self.queues.start()
        self._bus.links.on_lost(self.lease_gate.guard(self._on_link_lost))
        await self._bus.subscribe(subjects.lost(self._id, "*"), self.lease_gate.guard(self._on_lost))
        await self._bus.subscribe(subjects.STATISTICS_QUERY, self._on_statistics_query)
        await self._survey.start()

    async def serve(
        self, queue: LiveQueue, consumer: str, epoch: int = 0, former: SequenceReports | None = None
    ) -> OwnedQueue:
        """Serves a queue with the frames that `consumer` delivers.

        `former`: it had another owner before, whose sequences workers have reported.
        """
        policy = self._new_policy(queue.model, self._batch_ids.__next__)
        if former is not None:
            policy.take_over(clock.now_us(), former.sequences, former.is_complete)
        owned = await self.queues.add(queue, consumer, epoch, policy)
        on_drain = self.lease_gate.guard(partial(self._on_drain, owned))
        owned.add_subscription(await self._bus.subscribe(queue.drain_subject, on_drain))
        alone(self._follow, owned)
        owned.pull.start(queue.inbox(self._id), live_pull_group(epoch))
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

    def suspend_death_detection(self) -> None:
        """Considers no process dead for a while: the broker has come back, and others have to reconnect."""
        self._no_deaths_before_s = time.monotonic() + RECONNECT_GRACE_S
        self._reconciler.clear()

    async def stop(self, timeout_s: float) -> None:
        """Waits for running batches. Requests that have no response then stay in the stream for the next owner."""
        await self.queues.stop(timeout_s)
        for task in (*self._tasks, *self.known.tasks):
            task.cancel()
        self._bus.publish(subjects.LAST_COUNTERS, self._counters(leaving=True))

    def known_models(self) -> set[str]:
        """Returns the models that have a version on a worker, whatever its state, or that are remembered."""
        views = self.registry.workers.values()
        return {name for view in views for name, row in view.models.items() if row.versions} | self.known.models.names()

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
            self._remove(worker)
        else:
            self._on_worker_lost(worker)

    def _on_heartbeat(self, heartbeat: Heartbeat) -> None:
        self.queues.lose_batches(self._reconciler.lost(heartbeat, self.queues.in_flight_on))

    def _on_worker_lost(self, worker: str) -> None:
        self._reconciler.forget(worker)
        self.queues.lose_worker(worker)

    def _on_statistics_query(self, message: Message) -> None:
        if may_reply_to(message, subjects.counters("")):
            self._bus.publish(message.reply, self._counters())

    def _counters(self, leaving: bool = False) -> bytes:
        malformed = self.queues.malformed_messages
        return pack_scheduler_counters(self._id, self._born_ns, self.queues.to_dicts(), malformed, leaving)

    def _on_model_change(self, name: str) -> None:
        for owned in list(self.queues.of_model.get(name, ())):
            alone(self._follow, owned)
        if name:
            views = self.registry.workers.values()
            records = [view.models[name] for view in views if name in view.models]
            self.queues.retired.reset_unloaded_failures(name, records)

    def _follow(self, owned: OwnedQueue) -> None:
        for ended in self._watcher.update(owned, clock.now_us()):
            self.queues.finish(ended)
        self.queues.mark_dirty(owned)

    def _on_drain(self, owned: OwnedQueue, message: Message) -> None:
        """Answers a worker that wants to unload versions: it may, once no request is left that it must run."""
        try:
            drain = DrainMessage.unpack(message.data)
        except MalformedMessage as error:
            self.queues.log_malformed(owned.name, error)
            return
        free = None if owned.stopped else self._watcher.unneeded_versions(owned, drain, message.reply)
        if free is None:
            return
        if free:
            alone(self._follow, owned)
        self._bus.publish(message.reply, DrainMessage.of(self._id, owned.name, free, owned.queue.partition).pack())

    def _note_lost_worker(self, _worker: str) -> None:
        self._worker_lost_s = time.monotonic()

    def _remove(self, worker: str) -> None:
        self.registry.drop(worker)
        self._background.create_task(self.registry.erase(worker))

    async def _tick(self) -> None:
        seconds = 0.0
        while True:
            await next_tick(PROBE_INTERVAL_S)
            alone(self._probe_workers)
            alone(self._drop_stopped_workers)
            seconds += PROBE_INTERVAL_S
            if seconds >= 1.0 and self._bus.is_connected:
                seconds = 0.0
                alone(self._expire_workers)
                alone(self._expire_requests)

    def _probe_workers(self) -> None:
        for worker in self.queues.workers():
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
            self._remove(worker)

    def _expire_workers(self) -> None:
        for worker in self.registry.expire():
            self._remove(worker)
