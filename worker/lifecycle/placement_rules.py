"""The placement plan: which workers serve which models that declare resource needs, and what each worker does next.

Pure functions without clock and IO. Every worker computes the plan from the same facts in the registry, so all agree
without further messages. Each model ranks the workers by rendezvous hashing: a worker that joins takes models over from the
others, a worker that leaves is replaced by the next in each rank, and no other model moves as long as there is room.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache

from weir.schemas.config.parameters import ModelNeeds, ResourceAmounts

Plan = dict[str, frozenset[str]]
"""The workers that should serve each model; empty for a model that fits on no worker."""


class Holding(Enum):
    """The state of a model on a worker. ABSENT and FAILED occupy no resources; FAILED is not retried automatically."""

    ABSENT = auto()
    LOADING = auto()
    READY = auto()
    LEAVING = auto()
    FAILED = auto()


class PlacementStep(Enum):
    """What a worker does about a model: KEEP its state, LOAD, UNLOAD, WAIT for room; it belongs ELSEWHERE, or NOWHERE."""

    KEEP = auto()
    LOAD = auto()
    UNLOAD = auto()
    WAIT = auto()
    ELSEWHERE = auto()
    NOWHERE = auto()


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One worker: its capacity (memory 0: unknown), the models that it offers to load, and their states.

    A worker that is `leaving` gets no models, and keeps the ones it has until another worker serves them.
    """

    worker: str
    capacity: ResourceAmounts
    offers: Mapping[str, ModelNeeds]
    holds: Mapping[str, Holding] = field(default_factory=dict)
    leaving: bool = False

    def holding(self, model: str) -> Holding:
        """The state of the model on this worker."""
        return self.holds.get(model, Holding.ABSENT)


def plan(workers: Iterable[WorkerFacts]) -> Plan:
    """The plan for all offered models. It does not depend on what the workers serve now."""
    staying = sorted((one for one in workers if not one.leaving), key=lambda one: one.worker)
    free = {one.worker: _FreeResources(one.capacity) for one in staying}
    offered: dict[str, list[WorkerFacts]] = {}
    for one in staying:
        for model in one.offers:
            offered.setdefault(model, []).append(one)
    able = {
        model: [one for one in offering if _FreeResources(one.capacity).fits(one.offers[model].takes)]
        for model, offering in offered.items()
    }
    # Models with the fewest possible workers are placed first, then large ones: small ones find room more easily.
    order = sorted(offered, key=lambda model: (len(able[model]), -_largest(model, able[model]), model))
    chosen: dict[str, list[str]] = {model: [] for model in offered}
    ranked = {model: sorted(able[model], key=lambda one: _score(model, one.worker)) for model in order}
    # Every model gets one worker before any gets a second.
    turn = 0
    growing = order
    while growing:
        turn += 1
        growing = [model for model in growing if _place(model, ranked[model], chosen[model], free, turn)]
    return {model: frozenset(names) for model, names in chosen.items()} | {
        model: frozenset() for one in workers_leaving(workers) for model in one.offers if model not in chosen
    }


def workers_leaving(workers: Iterable[WorkerFacts]) -> list[WorkerFacts]:
    """The workers that are leaving."""
    return [one for one in workers if one.leaving]


def _place(
    model: str, ranked: Sequence[WorkerFacts], chosen: list[str], free: Mapping[str, _FreeResources], turn: int
) -> bool:
    """Gives the model one more worker; returns whether it may get another one after that."""
    limits = [one.offers[model].workers for one in ranked]
    limit = 0 if not limits or 0 in limits else max(limits)
    for one in ranked:
        takes = one.offers[model].takes
        if one.worker not in chosen and free[one.worker].fits(takes):
            free[one.worker].occupy(takes)
            chosen.append(one.worker)
            return not limit or turn < limit
    return False


