"""`OwnershipController`: makes each queue have one owner among the schedulers; the shell of `OwnershipPolicy`.

It sends heartbeats each `HEARTBEAT_INTERVAL_S`, receives those of others, probes their connections, and carries out
the actions of the policy: it acquires a queue by writing its record (`weir.bus.kv.queue_owners`) and then recreating its
consumer, and hands one over by draining it and then writing the record for the next owner.

The `LeaseGate` decides whether this scheduler may continue with its queues; a heartbeat that the broker has confirmed
keeps it open. Once it has closed, the records are read before anything else happens. A queue that has another owner
by then is dropped without further messages, because that owner has been delivered everything unacknowledged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from msgspec.structs import astuple
from nats.errors import Error as NatsError

from weir.bus.kv.presence import Presence, PresenceView
from weir.bus.kv.queue_owners import OwnerRecord, QueueOwners
from weir.bus.naming import subjects
from weir.bus.naming.live_queues import LiveQueue
from weir.bus.nats.connection import Bus, Message
from weir.bus.streams.declarations import acquire_live_consumer, ensure_live_streams, ensure_streams
from weir.runtime.containment import call_each, contained
from weir.runtime.log_limiter import LogLimiter
from weir.runtime.ticks import next_tick
from weir.scheduler.ownership.policy import SILENCE_S, Acquire, Action, HandOver, OwnershipPolicy, ReadOwner
from weir.scheduler.service.owned_queue import OwnedQueue
from weir.scheduler.service.service import RECONNECT_GRACE_S, SchedulerService
from weir.schemas.wire.batches import QueueOwner
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.registry import RoleRecord

logger = logging.getLogger("weir.scheduler")

_limited = LogLimiter(logger)

HEARTBEAT_INTERVAL_S = 0.25
"""How often a scheduler sends a heartbeat and probes the others."""

MAX_CONCURRENT_CHANGES = 16
"""Queues that are acquired, read or handed over at the same time; the others wait."""

MAX_SEQUENCES_WAIT_S = 10.0
"""How long a scheduler that is leaving waits for open sequences to end."""

PRESENCE_WAIT_S = 3.0
"""How long to wait for heartbeats of schedulers with `--scale-to-zero`, before what they stored is removed."""

POLICY_RESTART_S = 1.0
"""A queue whose policy fails is restarted at most once in this time."""

_CONFIRMATION_S = 1.0
_PAUSE_S = 2 * HEARTBEAT_INTERVAL_S
_POLL_S = 0.02

_Item = TypeVar("_Item")

_BROKER_ERRORS = (NatsError, OSError, TimeoutError)

_ACTING = "weir.scheduler.ownership.controller: the actions of the policy"


class OwnershipController:
    """The ownership of one scheduler process. `service` serves the queues that it acquires."""

    def __init__(self, bus: Bus, scheduler_id: str, service: SchedulerService, background: asyncio.TaskGroup) -> None:
        self._bus = bus
        self._id = scheduler_id
        self._service = service
        self._queues = service.queues
        self._background = background
        self._owners = QueueOwners(bus)
        self._records: dict[LiveQueue, OwnerRecord] = {}  # of held queues
        self._policy = OwnershipPolicy(scheduler_id, self._is_movable)
        self._presence = Presence(bus, "scheduler", scheduler_id, self._describe)
        self._view = PresenceView(bus, "scheduler")
        self._is_draining = False
        self._has_handed_over = False
        self._tasks_in_progress: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_CHANGES)
        self._scheduled: asyncio.Handle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._no_expiry_before_s = 0.0
        self._connections = bus.connections
        self._heartbeat_s = time.monotonic()
        self._checks = asyncio.Lock()
        self._restarted_s: dict[LiveQueue, float] = {}  # when queues were last restarted after a failed policy
        self._seen_epochs: dict[LiveQueue, int] = {}  # from workers that rejected our batches
        self.malformed_messages = 0

    async def start(self) -> None:
        """Returns when every queue has an owner, as far as this scheduler can achieve that."""
        await self._owners.ensure()
        self._service.is_lost_scheduler = self._on_scheduler_lost
        self._queues.on_batch_rejected = self._on_batch_rejected
        self._queues.on_policy_failed = self._on_policy_failed
        self._service.registry.on_model_change(self._on_model_change)
        self._bus.on_reconnect(self._recover)
        await self._bus.subscribe(subjects.probe(self._id), lambda message: None)
        await self._bus.subscribe(subjects.OWNER_ANNOUNCEMENT, self._on_announcement)
        await self._bus.subscribe(subjects.PRESENCE_QUERY, lambda message: self._presence.publish())
        self._view.on_change(self._on_presence)
        await self._view.start()
        await self._attempt(self._renew_lease())
        self._tasks.append(self._background.create_task(self._heartbeat_loop()))
        if not self._service.known.is_on:
            self._tasks.append(self._background.create_task(self._remove_known_models()))
        for name in self._service.known_models():
            self._on_model_change(name)
        for _ in range(3):
            self._act()
            if not self._tasks_in_progress:
                break
            await asyncio.gather(*self._tasks_in_progress)
            await self._attempt(self._bus.flush())  # by then nats-server has reported lost owners

    async def hand_over_all(self, timeout_s: float) -> None:
        """Hands over all queues, if another scheduler can take them, and waits for actions in progress.

        Heartbeats go on until `withdraw`: without, the ends of batches that still run would be held back.
        """
        self._is_draining = True
        self._policy.drain()
        self._presence.publish()
        deadline_s = time.monotonic() + min(timeout_s, MAX_SEQUENCES_WAIT_S)
        while self._policy.held and self._policy.has_successors and time.monotonic() < deadline_s:
            self._act()
            await asyncio.sleep(_POLL_S)
        self._has_handed_over = True
        if self._tasks_in_progress:
            await asyncio.wait(self._tasks_in_progress, timeout=timeout_s)

    async def withdraw(self) -> None:
        """Writes records without an owner for the remaining queues, and sends the last heartbeat."""
        for task in self._tasks:
            task.cancel()
        await _for_each(self._records.items(), lambda held: self._attempt(self._owners.write(held[0], "", held[1])))
        self._presence.publish(leaving=True)

    def _describe(self) -> dict[str, Any]:
        # Queues being restarted are owned, too, although nothing serves them at the moment.
        served = [(*queue, owned.epoch) for queue, owned in self._queues.by_name.items()]
        unserved = [(*q, record.epoch) for q, record in self._records.items() if q not in self._queues.by_name]
        return {
            "queues": served + unserved,
            "draining": self._is_draining,
            "keeps_models": self._service.known.is_on,
        }

    async def _remove_known_models(self) -> None:
        """Removes models remembered by schedulers with `--scale-to-zero`, unless one of those is running.

        All schedulers of a deployment have the flag or none has it; but while the flag is rolled out, both kinds run.
        """
        await asyncio.sleep(PRESENCE_WAIT_S)
        keepers = sorted(record.id for record in self._view.processes.values() if record.keeps_models)
        if keepers:
            logger.info(
                "remembered models are kept: scheduler %s runs with --scale-to-zero, unlike this one", keepers[0]
            )
            return
        try:
            await self._service.known.models.remove_bucket()
        except _BROKER_ERRORS as error:
            logger.warning(
                "models remembered by an earlier scheduler could not be removed: %s: %s", type(error).__name__, error
            )

    # Events

    def _on_model_change(self, name: str) -> None:
        if name in self._service.known_models():
            self._policy.add_queues(time.monotonic(), set(self._service.queues_of(name)))
            self._schedule_actions()

    def _on_presence(self, record: RoleRecord, is_there: bool) -> None:
        if record.id == self._id:
            return
        if is_there:
            queues = {LiveQueue(model, partition): epoch for model, partition, epoch in record.queues}
            self._policy.scheduler_seen(time.monotonic(), record.id, queues, record.draining)
        else:
            self._policy.scheduler_gone(record.id)
        self._schedule_actions()

    def _on_announcement(self, message: Message) -> None:
        try:
            model, partition, owner, epoch = astuple(QueueOwner.unpack(message.data))
        except MalformedMessage as error:
            self.malformed_messages += 1
            _limited.warning("malformed", "subject %s: dropped a malformed message: %s", message.subject, error)
            return
        if owner == self._id and self._records.get(LiveQueue(model, partition)) is not None:
            return
        self._policy.owner_reported(time.monotonic(), LiveQueue(model, partition), owner, epoch, is_read=False)
        self._schedule_actions()

    def _on_scheduler_lost(self, id: str) -> bool:
        """Handles nats-server's report that nothing listens at `id`; returns whether that was a scheduler."""
        if id not in self._policy.others:
            return False
        logger.warning("scheduler %s is gone: nats-server reports no subscriber; its queues will be acquired", id)
        self._view.drop(id)
        self._policy.scheduler_gone(id)
        self._schedule_actions()
        return True

    def _on_batch_rejected(self, owned: OwnedQueue, epoch: int) -> None:
        """Checks the record of a queue of which a worker knows a later owner."""
        self._seen_epochs[owned.queue] = max(epoch, self._seen_epochs.get(owned.queue, 0))
        self._start_task(self._check_one(owned))

    def _on_policy_failed(self, owned: OwnedQueue) -> None:
        """Restarts a queue whose policy has raised, with a new policy."""
        self._start_task(self._restart_queue(owned))

    # Actions

    def _schedule_actions(self) -> None:
        if self._scheduled is None:
            self._scheduled = asyncio.get_running_loop().call_soon(call_each, _ACTING, (self._act,))

    def _act(self) -> None:
        self._scheduled = None
        if not self._bus.is_connected or not self._service.lease_gate.is_open:
            return
        for action in self._policy.tick(time.monotonic()):
            self._start_task(self._carry_out(action))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._background.create_task(self._run(work))
        self._tasks_in_progress.add(task)
        task.add_done_callback(self._tasks_in_progress.discard)

    @contained()
    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        await work

    @contained(on_error="_action_failed")
    async def _carry_out(self, action: Action) -> None:
        queue = action.queue
        async with self._slots:
            try:
                if isinstance(action, Acquire):
                    await self._acquire(queue)
                elif isinstance(action, ReadOwner):
                    record = await self._owners.read(queue)
                    self._policy.owner_reported(time.monotonic(), queue, record.owner, record.epoch)
                else:
                    await self._hand_over(action)
            except _BROKER_ERRORS as error:
                # The broker is away or restarting: the policy will repeat the action.
                _log_failure("change its owner", queue, error)
                self._policy.failed(time.monotonic(), queue)
        self._schedule_actions()

    def _action_failed(self, _error: Exception, action: Action) -> None:
        self._policy.failed(time.monotonic(), action.queue)

    async def _acquire(self, queue: LiveQueue) -> None:
        losses = self._bus.losses
        record = await self._owners.read(queue)
        owner = record.owner
        if owner not in ("", self._id) and not self._policy.is_gone(owner):
            self._policy.owner_reported(time.monotonic(), queue, owner, record.epoch)
            self._probe(owner)
            return
        highest = max(self._policy.highest_epoch(queue), self._seen_epochs.pop(queue, 0))
        written = await self._owners.write(queue, self._id, record, highest)
        if written is None:
            self._policy.failed(time.monotonic(), queue)
            return
        self._announce(queue, written)
        # What is left of an earlier ownership, which another scheduler has ended. A check would compare the new record with
        # the earlier one, and have the queue acquired twice.
        self._records.pop(queue, None)
        earlier = self._queues.by_name.get(queue)
        if earlier is not None:
            self._queues.drop(earlier)
        connections = self._bus.connections
        former = await self._service.former_sequences(queue, had_owner=bool(record.epoch))
        acquired = await acquire_live_consumer(self._bus, queue, written.epoch)
        self._records[queue] = written
        owned = await self._service.serve(queue, acquired.consumer, written.epoch, former)
        owned.set_consumer(acquired, connections)
        self._policy.acquired(time.monotonic(), queue, written.epoch)
        if losses != self._bus.losses:  # a lost broker may have held the record
            await self._confirm(queue)
        if owner not in ("", self._id):
            logger.warning("queue %s: acquired from scheduler %s, which is gone", queue, owner)

    async def _hand_over(self, action: HandOver) -> None:
        queue, record = action.queue, self._records.get(action.queue)
        if record is None or queue not in self._queues.by_name:
            self._policy.failed(time.monotonic(), queue)
            return
        await self._queues.release(queue)
        self._records.pop(queue, None)
        self._policy.released(queue)
        written = await self._owners.write(queue, action.to, record)
        if written is None:
            self._policy.failed(time.monotonic(), queue)
            return
        self._policy.owner_reported(time.monotonic(), queue, written.owner, written.epoch)
        self._announce(queue, written)

    def _announce(self, queue: LiveQueue, record: OwnerRecord) -> None:
        announcement = QueueOwner(*queue, record.owner, record.epoch).pack()
        self._bus.publish(subjects.owner_announcement(*queue), announcement)

    def _is_movable(self, queue: LiveQueue) -> bool:
        owned = self._queues.by_name.get(queue)
        return owned is not None and not owned.stopped and not owned.has_sequences

    # Heartbeats

    async def _heartbeat_loop(self) -> None:
        while True:
            await next_tick(HEARTBEAT_INTERVAL_S)
            await self._heartbeat(time.monotonic())

    @contained()
    async def _heartbeat(self, now_s: float) -> None:
        was_paused, self._heartbeat_s = now_s - self._heartbeat_s > _PAUSE_S, now_s
        if was_paused or not self._bus.is_connected:
            self._view.restart_timeouts()  # this process was paused or the broker away: no heartbeat arrived
        if not self._bus.is_connected:
            return
        if now_s > self._no_expiry_before_s:
            self._view.expire(SILENCE_S)
            for record in list(self._view.processes.values()):
                # An announcement in between may have been older.
                call_each(
                    "weir.scheduler.ownership.controller: a scheduler's record", (self._on_presence,), record, True
                )
            for other in self._policy.others:
                self._probe(other)
        await self._attempt(self._renew_lease())
        if self._has_handed_over:
            return
        if self._service.lease_gate.is_open:
            await self._attempt(self._check_consumers())
        self._act()

    def _probe(self, other: str) -> None:
        self._bus.publish(subjects.probe(other), b"", subjects.lost(self._id, other))

    async def _renew_lease(self) -> None:
        sent_s = await self._send_heartbeat()
        if not self._service.lease_gate.renew(sent_s) and not self._checks.locked():
            # The check may wait seconds for the records' leader; heartbeats go on, or others would take our queues.
            self._start_task(self._attempt(self._check()))

    async def _send_heartbeat(self) -> float:
        """Sends a heartbeat; returns when it was sent, once the broker has it."""
        sent_s = time.monotonic()
        self._presence.publish()
        async with asyncio.timeout(_CONFIRMATION_S):
            await self._bus.flush()
        return sent_s

    async def _check(self) -> None:
        """Reads which queues this scheduler still owns, and opens the gate."""
        async with self._checks:
            queues = list(self._records)
            if not self._service.lease_gate.is_open:
                logger.warning(
                    "heartbeats were not confirmed in time: checking the ownership of %d queues", len(queues)
                )
            await _for_each(queues, self._confirm)
            self._service.lease_gate.reopen(await self._send_heartbeat())

    async def _confirm(self, queue: LiveQueue) -> bool:
        """Whether the queue is still ours. A record that the broker has lost is written again; a lost queue is dropped."""
        mine = self._records.get(queue)
        if mine is None:
            return False
        record = await self._owners.read(queue)
        if self._records.get(queue) is not mine:
            return False  # it was acquired again, or handed over, meanwhile
        seen = self._seen_epochs.pop(queue, 0)
        is_mine = record.owner == self._id and record.epoch == mine.epoch
        highest = max(mine.epoch, seen, self._policy.highest_epoch(queue))
        if (is_mine and (seen == mine.epoch or highest > mine.epoch)) or not record.sequence:
            # The broker lost its memory, or others know a higher epoch from before that.
            written = await self._owners.write(queue, self._id, record, highest)
            if written is not None:
                self._renew(queue, written)
                return True
            record = await self._owners.read(queue)
            is_mine = False
        if is_mine:
            return True
        self._drop(queue, record)
        return False

    def _renew(self, queue: LiveQueue, record: OwnerRecord) -> None:
        self._records[queue] = record
        owned = self._queues.by_name.get(queue)
        if owned is not None:
            owned.epoch = record.epoch
            owned.pull.consumer_lost = True  # its consumer has the previous epoch
        self._policy.acquired(time.monotonic(), queue, record.epoch)
        self._announce(queue, record)

    def _drop(self, queue: LiveQueue, record: OwnerRecord) -> None:
        logger.warning("queue %s is no longer owned here: its owner is %s", queue, record.owner or "none")
        self._records.pop(queue, None)
        owned = self._queues.by_name.get(queue)
        if owned is not None:
            self._queues.drop(owned)
        self._policy.released(queue)
        self._policy.owner_reported(time.monotonic(), queue, record.owner, record.epoch)
        self._schedule_actions()

    async def _restart_queue(self, failed: OwnedQueue) -> None:
        """Recreates the consumer of a queue, so that it delivers everything unacknowledged, and creates a new policy.

        A policy that keeps failing is recreated once in `POLICY_RESTART_S` at most; meanwhile its requests wait in
        the stream.
        """
        queue = failed.queue
        wait_s = self._restarted_s.get(queue, 0.0) + POLICY_RESTART_S - time.monotonic()
        await asyncio.sleep(max(0.0, wait_s))
        self._restarted_s[queue] = time.monotonic()
        while queue in self._records and queue not in self._queues.by_name and not self._is_draining:
            try:
                async with self._checks:
                    if not await self._confirm(queue):
                        return
                    epoch, connections = self._records[queue].epoch, self._bus.connections
                    acquired = await acquire_live_consumer(self._bus, queue, epoch)
                    former = await self._service.former_sequences(queue, had_owner=True)
                    owned = await self._service.serve(queue, acquired.consumer, epoch, former)
                    owned.set_consumer(acquired, connections)
            except _BROKER_ERRORS as error:
                _log_failure("restart it", queue, error)
                await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    async def _check_one(self, owned: OwnedQueue) -> None:
        try:
            async with self._checks:
                if owned.rejected_batches and await self._confirm(owned.queue):
                    await owned.reacquire(self._bus)
                    self._queues.resume(owned)
        except _BROKER_ERRORS as error:
            _log_failure("check its owner", owned.queue, error)
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            self._start_task(self._check_one(owned))

    async def _check_consumers(self) -> None:
        """Reacquires lost consumers, and checks queues that the policy no longer holds.

        A consumer is lost if the next owner has recreated it, or if the broker has lost its memory. Another scheduler
        may also have announced that it is the next owner.
        """
        held = self._policy.held
        for queue in list(self._records):
            owned = self._queues.by_name.get(queue)
            if owned is None or owned.stopped:
                continue
            owned.pull.check()
            is_lost = owned.has_lost_consumer
            if (is_lost or queue not in held) and await self._confirm(queue) and is_lost:
                owned.reacquire_if_lost(self._bus, self._background)

    async def _recover(self) -> None:
        """Restores streams, records and consumers after the broker or another server of its cluster came back.

        Owned queues stay owned. Work that the lost server was not involved in continues: it may have led the records,
        or the API.
        """
        was_disconnected, self._connections = self._connections != self._bus.connections, self._bus.connections
        self._no_expiry_before_s = time.monotonic() + RECONNECT_GRACE_S
        self._service.suspend_death_detection()
        if was_disconnected:
            self._service.lease_gate.close()
        self._view.restart_timeouts()
        await ensure_live_streams(self._bus)
        await self._owners.ensure()
        await self._check()
        await _for_each(filter(None, map(self._queues.by_name.get, self._records)), self._reacquire_unless_complete)
        await ensure_streams(self._bus)

    async def _reacquire_unless_complete(self, owned: OwnedQueue) -> None:
        if not await owned.has_received_all(self._bus):
            await owned.reacquire(self._bus)

    @contained()
    async def _attempt(self, change: Coroutine[Any, Any, Any]) -> None:
        """Awaits an operation of the broker, which may be away: then it is repeated later or covered by recovery."""
        try:
            await change
        except _BROKER_ERRORS as error:
            _limited.warning(
                "not done",
                "an operation of the broker failed and will be repeated: %s: %s",
                type(error).__name__,
                error,
            )


async def _for_each(items: Iterable[_Item], act: Callable[[_Item], Coroutine[Any, Any, Any]]) -> None:
    """Awaits `act` for each item, `MAX_CONCURRENT_CHANGES` of them at a time."""
    remaining = list(items)
    while remaining:
        await asyncio.gather(*map(act, remaining[:MAX_CONCURRENT_CHANGES]))
        del remaining[:MAX_CONCURRENT_CHANGES]


def _log_failure(attempt: str, queue: LiveQueue, error: Exception) -> None:
    _limited.warning(
        attempt, "queue %s: could not %s, trying again: %s: %s", queue, attempt, type(error).__name__, error
    )
