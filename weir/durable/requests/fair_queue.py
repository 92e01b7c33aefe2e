"""`FairQueue`: the waiting requests of one model by tenant; a tenant with more waiting requests does not get more done.

Deficit round robin: tenants with waiting items form a ring. The first tenant may take rows up to its credit, then the
next one follows; at the start of each of its turns a tenant's credit grows by its quantum, which is proportional to its
weight. A tenant without items leaves the ring and loses its credit, so absence earns nothing, and names that are used
once leave nothing behind. Credit that does not suffice for the next item is kept for the next turn.

While two tenants have items all the time, their shares of the rows are proportional to their weights, except for one
turn of each: a quantum and the rows of an item.

`pop` takes constant time for items that cost less than the least quantum, as requests of one row do. If a whole round has
served no tenant, all rounds until one can be served are granted at once, so a costly item costs one round too.

Source: M. Shreedhar, G. Varghese, "Efficient fair queuing using deficit round-robin" (1996).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

DEFAULT_WEIGHT = 1.0

ANY_TENANT = "*"
"""In limits and weights: each tenant not named."""


class FairQueue(Generic[Item]):
    """A queue that is fair to tenants. `weights` are by tenant, above 0; the default is that of `*`, else 1."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        weights = weights or {}
        if not all(0 < weight < math.inf for weight in weights.values()):
            raise ValueError("weights of tenants must be above 0")
        least = min([*weights.values(), weights.get(ANY_TENANT, DEFAULT_WEIGHT)])
        # The least weight earns one row a turn, so that a turn always serves an item of one row.
        self._quanta = {tenant: weight / least for tenant, weight in weights.items()}
        self._quantum = weights.get(ANY_TENANT, DEFAULT_WEIGHT) / least
        self._ring: OrderedDict[str, _Tenant[Item]] = OrderedDict()
        self._owners: dict[Item, _Tenant[Item]] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, item: Item) -> bool:
        return item in self._owners

    @property
    def tenants(self) -> int:
        """The number of tenants with waiting items."""
        return len(self._ring)

    def waiting(self, tenant: str) -> int:
        """Waiting items of `tenant`."""
        found = self._ring.get(tenant)
        return 0 if found is None else len(found.items)

    def add(self, tenant: str, item: Item, cost: int = 1) -> None:
        """Adds an item behind those of its tenant. `cost` is in rows, at least 1. Raises ValueError if it waits already."""
        if item in self._owners:
            raise ValueError("the item waits already")
        found = self._ring.get(tenant)
        if found is None:
            found = self._ring[tenant] = _Tenant(tenant, self._quanta.get(tenant, self._quantum))
        found.items[item] = max(1, cost)
        self._owners[item] = found

    def pop(self) -> Item | None:
        """Removes and returns the next item; None if the queue is empty."""
        ring = self._ring
        if len(ring) == 1:
            tenant = next(iter(ring.values()))
            tenant.credit, tenant.has_turn = 0.0, False  # a new tenant starts a fresh ring
            item = next(iter(tenant.items))
            self._take(tenant, item)
            return item
        turned = 0
        while ring:
            tenant = next(iter(ring.values()))
            if not tenant.has_turn:
                tenant.has_turn = True
                tenant.credit += tenant.quantum
            item, cost = tenant.first()
            if cost <= tenant.credit:
                tenant.credit -= cost
                self._take(tenant, item)
                return item
            tenant.has_turn = False
            ring.move_to_end(tenant.name)
            turned += 1
            if turned == len(ring):
                self._grant_rounds()
                turned = 0
        return None

    def remove(self, item: Item) -> bool:
        """Removes an item; False if it is not in the queue."""
        tenant = self._owners.get(item)
        if tenant is None:
            return False
        self._take(tenant, item)
        return True

    def _take(self, tenant: _Tenant[Item], item: Item) -> None:
        del self._owners[item]
        del tenant.items[item]
        if not tenant.items:
            del self._ring[tenant.name]

    def _grant_rounds(self) -> None:
        """Grants all rounds that would pass before one tenant's credit suffices, except the last one."""
        rounds = min(math.ceil((tenant.first()[1] - tenant.credit) / tenant.quantum) for tenant in self._ring.values())
        if rounds > 1:
            for tenant in self._ring.values():
                tenant.credit += tenant.quantum * (rounds - 1)


class _Tenant(Generic[Item]):
    """A tenant with waiting items, in order, and their costs."""

    __slots__ = ("credit", "has_turn", "items", "name", "quantum")

    def __init__(self, name: str, quantum: float) -> None:
        self.name = name
        self.quantum = quantum
        self.credit = 0.0
        self.has_turn = False
        self.items: OrderedDict[Item, int] = OrderedDict()

    def first(self) -> tuple[Item, int]:
        return next(iter(self.items.items()))


def tenant_weights(options: Iterable[str]) -> dict[str, float]:
    """The weights in the texts of `--tenant-weight`, `<tenant>=<weight>` each."""
    return {tenant: float(weight) for tenant, _, weight in (text.rpartition("=") for text in options)}


def tenant_limits(options: Iterable[str]) -> dict[str, int]:
    """The limits in the texts of `--tenant-limit`, `<tenant>=<count>` each."""
    return {tenant: int(count) for tenant, _, count in (text.rpartition("=") for text in options)}
