"""`Ownership`: which queues of live requests one of several schedulers takes, and which it hands over, and to whom.

Every scheduler runs one of these, fed with what it hears of the others. All of them reckon the same way, so where they
have heard the same they agree without a word; where they have not, the compare-and-set of a queue's record
(`bus.queue_owners`) lets one of them have it. Promises:

- what nobody owns is taken, and what a scheduler has that is gone is taken by those that are left;
- at rest the schedulers own equally many queues, give or take one, but for queues that must not move;
- a queue whose owner is there stays with it, unless that evens them out or the owner is leaving: nothing is moved twice.

It is sans-IO: events and the time (seconds of one monotonic clock) in, actions out, decided by nothing else. Whoever
carries out an action tells how it ended by `known`, `took` or `failed`; until then the queue is left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heapreplace
from typing import NamedTuple

from bus.live_queues import LiveQueue

SILENCE_S = 1.0
"""An owner that was never heard is taken for gone after so long; of those that were, the caller tells."""

SETTLE_S = 0.5
"""A scheduler that has come is given nothing of others before: it may be gone again, as while it is restarted."""

LOOK_AFTER_S = 1.0
"""A queue that another should have taken is looked at after so long, and again and again."""

_STEP_IN_S = 2.0
_STEP_IN_BY_RANK_S = 0.5
_RETRY_S = 0.1


class Take(NamedTuple):
    """Make it ours, unless its record names an owner that is there."""

    queue: LiveQueue


class Look(NamedTuple):
    """Read who owns it."""

    queue: LiveQueue


class HandOver(NamedTuple):
    """Let what runs end, and write the record for `to` ("": nobody)."""

    queue: LiveQueue
    to: str


Action = Take | Look | HandOver


class _Scheduler:
    __slots__ = ("is_draining", "queues", "since_s")

    def __init__(self, now_s: float) -> None:
        self.since_s = now_s
        self.is_draining = False
        self.queues: Mapping[LiveQueue, int] = {}


class _Queue:
    __slots__ = ("action", "epoch", "highest", "owner", "since_s", "try_at_s")

    def __init__(self, now_s: float) -> None:
        self.owner = ""
        self.epoch = 0
        self.highest = 0  # epoch that was ever heard of
        self.since_s = now_s  # this owner, as far as is known here
        self.try_at_s = now_s
        self.action: Action | None = None  # under way


class Ownership:
    """See the module. `scheduler` is who decides; `is_movable(queue)` is asked of queues that it holds."""

    def __init__(self, scheduler: str, is_movable: Callable[[LiveQueue], bool] = lambda queue: True) -> None:
        self._self = scheduler
        self._is_movable = is_movable
        self._schedulers: dict[str, _Scheduler] = {scheduler: _Scheduler(float("-inf"))}
        self._unheard: dict[str, float] = {}  # owners in records that nobody has heard, and since when that is known
        self._gone: set[str] = set()
        self._queues: dict[LiveQueue, _Queue] = {}
        self._held: set[LiveQueue] = set()

    # What is heard

    def seen(self, now_s: float, scheduler: str, queues: Mapping[LiveQueue, int], is_draining: bool = False) -> None:
        """A scheduler tells which queues it owns from which epoch on, and whether it is leaving."""
        if scheduler == self._self:
            return
        known = self._schedulers.get(scheduler)
        if known is None:
            known = self._schedulers[scheduler] = _Scheduler(now_s)
            known.queues = {queue: state.epoch for queue, state in self._queues.items() if state.owner == scheduler}
        self._unheard.pop(scheduler, None)
        self._gone.discard(scheduler)
        known.is_draining = is_draining
        for queue, epoch in queues.items():
            self.known(now_s, queue, scheduler, epoch, is_answer=False)
        for queue in known.queues.keys() - queues.keys():
            state = self._queues[queue]
            if state.owner == scheduler and state.epoch <= known.queues[queue]:
                self._owned_by(now_s, state, "")  # whom it has handed it to may not have been heard yet
        known.queues = dict(queues)

    def gone(self, scheduler: str) -> None:
        """A scheduler has left, or is known to have died, or was not heard for too long."""
        if scheduler == self._self:
            return
        self._schedulers.pop(scheduler, None)
        self._unheard.pop(scheduler, None)
        if any(state.owner == scheduler for state in self._queues.values()):
            self._gone.add(scheduler)

    def drain(self) -> None:
        """Takes nothing more from now on, and hands over what it has: this scheduler is leaving."""
        self._schedulers[self._self].is_draining = True

    def want(self, now_s: float, queues: Iterable[LiveQueue]) -> None:
        """These queues are there, and are to be owned."""
        for queue in queues:
            self._state(now_s, queue)

    def known(self, now_s: float, queue: LiveQueue, owner: str, epoch: int, is_answer: bool = True) -> None:
        """Who owns a queue by its record ("": nobody), which was read just now (`is_answer`) or told of.

        What was told may be old; what was read is so, even where a broker without its memory has let epochs fall.
        """
        state = self._state(now_s, queue)
        state.highest = max(state.highest, epoch)
        is_older = epoch < state.epoch
        if is_answer:
            state.action = None
            state.try_at_s = now_s + _RETRY_S
            is_older = is_older and queue in self._held
        if is_older or (epoch == state.epoch and state.owner == owner):
            return
        state.epoch = epoch
        if owner != self._self:
            self._held.discard(queue)
        self._owned_by(now_s, state, owner)
        if owner and owner not in self._schedulers and owner not in self._gone:
            self._unheard.setdefault(owner, now_s)

    # What has become of actions

    def took(self, now_s: float, queue: LiveQueue, epoch: int) -> None:
        """The queue is served by this scheduler, which its record names; or did, where a later one is known already."""
        self.failed(now_s, queue)
        self.known(now_s, queue, self._self, epoch, is_answer=False)
        if self._queues[queue].owner == self._self:
            self._held.add(queue)

    def lost(self, queue: LiveQueue) -> None:
        """The queue is not served by this scheduler any more; whose it is will be `known`."""
        self._held.discard(queue)

    def failed(self, now_s: float, queue: LiveQueue) -> None:
        """What was to be done could not be done, or another came first: it is thought over in a moment."""
        state = self._state(now_s, queue)
        state.action = None
        state.try_at_s = now_s + _RETRY_S

    # What is known

    @property
    def held(self) -> frozenset[LiveQueue]:
        """What this scheduler serves."""
        return frozenset(self._held)

    @property
    def others(self) -> list[str]:
        """The other schedulers that are there, and owners that nobody has heard of yet."""
        return sorted({*self._schedulers, *self._unheard} - {self._self})

    @property
    def has_heirs(self) -> bool:
        """Whether another scheduler could take what this one has."""
        return any(not known.is_draining for id, known in self._schedulers.items() if id != self._self)

    def is_gone(self, scheduler: str) -> bool:
        """Whether that owner is known to be gone."""
        return scheduler in self._gone

    def highest_epoch(self, queue: LiveQueue) -> int:
        """The highest epoch of a queue that was ever heard of."""
        state = self._queues.get(queue)
        return 0 if state is None else state.highest

    # What is to be done

    def tick(self, now_s: float) -> list[Action]:
        """What is to be done now. Called again and again, and whenever something was heard."""
        self._give_up_on(now_s)
        takers = sorted(id for id, known in self._schedulers.items() if not known.is_draining)
        owned: dict[str, list[LiveQueue]] = {id: [] for id in self._schedulers}
        orphans: list[LiveQueue] = []
        actions: list[Action] = []
        for queue in sorted(self._queues):
            state = self._queues[queue]
            if state.owner in owned:
                owned[state.owner].append(queue)
                if state.owner == self._self and queue not in self._held:
                    self._start(now_s, state, Take(queue), actions)  # it was given to this one
                elif self._is_doubtful(now_s, state, queue):
                    self._start(now_s, state, Look(queue), actions, LOOK_AFTER_S)
            elif not state.owner or state.owner in self._gone:
                orphans.append(queue)
        if takers:
            self._divide(now_s, takers, owned, orphans, actions)
        return actions

    def _is_doubtful(self, now_s: float, state: _Queue, queue: LiveQueue) -> bool:
        """Whether its owner has not said for long that it is: it is about to take it, or handed it on and nobody heard."""
        if state.owner == self._self or now_s - state.since_s < LOOK_AFTER_S:
            return False
        return queue not in self._schedulers[state.owner].queues

    def _give_up_on(self, now_s: float) -> None:
        for owner, since_s in list(self._unheard.items()):
            if now_s - since_s >= SILENCE_S:
                del self._unheard[owner]
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
            self._adopt(now_s, self._queues[queue], queue, next_taker(), takers, actions)
        givers = [(id, len(queues)) for id, queues in sorted(owned.items()) if id not in missing]
        givers += [(id, -count) for id, count in sorted(missing.items()) if count < 0]
        for id, surplus in givers:
            heirs = [next_taker() for _ in range(surplus)]
            if id == self._self:
                self._give(now_s, owned[id], heirs, actions)

    def _adopt(
        self,
        now_s: float,
        state: _Queue,
        queue: LiveQueue,
        taker: str,
        takers: list[str],
        actions: list[Action],
    ) -> None:
        waited_s = now_s - state.since_s
        if taker == self._self:
            self._start(now_s, state, Take(queue), actions)
        elif self._self in takers and waited_s >= _STEP_IN_S + _STEP_IN_BY_RANK_S * takers.index(self._self):
            self._start(now_s, state, Take(queue), actions, LOOK_AFTER_S)
        elif waited_s >= LOOK_AFTER_S:
            self._start(now_s, state, Look(queue), actions, LOOK_AFTER_S)

    def _give(self, now_s: float, queues: list[LiveQueue], heirs: list[str], actions: list[Action]) -> None:
        under_way = [self._queues[queue].action for queue in queues]
        given = Counter(action.to for action in under_way if isinstance(action, HandOver))
        is_draining = self._schedulers[self._self].is_draining
        free = [queue for queue in reversed(queues) if queue in self._held and self._queues[queue].action is None]
        for heir in heirs:
            if given[heir] > 0:
                given[heir] -= 1
                continue
            if not is_draining and now_s - self._schedulers[heir].since_s < SETTLE_S:
                continue
            queue = next((queue for queue in free if self._is_movable(queue)), None)
            if queue is None:
                return
            free.remove(queue)
            self._start(now_s, self._queues[queue], HandOver(queue, heir), actions)

    def _start(self, now_s: float, state: _Queue, action: Action, actions: list[Action], pause_s: float = 0.0) -> None:
        if state.action is None and now_s >= state.try_at_s + pause_s:
            state.action = action
            actions.append(action)

    def _state(self, now_s: float, queue: LiveQueue) -> _Queue:
        state = self._queues.get(queue)
        if state is None:
            state = self._queues[queue] = _Queue(now_s)
        return state

    def _owned_by(self, now_s: float, state: _Queue, owner: str) -> None:
        if state.owner != owner:
            state.owner = owner
            state.since_s = now_s
