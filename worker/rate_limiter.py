"""`RateLimiter`: which instances of all models of this worker may execute, when they share resources that are scarce.

A state machine without clock and threads: instances ask, are granted their turn, and give it back. Source: Triton's rate
limiter (`--rate-limit=execution_count`). An instance takes its resources while it executes. Who waits is granted in the
order of how often he had a turn, times his priority: of two that always want one, that of priority 2 gets half as many.

Otherwise than in Triton, who waits holds up only those that need a resource of his own, not everybody; and a model that
is loaded late begins level with the others, instead of having all turns until it has caught up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, NamedTuple, TypeVar

from schemas.errors import invalid
from schemas.execution_config import RateLimiter as RateLimiterConfig

GLOBAL = -2
"""In the place of a device: the resource is one for all of them."""

EACH_DEVICE = -1
"""In the place of a device, of an explicit amount: each of them has it."""

M = TypeVar("M", bound=Hashable)
"""Whatever stands for an instance."""

Resource = tuple[str, int]
"""A resource's name, and the device on which it is (or `GLOBAL`)."""


class Needs(NamedTuple):
    """What an instance takes while it executes, and how many turns of another of priority 1 one of its turns counts."""

    resources: Mapping[Resource, int]
    priority: int = 1


def needs_of(config: RateLimiterConfig | None, device: int) -> Needs:
    """What an instance on `device` needs by its group's configuration, as Triton reads it: priority 0 counts as 1."""
    if config is None:
        return Needs({})
    resources = {(row.name, GLOBAL if row.global_ else device): row.count for row in config.resources}
    return Needs(resources, max(1, config.priority))


def explicit_amounts(texts: Iterable[str]) -> dict[Resource, int]:
    """The amounts in options of the form `<name>:<count>[:<device>]`, which are well formed."""
    amounts: dict[Resource, int] = {}
    for text in texts:
        name, count, *device = text.split(":")
        amounts[name, int(device[0]) if device else EACH_DEVICE] = int(count)
    return amounts


class _State(Enum):
    IDLE = auto()
    WAITING = auto()
    EXECUTING = auto()


@dataclass(slots=True)
class _Member:
    needs: Needs
    used: int
    """Turns it had, times its priority."""
    state: _State = _State.IDLE
    asked: int = 0
    holds: Mapping[Resource, int] = field(default_factory=dict)


class RateLimiter(Generic[M]):
    """See the module. Each call that may let instances execute returns those, in order.

    There is as much of a resource as `explicit` says, if that says anything at all, else as much as the most needy
    instance needs.
    """

    def __init__(self, explicit: Mapping[Resource, int] | None = None) -> None:
        self._explicit = explicit or {}
        self._members: dict[M, _Member] = {}
        self._amounts: dict[Resource, int] = {}
        self._taken: Counter[Resource] = Counter()
        self._asked = 0

    @property
    def amounts(self) -> Mapping[Resource, int]:
        """How much there is of each resource."""
        return self._amounts

    @property
    def taken(self) -> Mapping[Resource, int]:
        """How much of each resource those that execute have taken."""
        return self._taken

    def add(self, instance: M, needs: Needs) -> None:
        """`instance` will ask from now on. Raises WeirError (INVALID_ARG, in Triton's words) when it never could run."""
        all_needs = [member.needs for member in self._members.values()]
        self._amounts = self._amounts_for([*all_needs, needs])
        used = min((member.used for member in self._members.values()), default=0)
        self._members[instance] = _Member(needs, used)

    def remove(self, instance: M) -> list[M]:
        """`instance` is gone, and with it what it held or asked for."""
        member = self._members.pop(instance)
        self._taken.subtract(member.holds)
        self._amounts = self._amounts_for(other.needs for other in self._members.values())
        return self._granted()

    def ask(self, instance: M) -> list[M]:
        """`instance`, which neither waits nor executes, wants to."""
        self._wait(self._members[instance])
        return self._granted()

    def give_back(self, instance: M, wants_more: bool) -> list[M]:
        """`instance` has executed. If it `wants_more` at once, it takes part in who is next."""
        member = self._members[instance]
        self._taken.subtract(member.holds)
        member.holds = {}
        member.state = _State.IDLE
        if wants_more:
            self._wait(member)
        return self._granted()

    def _wait(self, member: _Member) -> None:
        self._asked += 1
        member.asked = self._asked
        member.state = _State.WAITING

    def _granted(self) -> list[M]:
        waiting = [(name, member) for name, member in self._members.items() if member.state is _State.WAITING]
        waiting.sort(key=lambda entry: (entry[1].used, entry[1].asked))
        granted: list[M] = []
        # What somebody waits for is given to nobody behind him: else those that need little would keep it from him.
        awaited: set[Resource] = set()
        for name, member in waiting:
            needed = {resource: count for resource, count in member.needs.resources.items() if count}
            if any(
                resource in awaited or self._taken[resource] + count > self._amounts[resource]
                for resource, count in needed.items()
            ):
                awaited |= needed.keys()
                continue
            self._taken.update(needed)
            member.holds = needed
            member.used += member.needs.priority
            member.state = _State.EXECUTING
            granted.append(name)
        return granted

    def _amounts_for(self, all_needs: Iterable[Needs]) -> dict[Resource, int]:
        most: dict[Resource, int] = {}
        for needs in all_needs:
            for resource, count in needs.resources.items():
                most[resource] = max(count, most.get(resource, 0))
        amounts = {resource: self._amount(resource, count) for resource, count in most.items()}
        for name, device in most:
            if device != GLOBAL and (name, GLOBAL) in most:
                raise invalid(
                    f'Resource "{name}" is present as both global and device-specific resource in the model configuration.'
                )
        return amounts

    def _amount(self, resource: Resource, needed: int) -> int:
        if not self._explicit:
            return needed
        name, device = resource
        # Whatever device a global resource was given for, it counts.
        told = [
            count
            for (other, place), count in self._explicit.items()
            if other == name and (device == GLOBAL or place in (device, EACH_DEVICE))
        ]
        amount = max(told, default=0)
        if amount < needed:
            raise invalid(
                f'Resource count for "{name}" is limited to {amount} which will prevent scheduling of one or more model '
                f"instances, the minimum required count is {needed}"
            )
        return amount
