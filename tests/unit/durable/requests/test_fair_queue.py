"""Fair turns of tenants: shares by weight whatever is offered, nobody starves, nothing is lost, nothing is left behind."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.steps import steps
from weir.durable.requests.fair_queue import FairQueue, tenant_limits, tenant_weights

WHATEVER_THE_MACHINE = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])

Item = tuple[str, int]


def served_rows(queue: FairQueue[Any], rows: int, costs: dict[Any, int]) -> Counter[str]:
    """So many rows, by tenant."""
    served: Counter[str] = Counter()
    while served.total() < rows:
        item = queue.pop()
        assert item is not None
        served[item[0]] += costs[item]
    return served


@pytest.mark.parametrize(
    "weights", [{}, {"busy": 3.0}, {"quiet": 3.0}, {"busy": 0.1, "quiet": 0.3}, {"*": 2, "busy": 0.5}]
)
@pytest.mark.parametrize("largest", [1, 8])
def test_who_offers_a_hundred_times_as_much_gets_no_more_than_its_share(
    weights: dict[str, float], largest: int
) -> None:
    """L-06: both have something waiting all the time, and one of them a hundred times as much."""
    queue: FairQueue[Item] = FairQueue(weights)
    draw = random.Random(6)
    costs: dict[Item, int] = {}
    offered: Counter[str] = Counter()

    def offer(tenant: str, count: int) -> None:
        for _ in range(count):
            item = (tenant, offered[tenant])
            offered[tenant] += 1
            costs[item] = draw.randint(1, largest)
            queue.add(tenant, item, costs[item])

    offer("busy", 1000)
    offer("quiet", 10)
    served: Counter[str] = Counter()
    for _ in range(20_000):
        item = queue.pop()
        assert item is not None
        served[item[0]] += costs[item]
        if item[0] == "quiet" or not queue.waiting("quiet"):
            offer("quiet", 1)
            offer("busy", 100 if queue.waiting("busy") < 1000 else 0)
        elif queue.waiting("busy") < 100:
            offer("busy", 100)
    weight = {tenant: weights.get(tenant, weights.get("*", 1.0)) for tenant in ("busy", "quiet")}
    share = served["busy"] / served.total()
    expected = weight["busy"] / sum(weight.values())
    assert abs(share - expected) < 0.05 * expected


@WHATEVER_THE_MACHINE
@given(
    st.dictionaries(st.sampled_from("abcde"), st.floats(0.05, 20), min_size=2, max_size=5),
    st.integers(0, 1 << 30),
    st.integers(1, 64),
)
def test_shares_of_those_who_always_wait_are_as_their_weights(
    weights: dict[str, float], seed: int, largest: int
) -> None:
    queue: FairQueue[Item] = FairQueue(weights)
    draw = random.Random(seed)
    costs = {(tenant, number): draw.randint(1, largest) for tenant in weights for number in range(100)}
    for item, cost in costs.items():
        queue.add(item[0], item, cost)
    served: Counter[str] = Counter()
    least = min(1.0, *weights.values())
    while all(queue.waiting(tenant) for tenant in weights):
        item = queue.pop()
        assert item is not None
        served[item[0]] += costs[item]
        # By the weight, the work done for any two differs by a turn and an item of each at most.
        normal = {tenant: served[tenant] / weight for tenant, weight in weights.items()}
        first, last = max(normal, key=normal.__getitem__), min(normal, key=normal.__getitem__)
        bound = 1 / least + largest / weights[first] + largest / weights[last]
        assert normal[first] - normal[last] <= bound * (1 + 1e-9)


class OneQueue(RuleBasedStateMachine):
    """A queue beside a plain model of it: all that waits, by tenant and in order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[Item] = FairQueue({"a": 3, "b": 0.5})
        self.waiting: dict[str, deque[Item]] = {}
        self.number = 0
        self.passed: Counter[str] = Counter()

    @rule(tenant=st.sampled_from("abcdef"), cost=st.integers(1, 40))
    def add(self, tenant: str, cost: int) -> None:
        self.number += 1
        item = (tenant, self.number)
        mine = self.waiting.setdefault(tenant, deque())
        self.queue.add(tenant, item, cost)
        mine.append(item)

    @rule()
    def pop(self) -> None:
        item = self.queue.pop()
        if item is None:
            assert not any(self.waiting.values())
            return
        tenant = item[0]
        assert self.waiting[tenant].popleft() == item
        # Nobody starves: each turn of the others is bounded, and so is how many turns the costliest item takes.
        for other, mine in self.waiting.items():
            self.passed[other] = self.passed[other] + 1 if mine and other != tenant else 0
            assert self.passed[other] <= 6 * (40 + 1) * 6

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        items = [item for mine in self.waiting.values() for item in mine]
        if items:
            item = data.draw(st.sampled_from(items))
            assert item in self.queue
            assert self.queue.remove(item)
            self.waiting[item[0]].remove(item)
            assert not self.queue.remove(item)

    @invariant()
    def holds_what_waits(self) -> None:
        assert len(self.queue) == sum(map(len, self.waiting.values()))
        assert self.queue.tenants == sum(map(bool, self.waiting.values()))
        for tenant, mine in self.waiting.items():
            assert self.queue.waiting(tenant) == len(mine)


