"""`RateLimiter`: which instances of a worker's models may execute when they share scarce resources.

Source: Triton's rate limiter (`--rate-limit=execution_count`). An instance holds its resources while it executes. Waiting
instances are granted in the order of the number of their executions times their priority: of two instances that always
wait, the one of priority 2 executes half as often. Each begins with `LOADING_EXECUTIONS`, so instances of higher priority
(a smaller number) are ahead from the start.

Two differences from Triton: a waiting instance blocks only instances that need one of its resources, not all; and a model
that is loaded late starts level with the others, instead of executing alone until it has caught up.

`RateLimiter` is a state machine without clock and threads. `RateLimiterPermits` is its interface for instances' threads.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, NamedTuple, TypeVar

from weir.schemas.config.model_config import ModelRateLimiter as RateLimiterConfig
from weir.schemas.core.errors import invalid

logger = logging.getLogger("weir.worker")

GLOBAL = -2
"""The device of a resource that all devices share."""

EACH_DEVICE = -1
"""The device of an explicit amount that each device has."""

LOADING_EXECUTIONS = 2
"""Executions with which an instance begins: Triton counts its initialization and its warm-up."""

M = TypeVar("M", bound=Hashable)
"""The type that identifies an instance."""

Resource = tuple[str, int]
"""A resource's name and its device, or `GLOBAL`."""


class Needs(NamedTuple):
    """The resources that an instance holds while it executes, and its priority: an execution counts `priority` times."""

    resources: Mapping[Resource, int]
    priority: int = 1


def needs_of(config: RateLimiterConfig | None, device: int) -> Needs:
    """The needs of an instance on `device` by its group's configuration; as in Triton, priority 0 counts as 1."""
    if config is None:
        return Needs({})
    resources = {(row.name, GLOBAL if row.global_ else device): row.count for row in config.resources}
    return Needs(resources, max(1, config.priority))


def explicit_amounts(texts: Iterable[str]) -> dict[Resource, int]:
    """The amounts in valid options of the form `<name>:<count>[:<device>]`."""
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
    """The number of its executions times its priority, without those of its loading."""
    state: _State = _State.IDLE
    requested: int = 0
    """The number of its request among all requests, which decides between equal members."""
    holds: Mapping[Resource, int] = field(default_factory=dict)

    @property
    def rank(self) -> tuple[int, int]:
        """What decides between waiting members: the smallest is granted first."""
        return self.used + LOADING_EXECUTIONS * self.needs.priority, self.requested


class RateLimiter(Generic[M]):
    """Grants executions to instances. Each method that may grant some returns the granted instances, in order.

    The amounts of resources are the `explicit` ones if any are given; otherwise there is as much of each resource as the
    instance with the largest need for it requires.
    """

    def __init__(self, explicit: Mapping[Resource, int] | None = None) -> None:
        self._explicit = explicit or {}
        self._members: dict[M, _Member] = {}
        self._amounts: dict[Resource, int] = {}
        self._held: Counter[Resource] = Counter()
        self._requests = 0

    @property
    def amounts(self) -> Mapping[Resource, int]:
        """The amount of each resource."""
        return self._amounts

    @property
    def held(self) -> Mapping[Resource, int]:
        """How much of each resource executing instances hold."""
        return self._held

    def add(self, instance: M, needs: Needs) -> None:
        """Adds an instance. Raises WeirError (INVALID_ARG, in Triton's words) if it could never execute."""
        all_needs = [member.needs for member in self._members.values()]
        self._amounts = self._amounts_for([*all_needs, needs])
        used = min((member.used for member in self._members.values()), default=0)
        self._members[instance] = _Member(needs, used)

    def remove(self, instance: M) -> list[M]:
        """Removes an instance, with its resources and its request."""
        member = self._members.pop(instance)
        self._held.subtract(member.holds)
        self._amounts = self._amounts_for(other.needs for other in self._members.values())
        return self._granted()

    def request(self, instance: M) -> list[M]:
        """Requests an execution for an instance that neither waits nor executes."""
        self._wait(self._members[instance])
        return self._granted()

    def release(self, instance: M, wants_more: bool) -> list[M]:
        """Releases the resources of an instance that has executed. With `wants_more` it requests the next execution."""
        member = self._members[instance]
        self._held.subtract(member.holds)
        member.holds = {}
        member.state = _State.IDLE
        if wants_more:
            self._wait(member)
        return self._granted()

    def _wait(self, member: _Member) -> None:
        self._requests += 1
        member.requested = self._requests
        member.state = _State.WAITING

    def _granted(self) -> list[M]:
        waiting = [(name, member) for name, member in self._members.items() if member.state is _State.WAITING]
        waiting.sort(key=lambda entry: entry[1].rank)
        granted: list[M] = []
        # A resource that a waiting instance needs is not granted to instances behind it: otherwise instances with small
        # needs could starve it.
        awaited: set[Resource] = set()
        for name, member in waiting:
            needed = {resource: count for resource, count in member.needs.resources.items() if count}
            if any(
                resource in awaited or self._held[resource] + count > self._amounts[resource]
                for resource, count in needed.items()
            ):
                awaited |= needed.keys()
                continue
            self._held.update(needed)
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
        # An amount for any device counts for a global resource.
        counts = [
            count
            for (other, place), count in self._explicit.items()
            if other == name and (device == GLOBAL or place in (device, EACH_DEVICE))
        ]
        amount = max(counts, default=0)
        if amount < needed:
            raise invalid(
                f'Resource count for "{name}" is limited to {amount} which will prevent scheduling of one or more model '
                f"instances, the minimum required count is {needed}"
            )
        return amount


