"""Which workers hold which models, and what each of them is to do about it now: pure rules, the same for all.

Every worker computes this from the same facts, which all of them tell in the registry, and so they agree without asking
anybody. Rendezvous hashing says which workers a model likes best: so a worker that comes takes models from the others, one
that goes leaves its own to them, and nothing else moves as long as there is room. No clock, no IO.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache

from schemas.placement import Amounts, ModelNeeds

Plan = dict[str, frozenset[str]]
"""The workers that are to hold each model; empty where it fits nowhere."""


class Holding(Enum):
    """How a worker stands with a model. ABSENT and FAILED take up nothing; FAILED is not tried again by itself."""

    ABSENT = auto()
    LOADING = auto()
    READY = auto()
    LEAVING = auto()
    FAILED = auto()


class Step(Enum):
    """What a worker does about a model. KEEP it as it is; WAIT for room; it belongs ELSEWHERE, or fits NOWHERE."""

    KEEP = auto()
    LOAD = auto()
    UNLOAD = auto()
    WAIT = auto()
    ELSEWHERE = auto()
    NOWHERE = auto()


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One worker: what it has for models (memory 0: nobody has counted), what it could hold, and how it stands with that.

    One that is `leaving` is given nothing, and keeps what it has until somebody else has it.
    """

    worker: str
    capacity: Amounts
    offers: Mapping[str, ModelNeeds]
    holds: Mapping[str, Holding] = field(default_factory=dict)
    leaving: bool = False

    def holding(self, model: str) -> Holding:
        """How it stands with the model."""
        return self.holds.get(model, Holding.ABSENT)


def plan(workers: Iterable[WorkerFacts]) -> Plan:
    """Who is to hold each of the models that are offered. What workers hold now makes no difference."""
    staying = sorted((one for one in workers if not one.leaving), key=lambda one: one.worker)
    rooms = {one.worker: _Room(one.capacity) for one in staying}
    offered: dict[str, list[WorkerFacts]] = {}
    for one in staying:
        for model in one.offers:
            offered.setdefault(model, []).append(one)
    able = {
        model: [one for one in offering if _Room(one.capacity).fits(one.offers[model].takes)]
        for model, offering in offered.items()
    }
    # Who has the least choice chooses first, then who is large: what comes after them finds room more easily.
    order = sorted(offered, key=lambda model: (len(able[model]), -_largest(model, able[model]), model))
    chosen: dict[str, list[str]] = {model: [] for model in offered}
    ranked = {model: sorted(able[model], key=lambda one: _score(model, one.worker)) for model in order}
    # Every model is given one worker before any is given a second.
    turn = 0
    growing = order
    while growing:
        turn += 1
        growing = [model for model in growing if _place(model, ranked[model], chosen[model], rooms, turn)]
    return {model: frozenset(names) for model, names in chosen.items()} | {
        model: frozenset() for one in workers_leaving(workers) for model in one.offers if model not in chosen
    }


def workers_leaving(workers: Iterable[WorkerFacts]) -> list[WorkerFacts]:
    """Those that are leaving."""
    return [one for one in workers if one.leaving]


def _place(model: str, ranked: Sequence[WorkerFacts], chosen: list[str], rooms: Mapping[str, _Room], turn: int) -> bool:
    """Gives the model one more worker; returns whether it may get another one after that."""
    limits = [one.offers[model].workers for one in ranked]
    limit = 0 if not limits or 0 in limits else max(limits)
    for one in ranked:
        takes = one.offers[model].takes
        if one.worker not in chosen and rooms[one.worker].fits(takes):
            rooms[one.worker].take(takes)
            chosen.append(one.worker)
            return not limit or turn < limit
    return False


