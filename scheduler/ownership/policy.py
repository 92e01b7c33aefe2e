"""`OwnershipPolicy`: decides which queues of live requests a scheduler acquires, and which it hands over to whom.

Every scheduler runs one, fed with what it receives from the others. All of them compute in the same way, so where
they have received the same they agree without communication; otherwise the compare-and-set of a queue's record
(`weir.bus.kv.queue_owners`) lets one of them succeed. Promises:

- a queue without an owner is acquired, and the queues of a lost scheduler are acquired by the remaining ones;
- at rest the schedulers own equally many queues, give or take one, except for queues that must not move;
- a queue with a live owner stays there, unless moving it evens out the numbers or the owner is leaving; none is moved
  twice.

It is sans-IO: events and the time (seconds of one monotonic clock) go in, actions come out. The caller reports the
result of an action by `owner_reported`, `acquired` or `failed`; until then the queue is left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heapreplace
from typing import NamedTuple

from msgspec import Struct, field

from weir.bus.naming.live_queues import LiveQueue

SILENCE_S = 1.0
"""An owner in a record without any heartbeat is considered lost after this time; the caller reports lost others."""

NEWCOMER_DELAY_S = 0.5
"""A new scheduler is handed no queues of others before this time: it may disappear again, as in a restart loop."""

READ_OWNER_AFTER_S = 1.0
"""The record of a queue that another scheduler should have acquired is read after this time, repeatedly."""

_TAKEOVER_S = 2.0
_TAKEOVER_BY_RANK_S = 0.5
_RETRY_S = 0.1


class Acquire(NamedTuple):
    """Acquire the queue, unless its record names a live owner."""

    queue: LiveQueue


class ReadOwner(NamedTuple):
    """Read the queue's record."""

    queue: LiveQueue


class HandOver(NamedTuple):
    """Drain the queue and write its record for scheduler `to` ("": no owner)."""

    queue: LiveQueue
    to: str


Action = Acquire | ReadOwner | HandOver


class _Scheduler(Struct, eq=False):
    since_s: float
    is_draining: bool = False
    queues: Mapping[LiveQueue, int] = field(default_factory=dict)


class _Queue(Struct, eq=False):
    since_s: float  # when this owner was first seen here
    try_at_s: float
    owner: str = ""
    epoch: int = 0
    highest: int = 0  # highest epoch ever received
    action: Action | None = None  # in progress


