"""`FairTurns`: whose turn it is among owners who all have something waiting; who has more of it gets no more done.

Deficit round robin: the owners form a ring. The first one may take what costs up to its credit, then the next one follows;
at the start of each of its turns an owner's credit grows by its quantum. The least weight in the ring earns a cost of 1 a
turn, others in proportion. An owner that leaves the ring loses its credit, so absence earns nothing, and names that are
used once leave nothing behind. Credit that does not suffice for the next item is kept for the next turn.

While two owners are in the ring all the time, their shares are proportional to their weights, except for one turn of each:
a quantum and the cost of an item.

`next` takes constant time for items that cost less than the least quantum. If a whole round has served no owner, all rounds
until one can be served are granted at once, so a costly item costs one round too.

Source: M. Shreedhar, G. Varghese, "Efficient fair queuing using deficit round-robin" (1996).
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator


class FairTurns:
    """The owners who have something waiting, in the order of their turns. Weights are above 0, costs at least 1."""

    __slots__ = ("_least", "_ring", "_weights")

    def __init__(self) -> None:
        self._ring: OrderedDict[str, _Owner] = OrderedDict()
        self._weights: Counter[float] = Counter()  # how many owners have each
        self._least = 1.0

    def __len__(self) -> int:
        return len(self._ring)

    def __iter__(self) -> Iterator[str]:
        return iter(self._ring)

    def add(self, name: str, weight: float) -> None:
        """Adds an owner behind all others, or changes the weight of one that is in the ring."""
        owner = self._ring.get(name)
        if owner is None:
            self._ring[name] = _Owner(weight)
        elif owner.weight == weight:
            return
        else:
            self._forget_weight(owner.weight)
            owner.weight = weight
        self._weights[weight] += 1
        if weight < self._least or len(self._ring) == 1:
            self._least = weight

    def remove(self, name: str) -> None:
        """Removes an owner: nothing of it waits any more."""
        self._forget_weight(self._ring.pop(name).weight)

    def next(self, cost_of: Callable[[str], int]) -> str:
        """Returns whose turn it is. `cost_of` returns the cost of an owner's first item. There is an owner."""
        ring = self._ring
        if len(ring) == 1:
            name, owner = next(iter(ring.items()))
            owner.credit, owner.has_turn = 0.0, False  # a new owner starts a fresh ring
            return name
        turned = 0
        while True:
            name, owner = next(iter(ring.items()))
            if not owner.has_turn:
                owner.has_turn = True
                owner.credit += owner.weight / self._least
            if cost_of(name) <= owner.credit:
                return name
            owner.has_turn = False
            ring.move_to_end(name)
            turned += 1
            if turned == len(ring):
                self._grant_rounds(cost_of)
                turned = 0

    def charge(self, name: str, cost: int) -> int:
        """Charges an owner for an item that it takes, also out of its turn; returns the charge: 0 if it is alone."""
        if len(self._ring) == 1:
            return 0
        self._ring[name].credit -= cost
        return cost

    def refund(self, name: str, charge: int) -> None:
        """Takes a charge back: the item waits again. The turn is its owner's."""
        owner = self._ring[name]
        owner.credit += charge
        owner.has_turn = owner.has_turn or charge > 0
        self._ring.move_to_end(name, last=False)

    def _forget_weight(self, weight: float) -> None:
        self._weights[weight] -= 1
        if not self._weights[weight]:
            del self._weights[weight]
            self._least = min(self._weights, default=1.0)

    def _grant_rounds(self, cost_of: Callable[[str], int]) -> None:
        """Grants all rounds that would pass before one owner's credit suffices, except the last one."""
        least = self._least
        rounds = min(
            math.ceil((cost_of(name) - owner.credit) * least / owner.weight) for name, owner in self._ring.items()
        )
        if rounds > 1:
            for owner in self._ring.values():
                owner.credit += owner.weight / least * (rounds - 1)


class _Owner:
    __slots__ = ("credit", "has_turn", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.credit = 0.0
        self.has_turn = False
