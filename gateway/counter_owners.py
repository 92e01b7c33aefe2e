"""`CounterOwners`: what workers, schedulers and gateways told last, those that are there and those that have gone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from schemas.statistics import GatewayCounters, SchedulerCounters, WorkerCounters

MAX_DEPARTED = 64
"""Owners that have gone whose counters are kept apart, for they may come back; those of the oldest are given away."""

T = TypeVar("T", WorkerCounters, SchedulerCounters, GatewayCounters)


class CounterOwners(Generic[T]):
    """Owners by name. `forget` is given the counters of one that has been gone for longest, when there are too many.

    An owner that comes back under its name is another one if it was born at another time: what it was before stays.
    """

    def __init__(self, forget: Callable[[T], None]) -> None:
        self._forget: Callable[[T], None] = forget
        self.current: dict[str, T] = {}
        self._departed: OrderedDict[tuple[str, int], T] = OrderedDict()

    @property
    def departed(self) -> list[T]:
        """The last words of those that have gone."""
        return list(self._departed.values())

    def heard(self, name: str, counters: T) -> None:
        """An owner tells its counters."""
        known = self.current.get(name)
        if known is not None and known.born_ns != counters.born_ns:
            self.gone(name)
        self._departed.pop((name, counters.born_ns), None)
        self.current[name] = counters

    def gone(self, name: str) -> None:
        """An owner is there no more."""
        counters = self.current.pop(name, None)
        if counters is None:
            return
        self._departed[name, counters.born_ns] = counters
        if len(self._departed) > MAX_DEPARTED:
            self._forget(self._departed.popitem(last=False)[1])