def rate_limiter_permits(mode: str, resources: Sequence[str]) -> RateLimiterPermits | None:
    """The permits of a worker by its options `--rate-limit` and `--rate-limit-resource`; None if the limiter is off."""
    return None if mode == "off" else RateLimiterPermits(RateLimiter(explicit_amounts(resources)))


class RateLimiterPermits:
    """The permits of all instances of a worker, granted by one `RateLimiter`; thread-safe."""

    def __init__(self, limiter: RateLimiter[InstancePermit]) -> None:
        self._limiter = limiter
        self._lock = threading.Lock()

    def join(self, needs: Needs) -> InstancePermit | None:
        """The permit of a new instance; None for an instance that needs no resources.

        Raises WeirError if the instance could never execute.
        """
        if not needs.resources:
            return None
        permit = InstancePermit(self._limiter, self._lock)
        with self._lock:
            before = dict(self._limiter.amounts)
            self._limiter.add(permit, needs)
            _log_changes(before, self._limiter.amounts)
        return permit


class InstancePermit:
    """The permit of one instance, which its thread acquires and releases for each batch."""

    def __init__(self, limiter: RateLimiter[InstancePermit], lock: threading.Lock) -> None:
        self._limiter = limiter
        self._lock = lock
        self._has_requested = False
        self._granted = threading.Event()

    def acquire(self) -> None:
        """Returns when the instance may execute."""
        if not self._has_requested:
            with self._lock:
                _grant(self._limiter.request(self))
        self._granted.wait()
        self._granted.clear()
        self._has_requested = False

    def release(self, wants_more: bool) -> None:
        """Ends an execution; with `wants_more` the next call of `acquire` follows at once."""
        self._has_requested = wants_more
        with self._lock:
            _grant(self._limiter.release(self, wants_more))

    def leave(self) -> None:
        """Removes the instance from the limiter."""
        with self._lock:
            before = dict(self._limiter.amounts)
            _grant(self._limiter.remove(self))
            _log_changes(before, self._limiter.amounts)


def _grant(permits: Iterable[InstancePermit]) -> None:
    for permit in permits:
        permit._granted.set()


def _log_changes(before: Mapping[Resource, int], amounts: Mapping[Resource, int]) -> None:
    """Logs the amounts that have changed, in the form of Triton's verbose log."""
    for (name, device), count in amounts.items():
        if before.get((name, device)) != count:
            place = "GLOBAL" if device == GLOBAL else device
            logger.debug("rate limiter: Device: %s, Resource: %s\t Count: %d", place, name, count)