class OwnershipPolicy:
    """The policy of `scheduler`. `is_movable(queue)` is called for queues that it holds."""

    def __init__(self, scheduler: str, is_movable: Callable[[LiveQueue], bool] = lambda queue: True) -> None:
        self._self = scheduler
        self._is_movable = is_movable
        self._schedulers: dict[str, _Scheduler] = {scheduler: _Scheduler(float("-inf"))}
        self._without_heartbeat: dict[str, float] = {}  # owners in records without a heartbeat, and since when
        self._gone: set[str] = set()
        self._queues: dict[LiveQueue, _Queue] = {}
        self._held: set[LiveQueue] = set()

    # Events

    def scheduler_seen(
        self, now_s: float, scheduler: str, queues: Mapping[LiveQueue, int], is_draining: bool = False
    ) -> None:
        """Processes a heartbeat: a scheduler owns these queues with these epochs; `is_draining`: it is leaving."""
        if scheduler == self._self:
            return
        other = self._schedulers.get(scheduler)
        if other is None:
            other = self._schedulers[scheduler] = _Scheduler(now_s)
            other.queues = {queue: state.epoch for queue, state in self._queues.items() if state.owner == scheduler}
        self._without_heartbeat.pop(scheduler, None)
        self._gone.discard(scheduler)
        other.is_draining = is_draining
        for queue, epoch in queues.items():
            self.owner_reported(now_s, queue, scheduler, epoch, is_read=False)
        for queue in other.queues.keys() - queues.keys():
            state = self._queues[queue]
            if state.owner == scheduler and state.epoch <= other.queues[queue]:
                self._set_owner(now_s, state, "")  # the announcement of its new owner may still arrive
        other.queues = dict(queues)

    def scheduler_gone(self, scheduler: str) -> None:
        """Removes a scheduler that has left, has died, or has sent no heartbeat for too long."""
        if scheduler == self._self:
            return
        self._schedulers.pop(scheduler, None)
        self._without_heartbeat.pop(scheduler, None)
        if any(state.owner == scheduler for state in self._queues.values()):
            self._gone.add(scheduler)

    def drain(self) -> None:
        """Acquires nothing from now on and hands over everything: this scheduler is leaving."""
        self._schedulers[self._self].is_draining = True

    def add_queues(self, now_s: float, queues: Iterable[LiveQueue]) -> None:
        """Adds queues that must have an owner."""
        for queue in queues:
            self._state(now_s, queue)

    def owner_reported(self, now_s: float, queue: LiveQueue, owner: str, epoch: int, is_read: bool = True) -> None:
        """Processes the owner of a queue ("": none) as read from its record (`is_read`) or announced by another
        scheduler.

        An announcement may be outdated. A record that was read is not, even if a broker that lost its memory made
        epochs fall.
        """
        state = self._state(now_s, queue)
        state.highest = max(state.highest, epoch)
        is_older = epoch < state.epoch
        if is_read:
            state.action = None
            state.try_at_s = now_s + _RETRY_S
            is_older = is_older and queue in self._held
        if is_older or (epoch == state.epoch and state.owner == owner):
            return
        state.epoch = epoch
        if owner != self._self:
            self._held.discard(queue)
        self._set_owner(now_s, state, owner)
        if owner and owner not in self._schedulers and owner not in self._gone:
            self._without_heartbeat.setdefault(owner, now_s)

    # Results of actions

    def acquired(self, now_s: float, queue: LiveQueue, epoch: int) -> None:
        """Reports that this scheduler, which the record names, serves the queue; a later record may be known already."""
        self.failed(now_s, queue)
        self.owner_reported(now_s, queue, self._self, epoch, is_read=False)
        if self._queues[queue].owner == self._self:
            self._held.add(queue)

    def released(self, queue: LiveQueue) -> None:
        """Reports that this scheduler no longer serves the queue; its owner will be reported separately."""
        self._held.discard(queue)

    def failed(self, now_s: float, queue: LiveQueue) -> None:
        """Reports that an action failed, or that another scheduler was faster: the queue is reconsidered shortly."""
        state = self._state(now_s, queue)
        state.action = None
        state.try_at_s = now_s + _RETRY_S

    # State

    @property
    def held(self) -> frozenset[LiveQueue]:
        """The queues that this scheduler serves."""
        return frozenset(self._held)

    @property
    def others(self) -> list[str]:
        """The other live schedulers, and owners in records without any heartbeat yet."""
        return sorted({*self._schedulers, *self._without_heartbeat} - {self._self})

    @property
    def has_successors(self) -> bool:
        """Whether another scheduler could take over this one's queues."""
        return any(not other.is_draining for id, other in self._schedulers.items() if id != self._self)

    def is_gone(self, scheduler: str) -> bool:
        """Whether that owner is known to be lost."""
        return scheduler in self._gone

    def highest_epoch(self, queue: LiveQueue) -> int:
        """Returns the highest epoch of a queue that was ever received."""
        state = self._queues.get(queue)
        return 0 if state is None else state.highest

    # Decisions

    def tick(self, now_s: float) -> list[Action]:
        """Returns the actions to start now. Called periodically and after each event."""
        self._expire_silent_owners(now_s)
        takers = sorted(id for id, other in self._schedulers.items() if not other.is_draining)
        owned: dict[str, list[LiveQueue]] = {id: [] for id in self._schedulers}
        orphans: list[LiveQueue] = []
        actions: list[Action] = []
        for queue in sorted(self._queues):
            state = self._queues[queue]
            if state.owner in owned:
                owned[state.owner].append(queue)
                if state.owner == self._self and queue not in self._held:
                    self._start(now_s, state, Acquire(queue), actions)  # it was handed over to this scheduler
                elif self._is_unconfirmed(now_s, state, queue):
                    self._start(now_s, state, ReadOwner(queue), actions, READ_OWNER_AFTER_S)
            elif not state.owner or state.owner in self._gone:
                orphans.append(queue)
        if takers:
            self._divide(now_s, takers, owned, orphans, actions)
        return actions

    def _is_unconfirmed(self, now_s: float, state: _Queue, queue: LiveQueue) -> bool:
        """Whether the owner has not confirmed the queue for long: it is acquiring it, or an announcement was missed."""
        if state.owner == self._self or now_s - state.since_s < READ_OWNER_AFTER_S:
            return False
        return queue not in self._schedulers[state.owner].queues

    def _expire_silent_owners(self, now_s: float) -> None:
        for owner, since_s in list(self._without_heartbeat.items()):
            if now_s - since_s >= SILENCE_S:
                del self._without_heartbeat[owner]
                self._gone.add(owner)
        owners = {state.owner for state in self._queues.values()} if self._gone else set()
        self._gone &= owners

    def _divide(
        self,
        now_s: float,
        takers: list[str],
        owned: Mapping[str, list[LiveQueue]],
        orphans: list[LiveQueue],
        actions: list[Action],
    ) -> None:
        share, more = divmod(len(self._queues), len(takers))
        most_first = sorted(takers, key=lambda id: (-len(owned[id]), id))
        missing = {id: share + (place < more) - len(owned[id]) for place, id in enumerate(most_first)}
        room = [(-count, id) for id, count in missing.items() if count > 0]
        heapify(room)

        def next_taker() -> str:
            if not room:
                return most_first[-1]
            count, id = room[0]
            heapreplace(room, (count + 1, id))
            return id

        for queue in orphans:
            state = self._queues[queue]
            action, pause_s = self._adoption(queue, next_taker(), takers, now_s - state.since_s)
            if action is not None:
                self._start(now_s, state, action, actions, pause_s)
        givers = [(id, len(queues)) for id, queues in sorted(owned.items()) if id not in missing]
        givers += [(id, -count) for id, count in sorted(missing.items()) if count < 0]
        for id, surplus in givers:
            successors = [next_taker() for _ in range(surplus)]
            if id == self._self:
                self._hand_over(now_s, owned[id], successors, actions)

    def _adoption(
        self, queue: LiveQueue, taker: str, takers: list[str], waited_s: float
    ) -> tuple[Action | None, float]:
        """Returns what to do about a queue without an owner that `taker` should acquire, and after which pause."""
        if taker == self._self:
            return Acquire(queue), 0.0
        if self._self in takers and waited_s >= _TAKEOVER_S + _TAKEOVER_BY_RANK_S * takers.index(self._self):
            return Acquire(queue), READ_OWNER_AFTER_S
        if waited_s >= READ_OWNER_AFTER_S:
            return ReadOwner(queue), READ_OWNER_AFTER_S
        return None, 0.0

    def _hand_over(self, now_s: float, queues: list[LiveQueue], successors: list[str], actions: list[Action]) -> None:
        under_way = [self._queues[queue].action for queue in queues]
        given = Counter(action.to for action in under_way if isinstance(action, HandOver))
        is_draining = self._schedulers[self._self].is_draining
        free = [queue for queue in reversed(queues) if queue in self._held and self._queues[queue].action is None]
        for successor in successors:
            if given[successor] > 0:
                given[successor] -= 1
                continue
            if not is_draining and now_s - self._schedulers[successor].since_s < NEWCOMER_DELAY_S:
                continue
            queue = next((queue for queue in free if self._is_movable(queue)), None)
            if queue is None:
                return
            free.remove(queue)
            self._start(now_s, self._queues[queue], HandOver(queue, successor), actions)

    def _start(self, now_s: float, state: _Queue, action: Action, actions: list[Action], pause_s: float = 0.0) -> None:
        if state.action is None and now_s >= state.try_at_s + pause_s:
            state.action = action
            actions.append(action)

    def _state(self, now_s: float, queue: LiveQueue) -> _Queue:
        state = self._queues.get(queue)
        if state is None:
            state = self._queues[queue] = _Queue(now_s, now_s)
        return state

    def _set_owner(self, now_s: float, state: _Queue, owner: str) -> None:
        if state.owner != owner:
            state.owner = owner
            state.since_s = now_s