def steps(me: str, workers: Sequence[WorkerFacts], planned: Plan) -> dict[str, Step]:
    """What `me` is to do now about each model that it offers or holds.

    A model is given up only where another of its workers has it READY, so it is READY somewhere at every moment. It is
    loaded only when there is room for it beside all that is still there. Where workers would have to swap models and
    nobody has room to begin, they stay as they are; room for a model that nobody has is made all the same.
    """
    by_name = {one.worker: one for one in workers}
    mine = by_name[me]
    room = _room_of(mine)
    decided: dict[str, Step] = {}
    waiting: list[str] = []
    for model in sorted({*mine.offers, *mine.holds}, key=lambda model: (_is_somewhere(model, workers), model)):
        holders = planned.get(model, frozenset())
        holding = mine.holding(model)
        if me in holders:
            if holding is not Holding.ABSENT:
                decided[model] = Step.KEEP
            elif room.fits(mine.offers[model].takes):
                room.take(mine.offers[model].takes)
                decided[model] = Step.LOAD
            else:
                decided[model] = Step.WAIT
                waiting.append(model)
        elif holding is Holding.READY:
            is_ready = any(name in by_name and by_name[name].holding(model) is Holding.READY for name in holders)
            decided[model] = Step.UNLOAD if is_ready else Step.KEEP
        elif holding in (Holding.LOADING, Holding.LEAVING):
            decided[model] = Step.KEEP
        else:
            decided[model] = Step.ELSEWHERE if holders else Step.NOWHERE
    if any(not _is_somewhere(model, workers) for model in waiting) and Step.UNLOAD not in decided.values():
        stuck = next((model for model in sorted(mine.holds) if _is_stuck(model, me, by_name, planned)), None)
        if stuck is not None and Holding.LEAVING not in mine.holds.values():
            decided[stuck] = Step.UNLOAD
    return decided


def shortage(needs: ModelNeeds, workers: Iterable[WorkerFacts]) -> str:
    """Why a model with these needs fits nowhere: what it takes, and what there is."""
    takes = needs.takes
    capacities = [one.capacity for one in workers if not one.leaving]
    parts: list[str] = []
    if takes.memory_bytes:
        counted = [capacity.memory_bytes for capacity in capacities if capacity.memory_bytes]
        most = f"{max(counted)} in all" if len(counted) == len(capacities) and counted else "an uncounted amount"
        parts.append(f"{takes.memory_bytes} bytes of memory, of which the largest worker has {most}")
    for name, count in sorted(takes.resources.items()):
        available = max((capacity.resources.get(name, 0) for capacity in capacities), default=0)
        parts.append(f"{count} of '{name}', of which a worker has {available} at most")
    return f"no worker has room for the model: it needs {'; '.join(parts) or 'a worker that has it'}"


class _Room:
    """What is left on a worker."""

    def __init__(self, capacity: Amounts) -> None:
        self._is_counted = capacity.memory_bytes > 0
        self._memory_bytes = capacity.memory_bytes
        self._resources = dict(capacity.resources)

    def fits(self, takes: Amounts) -> bool:
        if self._is_counted and takes.memory_bytes > self._memory_bytes:
            return False
        return all(self._resources.get(name, 0) >= count for name, count in takes.resources.items())

    def take(self, takes: Amounts) -> None:
        self._memory_bytes -= takes.memory_bytes
        for name, count in takes.resources.items():
            self._resources[name] = self._resources.get(name, 0) - count


def _room_of(one: WorkerFacts) -> _Room:
    """What is left beside all that is there, or is on its way in or out."""
    room = _Room(one.capacity)
    for model, holding in one.holds.items():
        if holding in (Holding.LOADING, Holding.READY, Holding.LEAVING) and model in one.offers:
            room.take(one.offers[model].takes)
    return room


def _is_somewhere(model: str, workers: Iterable[WorkerFacts]) -> bool:
    return any(one.holding(model) in (Holding.READY, Holding.LOADING) for one in workers)


def _is_stuck(model: str, me: str, by_name: Mapping[str, WorkerFacts], planned: Plan) -> bool:
    """Whether this worker has a model which is not to be its own, and none of those who are to have it can begin to."""
    holders = planned.get(model, frozenset())
    if by_name[me].holding(model) is not Holding.READY or me in holders:
        return False
    for name in holders:
        other = by_name[name]
        if other.holding(model) is Holding.LOADING:
            return False
        if other.holding(model) is Holding.ABSENT and _room_of(other).fits(other.offers[model].takes):
            return False
    return True


def _largest(model: str, able: Iterable[WorkerFacts]) -> int:
    return max((one.offers[model].takes.memory_bytes for one in able), default=0)


@lru_cache(maxsize=1 << 16)
def _score(model: str, worker: str) -> bytes:
    return hashlib.blake2b(f"{model}\0{worker}".encode(), digest_size=16).digest()
