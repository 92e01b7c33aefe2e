"""Ownership of queues in a simulated cluster, and how it changes when a scheduler joins or dies.

In `PolicyOwners` each scheduler decides by `weir.scheduler.ownership.policy`, as `weir scheduler` does, with a simulated
record store and simulated messages. `EvenSpread` spreads queues evenly with global knowledge, as a reference.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

TICK_US = 250_000
"""How often schedulers look, and are probed: a death is noticed within this time."""

_SETTLING_TICKS = 40


class Move(NamedTuple):
    """A queue has another owner from now on; `is_orderly`: the one before handed it over, when what ran had ended."""

    queue: str
    owner: str
    is_orderly: bool


class Owners(Protocol):
    """Times are microseconds."""

    owner_of: dict[str, str]

    def joined(self, now_us: int, scheduler: str) -> None:
        """A scheduler has come."""

    def lost(self, now_us: int, scheduler: str) -> None:
        """One has died; what it owned has no owner until a `tick` says otherwise."""

    def tick(self, now_us: int) -> list[Move]:
        """Called each `TICK_US`: what has moved."""


class EvenSpread:
    """Queues in turn to schedulers; a dead one's go to those with fewest, and a new one takes from those with most."""

    def __init__(self, queues: Sequence[str], schedulers: Sequence[str]) -> None:
        self.owner_of = {queue: schedulers[number % len(schedulers)] for number, queue in enumerate(sorted(queues))}
        self._schedulers = list(schedulers)

    def joined(self, now_us: int, scheduler: str) -> None:
        """See `Owners`."""
        self._schedulers.append(scheduler)

    def lost(self, now_us: int, scheduler: str) -> None:
        """See `Owners`."""
        self._schedulers.remove(scheduler)
        for queue, owner in self.owner_of.items():
            if owner == scheduler:
                self.owner_of[queue] = ""

    def tick(self, now_us: int) -> list[Move]:
        """See `Owners`."""
        counts = Counter(dict.fromkeys(self._schedulers, 0))
        counts.update(owner for owner in self.owner_of.values() if owner)
        moves = []
        for queue, owner in sorted(self.owner_of.items()):
            least = min(self._schedulers, key=lambda scheduler: (counts[scheduler], scheduler))
            if not owner or counts[owner] > counts[least] + 1:
                counts[owner] -= 1 if owner else 0
                counts[least] += 1
                self.owner_of[queue] = least
                moves.append(Move(queue, least, bool(owner)))
        return moves


class PolicyOwners:
    """Schedulers that decide by the policy. Messages and writes take no time; a death is noticed at the next tick."""

    def __init__(self, queues: Sequence[str], schedulers: Sequence[str]) -> None:
        from weir.bus.naming.live_queues import LiveQueue

        self._policy: Any = importlib.import_module("weir.scheduler.ownership.policy")
        self._queues = [LiveQueue(queue) for queue in sorted(queues)]
        self._records: dict[Any, tuple[str, int]] = {}
        self._epoch = 0
        self._dead: list[str] = []
        self._seats: dict[str, Any] = {}
        self.owner_of = dict.fromkeys(queues, "")
        # They settle before anything comes.
        for scheduler in schedulers:
            self.joined(-_SETTLING_TICKS * TICK_US, scheduler)
        for number in range(-_SETTLING_TICKS, 0):
            self.tick(number * TICK_US)

    def joined(self, now_us: int, scheduler: str) -> None:
        """See `Owners`."""
        seat = self._seats[scheduler] = self._policy.OwnershipPolicy(scheduler)
        seat.add_queues(now_us / 1e6, self._queues)
        for queue, (owner, epoch) in self._records.items():
            seat.owner_reported(now_us / 1e6, queue, owner, epoch)

    def lost(self, now_us: int, scheduler: str) -> None:
        """See `Owners`."""
        del self._seats[scheduler]
        self._dead.append(scheduler)
        for queue, owner in self.owner_of.items():
            if owner == scheduler:
                self.owner_of[queue] = ""

    def tick(self, now_us: int) -> list[Move]:
        """See `Owners`."""
        now_s = now_us / 1e6
        dead, self._dead = self._dead, []
        reply = {id: {queue: self._records[queue][1] for queue in seat.held} for id, seat in self._seats.items()}
        for id, seat in self._seats.items():
            for gone in dead:
                seat.scheduler_gone(gone)
            for other, queues in reply.items():
                if other != id:
                    seat.scheduler_seen(now_s, other, queues)
        moves: list[Move] = []
        # Twice: what one hands over the other takes at once.
        for _ in range(2):
            for id, seat in self._seats.items():
                for action in seat.tick(now_s):
                    self._carry_out(now_s, id, seat, action, moves)
        return moves

    def _carry_out(self, now_s: float, id: str, seat: Any, action: Any, moves: list[Move]) -> None:
        queue = action.queue
        owner, epoch = self._records.get(queue, ("", 0))
        if isinstance(action, self._policy.HandOver):
            self._epoch += 1
            self._records[queue] = action.to, self._epoch
            seat.released(queue)
            seat.owner_reported(now_s, queue, action.to, self._epoch)
            if action.to in self._seats:
                self._seats[action.to].owner_reported(now_s, queue, action.to, self._epoch)
        elif isinstance(action, self._policy.ReadOwner) or (owner in self._seats and owner != id):
            seat.owner_reported(now_s, queue, owner, epoch)
        else:
            self._epoch += 1
            self._records[queue] = id, self._epoch
            seat.acquired(now_s, queue, self._epoch)
            before, self.owner_of[queue.model] = self.owner_of[queue.model], id
            moves.append(Move(queue.model, id, bool(before)))


def owners_of(name: str, queues: Sequence[str], schedulers: Sequence[str]) -> Owners:
    """`policy`, `even`, or `auto`: the policy where there is one."""
    has_policy = importlib.util.find_spec("weir.scheduler.ownership.policy") is not None
    if name == "policy" or (name == "auto" and has_policy):
        return PolicyOwners(queues, schedulers)
    return EvenSpread(queues, schedulers)
