"""`FairQueue`: the waiting requests of one model by tenant; a tenant with more waiting requests does not get more done.

Tenants take turns by `FairTurns`; what an item costs is in rows. A name that is used once leaves nothing behind.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

from weir.runtime.limits.fair_turns import FairTurns

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
        self._weights = dict(weights)
        self._weight = weights.get(ANY_TENANT, DEFAULT_WEIGHT)
        self._turns = FairTurns()
        self._tenants: dict[str, OrderedDict[Item, int]] = {}  # waiting items in order, with their costs
        self._tenant_of: dict[Item, str] = {}

    def __len__(self) -> int:
        return len(self._tenant_of)

    def __contains__(self, item: Item) -> bool:
        return item in self._tenant_of

    @property
    def tenants(self) -> int:
        """The number of tenants with waiting items."""
        return len(self._tenants)

    def waiting(self, tenant: str) -> int:
        """Waiting items of `tenant`."""
        return len(self._tenants.get(tenant, ()))

    def add(self, tenant: str, item: Item, cost: int = 1) -> None:
        """Adds an item behind those of its tenant. `cost` is in rows, at least 1. Raises ValueError if it waits already."""
        if item in self._tenant_of:
            raise ValueError("the item waits already")
        items = self._tenants.get(tenant)
        if items is None:
            items = self._tenants[tenant] = OrderedDict()
            self._turns.add(tenant, self._weights.get(tenant, self._weight))
        items[item] = max(1, cost)
        self._tenant_of[item] = tenant

    def pop(self) -> Item | None:
        """Removes and returns the next item; None if the queue is empty."""
        if not self._tenants:
            return None
        tenant = self._turns.next(self._first_cost)
        item, cost = next(iter(self._tenants[tenant].items()))
        self._turns.charge(tenant, cost)
        self.remove(item)
        return item

    def remove(self, item: Item) -> bool:
        """Removes an item; False if it is not in the queue."""
        tenant = self._tenant_of.pop(item, None)
        if tenant is None:
            return False
        items = self._tenants[tenant]
        del items[item]
        if not items:
            del self._tenants[tenant]
            self._turns.remove(tenant)
        return True

    def _first_cost(self, tenant: str) -> int:
        return next(iter(self._tenants[tenant].values()))


def tenant_weights(options: Iterable[str]) -> dict[str, float]:
    """The weights in the texts of `--tenant-weight`, `<tenant>=<weight>` each."""
    return {tenant: float(weight) for tenant, _, weight in (text.rpartition("=") for text in options)}


def tenant_limits(options: Iterable[str]) -> dict[str, int]:
    """The limits in the texts of `--tenant-limit`, `<tenant>=<count>` each."""
    return {tenant: int(count) for tenant, _, count in (text.rpartition("=") for text in options)}
