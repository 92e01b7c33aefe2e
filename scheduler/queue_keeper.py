"""`QueueKeeper`: sees to it that each queue has one owner among the schedulers; the shell of `scheduler.ownership`.

It tells the others of this scheduler each `SIGN_INTERVAL_S` and hears of them, probes their connections, and carries out
what `Ownership` decides: a queue is taken by writing its record (`bus.queue_owners`), then making its consumer anew, and
handed over by letting what runs end, then writing the record for the next owner.

Whether this scheduler may go on with what it has says the `Fence`, which a sign of life keeps open that the broker has
confirmed. Once it has shut, the records are read before anything is done: what is another's by now is dropped without a
word, for that one has been delivered everything that was not acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

from nats.errors import Error as NatsError

from bus import subjects
from bus.connection import Bus, Message
from bus.live_queues import LiveQueue
from bus.presence import Presence, PresenceView
from bus.queue_owners import OwnerRecord, QueueOwners
from bus.streams import ensure_live_streams, ensure_streams, take_live_consumer
from runtime.containment import contained
from runtime.log_limiter import LogLimiter
from scheduler.owned_model import OwnedModel
from scheduler.ownership import SILENCE_S, Action, HandOver, Look, Ownership, Take
from scheduler.service import RECONNECT_GRACE_S, SchedulerService
from schemas.ownership import QueueOwner, pack_queue_owner, unpack_queue_owner
from schemas.presence import RoleRecord
from schemas.wire import MalformedMessage

logger = logging.getLogger("weir.scheduler")

_limited = LogLimiter(logger)

SIGN_INTERVAL_S = 0.25
"""How often a scheduler tells of itself, and probes the others."""

AT_A_TIME = 16
"""Queues that are taken, looked at or handed over at once; the others wait."""

MAX_SEQUENCES_WAIT_S = 10.0
"""A scheduler that is leaving waits for so long for sequences that have begun."""

KEEPERS_PATIENCE_S = 3.0
"""How long schedulers with `--scale-to-zero` have to tell of themselves, before what they may have kept is removed."""

SERVE_AGAIN_S = 1.0
"""A queue whose policy fails is begun again at most once in this time."""

_CONFIRMATION_S = 1.0
_PAUSE_S = 2 * SIGN_INTERVAL_S
_POLL_S = 0.02

_AWAY = (NatsError, OSError, TimeoutError)


class QueueKeeper:
    """See the module. `service` serves the queues that this one takes."""

    def __init__(self, bus: Bus, scheduler_id: str, service: SchedulerService, background: asyncio.TaskGroup) -> None:
        self._bus = bus
        self._id = scheduler_id
        self._service = service
        self._background = background
        self._owners = QueueOwners(bus)
        self._records: dict[LiveQueue, OwnerRecord] = {}  # of what is held
        self._policy = Ownership(scheduler_id, self._is_movable)
        self._presence = Presence(bus, "scheduler", scheduler_id, self._describe)
        self._view = PresenceView(bus, "scheduler")
        self._is_draining = False
        self._acting: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(AT_A_TIME)
        self._wakes: asyncio.Handle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._alone_until_s = 0.0
        self._connections = bus.connections
        self._signed_s = time.monotonic()
        self._checks = asyncio.Lock()
        self._served_again_s: dict[LiveQueue, float] = {}  # when queues were begun again whose policies had failed
        self._seen_epochs: dict[LiveQueue, int] = {}  # by workers that refused us
        self.malformed_messages = 0

    async def start(self) -> None:
        """Returns when every queue that is called for has an owner, as far as that is in this scheduler's hands."""
        await self._owners.ensure()
        self._service.is_scheduler_gone = self._is_gone
        self._service.on_refused = self._on_refused
        self._service.on_failed = self._on_failed
        self._service.registry.on_model_change(self._on_model_change)
        self._bus.on_reconnect(self._recover)
        await self._bus.subscribe(subjects.probe(self._id), lambda message: None)
        await self._bus.subscribe(subjects.OWNER_WORD, self._on_word)
        await self._bus.subscribe(subjects.PRESENCE_QUERY, lambda message: self._presence.tell())
        self._view.on_change(self._on_presence)
        await self._view.start()
        await self._try(self._sign())
        self._tasks.append(self._background.create_task(self._live()))
        if not self._service.memory.is_on:
            self._tasks.append(self._background.create_task(self._remove_kept_models()))
        for name in self._service.known_models():
            self._on_model_change(name)
        for _ in range(3):
            self._act()
            if not self._acting:
                break
            await asyncio.gather(*self._acting)
            await self._try(self._bus.flush())  # nats-server's word of owners that have gone has come then

    async def leave(self, timeout_s: float) -> None:
        """Hands over what is held, where there is somebody to take it; ends with nothing under way."""
        self._is_draining = True
        self._policy.drain()
        self._presence.tell()
        deadline_s = time.monotonic() + min(timeout_s, MAX_SEQUENCES_WAIT_S)
        while self._policy.held and self._policy.has_heirs and time.monotonic() < deadline_s:
            self._act()
            await asyncio.sleep(_POLL_S)
        for task in self._tasks:
            task.cancel()
        if self._acting:
            await asyncio.wait(self._acting, timeout=timeout_s)

    async def left(self) -> None:
        """The last word: what it had is nobody's now."""
        records = list(self._records.items())
        for position in range(0, len(records), AT_A_TIME):
            part = records[position : position + AT_A_TIME]
            await asyncio.gather(*(self._try(self._owners.write(queue, "", record)) for queue, record in part))
        self._presence.tell(leaving=True)

    def _describe(self) -> dict[str, Any]:
        # Those that are begun again are owned all the same, though nothing serves them at this moment.
        unserved = [(*q, record.epoch) for q, record in self._records.items() if self._service.find(q) is None]
        return {
            "queues": self._service.owned_queues + unserved,
            "draining": self._is_draining,
            "keeps_models": self._service.memory.is_on,
        }

    async def _remove_kept_models(self) -> None:
        """Removes the models kept by schedulers with `--scale-to-zero`, unless one of them runs beside this one.

        All schedulers of a deployment have the flag or none has it; but while it is rolled out, both kinds run.
        """
        await asyncio.sleep(KEEPERS_PATIENCE_S)
        keepers = sorted(record.id for record in self._view.processes.values() if record.keeps_models)
        if keepers:
            logger.info("known models stay: scheduler %s runs with --scale-to-zero, unlike this one", keepers[0])
            return
        try:
            await self._service.memory.abolish()
        except _AWAY as error:
            logger.warning("the models kept known earlier could not be removed: %s: %s", type(error).__name__, error)

    # What is heard

    @contained()
    def _on_model_change(self, name: str) -> None:
        if name in self._service.known_models():
            self._policy.want(time.monotonic(), set(self._service.queues_of(name)))
            self._wake()

    @contained()
    def _on_presence(self, record: RoleRecord, is_there: bool) -> None:
        if record.id == self._id:
            return
        if is_there:
            queues = {LiveQueue(model, partition): epoch for model, partition, epoch in record.queues}
            self._policy.seen(time.monotonic(), record.id, queues, record.draining)
        else:
            self._policy.gone(record.id)
        self._wake()

    @contained()
    def _on_word(self, message: Message) -> None:
        try:
            model, partition, owner, epoch = unpack_queue_owner(message.data)
        except MalformedMessage as error:
            self.malformed_messages += 1
            _limited.warning("malformed", "subject %s: dropped a malformed message: %s", message.subject, error)
            return
        if owner == self._id and self._records.get(LiveQueue(model, partition)) is not None:
            return
        self._policy.known(time.monotonic(), LiveQueue(model, partition), owner, epoch, is_answer=False)
        self._wake()

    def _is_gone(self, id: str) -> bool:
        """nats-server says that nobody listens there; whether that is a scheduler."""
        if id not in self._policy.others:
            return False
        logger.warning("scheduler %s is gone", id)
        self._view.drop(id)
        self._policy.gone(id)
        self._wake()
        return True

    def _on_refused(self, owned: OwnedModel, epoch: int) -> None:
        """A worker knows of a later owner."""
        self._seen_epochs[owned.queue] = max(epoch, self._seen_epochs.get(owned.queue, 0))
        self._begin(self._check_one(owned))

    def _on_failed(self, owned: OwnedModel) -> None:
        """The policy of a queue has raised: the queue is served again, by a new one."""
        self._begin(self._serve_again(owned))

    # What is done

    def _wake(self) -> None:
        if self._wakes is None:
            self._wakes = asyncio.get_running_loop().call_soon(self._act)

    @contained()
    def _act(self) -> None:
        self._wakes = None
        if not self._bus.is_connected or not self._service.fence.is_open:
            return
        for action in self._policy.tick(time.monotonic()):
            self._begin(self._carry_out(action))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._background.create_task(work)
        self._acting.add(task)
        task.add_done_callback(self._acting.discard)

    @contained(on_error="_action_failed")
    async def _carry_out(self, action: Action) -> None:
        queue = action.queue
        async with self._places:
            try:
                if isinstance(action, Take):
                    await self._take(queue)
                elif isinstance(action, Look):
                    record = await self._owners.read(queue)
                    self._policy.known(time.monotonic(), queue, record.owner, record.epoch)
                else:
                    await self._hand_over(action)
            except _AWAY as error:
                # The broker is away or restarting: the policy will want it again.
                _limited.warning("action failed", "queue %s: %s: %s", queue, type(error).__name__, error)
                self._policy.failed(time.monotonic(), queue)
        self._wake()

    def _action_failed(self, _error: Exception, action: Action) -> None:
        self._policy.failed(time.monotonic(), action.queue)

    async def _take(self, queue: LiveQueue) -> None:
        losses = self._bus.losses
        record = await self._owners.read(queue)
        owner = record.owner
        if owner not in ("", self._id) and not self._policy.is_gone(owner):
            self._policy.known(time.monotonic(), queue, owner, record.epoch)
            self._probe(owner)
            return
        highest = max(self._policy.highest_epoch(queue), self._seen_epochs.pop(queue, 0))
        written = await self._owners.write(queue, self._id, record, highest)
        if written is None:
            self._policy.failed(time.monotonic(), queue)
            return
        self._tell_of(queue, written)
        connections = self._bus.connections
        taken = await take_live_consumer(self._bus, queue, written.epoch)
        self._records[queue] = written
        await self._service.own(queue, taken.consumer, written.epoch, is_heir=bool(record.epoch))
        owned = self._service.find(queue)
        if owned is not None:
            owned.took_consumer(taken, connections)
        self._policy.took(time.monotonic(), queue, written.epoch)
        if losses != self._bus.losses:  # the broker that had the record may have gone, and it with it
            await self._confirm(queue)
        if owner not in ("", self._id):
            logger.warning("queue %s: taken over from %s, which is gone", queue, owner)

    async def _hand_over(self, action: HandOver) -> None:
        queue, record = action.queue, self._records.get(action.queue)
        if record is None or self._service.find(queue) is None:
            self._policy.failed(time.monotonic(), queue)
            return
        await self._service.release(queue)
        self._records.pop(queue, None)
        self._policy.lost(queue)
        written = await self._owners.write(queue, action.to, record)
        if written is None:
            self._policy.failed(time.monotonic(), queue)
            return
        self._policy.known(time.monotonic(), queue, written.owner, written.epoch)
        self._tell_of(queue, written)

    def _tell_of(self, queue: LiveQueue, record: OwnerRecord) -> None:
        told = pack_queue_owner(QueueOwner(*queue, record.owner, record.epoch))
        self._bus.publish(subjects.owner_word(*queue), told)

    def _is_movable(self, queue: LiveQueue) -> bool:
        owned = self._service.find(queue)
        return owned is not None and not owned.stopped and not owned.has_sequences

    # Signs of life

    async def _live(self) -> None:
        while True:
            await asyncio.sleep(SIGN_INTERVAL_S)
            await self._live_once(time.monotonic())

    @contained()
    async def _live_once(self, now_s: float) -> None:
        was_paused, self._signed_s = now_s - self._signed_s > _PAUSE_S, now_s
        if was_paused or not self._bus.is_connected:
            self._view.hear_all()  # this process was paused or the broker away: no heartbeat arrived meanwhile
        if not self._bus.is_connected:
            return
        if now_s > self._alone_until_s:
            self._view.expire(SILENCE_S)
            for record in list(self._view.processes.values()):
                self._on_presence(record, True)  # what was heard in between may have been older
            for other in self._policy.others:
                self._probe(other)
        await self._try(self._sign())
        if self._service.fence.is_open:
            await self._try(self._mind_consumers())
        self._act()

    def _probe(self, other: str) -> None:
        self._bus.publish(subjects.probe(other), b"", subjects.lost(self._id, other))

    async def _sign(self) -> None:
        told_s = await self._told()
        if not self._service.fence.confirmed(told_s) and not self._checks.locked():
            # It may wait for the records' leader, for seconds: signs of life go on, or others would take what is ours.
            self._begin(self._try(self._check()))

    async def _told(self) -> float:
        """Tells of this scheduler; when it did, once the broker has it."""
        told_s = time.monotonic()
        self._presence.tell()
        async with asyncio.timeout(_CONFIRMATION_S):
            await self._bus.flush()
        return told_s

    async def _check(self) -> None:
        """It is not sure any more what this scheduler owns: reads it, and opens the fence."""
        async with self._checks:
            queues = list(self._records)
            if not self._service.fence.is_open:
                logger.warning("could not tell of itself for a while: looks up whose its %d queues are", len(queues))
            for position in range(0, len(queues), AT_A_TIME):
                part = queues[position : position + AT_A_TIME]
                await asyncio.gather(*(self._confirm(queue) for queue in part))
            self._service.fence.open(await self._told())

    async def _confirm(self, queue: LiveQueue) -> bool:
        """Whether the queue is still ours, which is written again where nothing is known of it; else it is dropped."""
        mine = self._records.get(queue)
        if mine is None:
            return False
        record = await self._owners.read(queue)
        seen = self._seen_epochs.pop(queue, 0)
        is_mine = record.owner == self._id and record.epoch == mine.epoch
        highest = max(mine.epoch, seen, self._policy.highest_epoch(queue))
        if (is_mine and (seen == mine.epoch or highest > mine.epoch)) or not record.sequence:
            # A broker without its memory; or others know of a higher epoch, from before that was lost.
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
        owned = self._service.find(queue)
        if owned is not None:
            owned.epoch = record.epoch
            owned.pull.consumer_lost = True  # its consumer is that of the epoch before
        self._policy.took(time.monotonic(), queue, record.epoch)
        self._tell_of(queue, record)

    def _drop(self, queue: LiveQueue, record: OwnerRecord) -> None:
        logger.warning("queue %s belongs to %s by now", queue, record.owner or "nobody")
        self._records.pop(queue, None)
        owned = self._service.find(queue)
        if owned is not None:
            self._service.drop(owned)
        self._policy.lost(queue)
        self._policy.known(time.monotonic(), queue, record.owner, record.epoch)
        self._wake()

    @contained()
    async def _serve_again(self, failed: OwnedModel) -> None:
        """Makes the consumer of the queue anew, which has it deliver all that is not acknowledged, and a new policy.

        What keeps failing is begun again each `SERVE_AGAIN_S` at most; meanwhile its requests wait in the stream.
        """
        queue = failed.queue
        wait_s = self._served_again_s.get(queue, 0.0) + SERVE_AGAIN_S - time.monotonic()
        await asyncio.sleep(max(0.0, wait_s))
        self._served_again_s[queue] = time.monotonic()
        while queue in self._records and self._service.find(queue) is None and not self._is_draining:
            try:
                async with self._checks:
                    if not await self._confirm(queue):
                        return
                    epoch, connections = self._records[queue].epoch, self._bus.connections
                    taken = await take_live_consumer(self._bus, queue, epoch)
                    owned = await self._service.own(queue, taken.consumer, epoch, is_heir=True)
                    owned.took_consumer(taken, connections)
            except _AWAY as error:
                _limited.warning("not served again", "queue %s: %s: %s", queue, type(error).__name__, error)
                await asyncio.sleep(SIGN_INTERVAL_S)

    @contained()
    async def _check_one(self, owned: OwnedModel) -> None:
        try:
            async with self._checks:
                if owned.refused and await self._confirm(owned.queue):
                    await owned.take_again(self._bus)
                    self._service.resume(owned)
        except _AWAY as error:
            _limited.warning("not checked", "queue %s: %s: %s", owned.queue, type(error).__name__, error)
            await asyncio.sleep(SIGN_INTERVAL_S)
            self._begin(self._check_one(owned))

    async def _mind_consumers(self) -> None:
        """A consumer that is gone, or another's, was made anew by the next owner, or went with the broker's memory.

        And somebody may have told that he is the next owner.
        """
        held = self._policy.held
        for queue in list(self._records):
            owned = self._service.find(queue)
            if owned is None or owned.stopped:
                continue
            is_lost = owned.has_lost_consumer
            if (is_lost or queue not in held) and await self._confirm(queue) and is_lost:
                owned.look_after(self._bus, self._background)

    async def _recover(self) -> None:
        """The broker came back, perhaps without streams, consumers and pulls; or another server of its cluster has gone.

        Then what is owned stays so, and what that server had no part in goes on: it may have led the records, or the API.
        """
        is_ours_gone, self._connections = self._connections != self._bus.connections, self._bus.connections
        self._alone_until_s = time.monotonic() + RECONNECT_GRACE_S
        self._service.told_nobody_is_gone()
        if is_ours_gone:
            self._service.fence.shut()
        self._view.hear_all()
        await ensure_live_streams(self._bus)
        await self._owners.ensure()
        await self._check()
        owned = [*filter(None, map(self._service.find, self._records))]
        for position in range(0, len(owned), AT_A_TIME):
            await asyncio.gather(*map(self._hear_again, owned[position : position + AT_A_TIME]))
        await ensure_streams(self._bus)

    async def _hear_again(self, owned: OwnedModel) -> None:
        if not await owned.has_heard_all(self._bus):
            await owned.take_again(self._bus)

    @contained()
    async def _try(self, change: Coroutine[Any, Any, Any]) -> None:
        """Does something with the broker, which may be away just now: then it is done again, or recovery sees to it."""
        try:
            await change
        except _AWAY as error:
            _limited.warning("not done", "the broker rejected the operation: %s: %s", type(error).__name__, error)