def steps(me: str, workers: Sequence[WorkerFacts], planned: Plan) -> dict[str, PlacementStep]:
    """What worker `me` should do now about each model that it offers or holds.

    A model is unloaded only if another of its planned workers has it READY, so it is READY on some worker at all times. It
    is loaded only if there is room for it beside everything that is still loaded. Workers that would have to swap models
    without room on either side keep them; but a model that no worker has gets room in any case.
    """
    by_name = {one.worker: one for one in workers}
    mine = by_name[me]
    free = _free_on(mine)
    decided: dict[str, PlacementStep] = {}
    waiting: list[str] = []
    for model in sorted({*mine.offers, *mine.holds}, key=lambda model: (_is_somewhere(model, workers), model)):
        holders = planned.get(model, frozenset())
        holding = mine.holding(model)
        if me in holders:
            if holding is not Holding.ABSENT:
                decided[model] = PlacementStep.KEEP
            elif free.fits(mine.offers[model].takes):
                free.occupy(mine.offers[model].takes)
                decided[model] = PlacementStep.LOAD
            else:
                decided[model] = PlacementStep.WAIT
                waiting.append(model)
        elif holding is Holding.READY:
            is_ready = any(name in by_name and by_name[name].holding(model) is Holding.READY for name in holders)
            decided[model] = PlacementStep.UNLOAD if is_ready else PlacementStep.KEEP
        elif holding in (Holding.LOADING, Holding.LEAVING):
            decided[model] = PlacementStep.KEEP
        else:
            decided[model] = PlacementStep.ELSEWHERE if holders else PlacementStep.NOWHERE
    if any(not _is_somewhere(model, workers) for model in waiting) and PlacementStep.UNLOAD not in decided.values():
        stuck = next((model for model in sorted(mine.holds) if _is_stuck(model, me, by_name, planned)), None)
        if stuck is not None and Holding.LEAVING not in mine.holds.values():
            decided[stuck] = PlacementStep.UNLOAD
    return decided


def shortage(needs: ModelNeeds, workers: Iterable[WorkerFacts]) -> str:
    """Why a model with these needs fits on no worker: its needs and the largest capacities."""
    takes = needs.takes
    capacities = [one.capacity for one in workers if not one.leaving]
    parts: list[str] = []
    if takes.memory_bytes:
        counted = [capacity.memory_bytes for capacity in capacities if capacity.memory_bytes]
        most = f"{max(counted)} in all" if len(counted) == len(capacities) and counted else "an unknown amount"
        parts.append(f"{takes.memory_bytes} bytes of memory, of which the largest worker has {most}")
    for name, count in sorted(takes.resources.items()):
        available = max((capacity.resources.get(name, 0) for capacity in capacities), default=0)
        parts.append(f"{count} of '{name}', of which a worker has {available} at most")
    return f"no worker has room for the model: it needs {'; '.join(parts) or 'a worker that has it'}"


class _FreeResources:
    """The free resources of a worker."""

    def __init__(self, capacity: ResourceAmounts) -> None:
        self._is_counted = capacity.memory_bytes > 0
        self._memory_bytes = capacity.memory_bytes
        self._resources = dict(capacity.resources)

    def fits(self, takes: ResourceAmounts) -> bool:
        if self._is_counted and takes.memory_bytes > self._memory_bytes:
            return False
        return all(self._resources.get(name, 0) >= count for name, count in takes.resources.items())

    def occupy(self, takes: ResourceAmounts) -> None:
        self._memory_bytes -= takes.memory_bytes
        for name, count in takes.resources.items():
            self._resources[name] = self._resources.get(name, 0) - count


def _free_on(one: WorkerFacts) -> _FreeResources:
    """The free resources beside all models that are loading, loaded or unloading."""
    free = _FreeResources(one.capacity)
    for model, holding in one.holds.items():
        if holding in (Holding.LOADING, Holding.READY, Holding.LEAVING) and model in one.offers:
            free.occupy(one.offers[model].takes)
    return free


def _is_somewhere(model: str, workers: Iterable[WorkerFacts]) -> bool:
    return any(one.holding(model) in (Holding.READY, Holding.LOADING) for one in workers)


def _is_stuck(model: str, me: str, by_name: Mapping[str, WorkerFacts], planned: Plan) -> bool:
    """Whether `me` has a model that belongs on other workers, none of which can start to load it."""
    holders = planned.get(model, frozenset())
    if by_name[me].holding(model) is not Holding.READY or me in holders:
        return False
    for name in holders:
        other = by_name[name]
        if other.holding(model) is Holding.LOADING:
            return False
        if other.holding(model) is Holding.ABSENT and _free_on(other).fits(other.offers[model].takes):
            return False
    return True


def _largest(model: str, able: Iterable[WorkerFacts]) -> int:
    return max((one.offers[model].takes.memory_bytes for one in able), default=0)


@lru_cache(maxsize=1 << 16)
def _score(model: str, worker: str) -> bytes:
    return hashlib.blake2b(f"{model}\0{worker}".encode(), digest_size=16).digest()