TestOneQueue = OneQueue.TestCase
TestOneQueue.settings = settings(WHATEVER_THE_MACHINE, max_examples=100, stateful_step_count=60)


def test_absence_earns_nothing() -> None:
    queue: FairQueue[Item] = FairQueue()
    costs: dict[Any, int] = {}
    for number in range(3000):
        costs["here", number] = costs["back", number] = 1
        queue.add("here", ("here", number))
    queue.add("back", ("back", 0))
    served_rows(queue, 1000, costs)
    assert queue.waiting("back") == 0
    for number in range(1, 1000):
        queue.add("back", ("back", number))
    served = served_rows(queue, 1000, costs)
    assert abs(served["back"] - served["here"]) <= 1


def test_who_comes_with_little_waits_for_a_turn_of_the_others_only() -> None:
    queue: FairQueue[Item] = FairQueue({"heavy": 8})
    for tenant in ("heavy", "light"):
        for number in range(100):
            queue.add(tenant, (tenant, number))
    queue.pop()
    queue.add("new", ("new", 0))
    assert ("new", 0) in [queue.pop() for _ in range(10)]


def test_a_costly_item_gets_its_turn_at_once_where_nobody_else_waits() -> None:
    queue: FairQueue[str] = FairQueue({"small": 0.001, "large": 1000.0})
    queue.add("small", "costly", 10**9)
    queue.add("other", "as costly", 10**9)
    found: set[str | None] = set()
    assert steps(lambda: found.update([queue.pop(), queue.pop()])) < 200, "not a step for each of 10**12 rounds"
    assert found == {"costly", "as costly"}
    assert queue.pop() is None


def test_names_that_come_and_go_leave_nothing_behind() -> None:
    queue: FairQueue[int] = FairQueue({"t1": 2.0})
    for number in range(100_000):
        queue.add(f"t{number}", number)
        if len(queue) > 10:
            assert (queue.pop() if number % 2 else queue.remove(number)) is not None
    while queue.pop() is not None:
        pass
    assert (len(queue), queue.tenants, len(queue._turns), queue._tenant_of) == (0, 0, 0, {})
    assert not queue._turns._weights


def test_an_item_waits_once() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.add("a", "x")
    with pytest.raises(ValueError, match="waits already"):
        queue.add("b", "x")
    queue.add("a", "y")
    queue.add("b", "z")
    assert (queue.pop(), queue.pop(), queue.pop(), queue.pop()) == ("x", "z", "y", None)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_is_above_zero(weight: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        FairQueue({"a": weight, "b": 1.0})


def test_options_name_a_tenant_and_a_number() -> None:
    assert tenant_weights(("a=2", "b=c=0.5")) == {"a": 2.0, "b=c": 0.5}
    assert tenant_limits(("*=10", "a=3")) == {"*": 10, "a": 3}
