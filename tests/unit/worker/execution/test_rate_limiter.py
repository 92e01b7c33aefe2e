"""The rate limiter under any order of events: it never exceeds an amount, and every instance executes eventually."""

from __future__ import annotations

import re
import threading
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.schemas.config.model_config import ModelRateLimiter as RateLimiterConfig
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.worker.execution.rate_limiter import (
    EACH_DEVICE,
    GLOBAL,
    LOADING_EXECUTIONS,
    InstancePermit,
    Needs,
    RateLimiter,
    RateLimiterPermits,
    Resource,
    explicit_amounts,
    needs_of,
    rate_limiter_permits,
)

EVENTS = Counter[str]()
"""The events of the property tests, by kind."""

A: Resource = ("A", 0)
B: Resource = ("B", GLOBAL)


class Model:
    """A limiter whose invariants are checked after each event."""

    def __init__(self) -> None:
        self.limiter: RateLimiter[int] = RateLimiter()
        self.needs: dict[int, Needs] = {}
        self.waiting: list[int] = []
        self.executing: set[int] = set()
        self.executions: Counter[int] = Counter()

    def add(self, instance: int, needs: Needs) -> None:
        EVENTS["add"] += 1
        self.limiter.add(instance, needs)
        self.needs[instance] = needs
        self.check([])

    def remove(self, instance: int) -> None:
        EVENTS["remove"] += 1
        del self.needs[instance]
        self.executing.discard(instance)
        if instance in self.waiting:
            self.waiting.remove(instance)
        self.check(self.limiter.remove(instance))

    def request(self, instance: int) -> None:
        EVENTS["request"] += 1
        self.waiting.append(instance)
        self.check(self.limiter.request(instance))

    def release(self, instance: int, wants_more: bool) -> None:
        EVENTS["give back"] += 1
        self.executing.remove(instance)
        if wants_more:
            self.waiting.append(instance)
        self.check(self.limiter.release(instance, wants_more))

    def check(self, granted: list[int]) -> None:
        for instance in granted:
            self.waiting.remove(instance)
            self.executing.add(instance)
            self.executions[instance] += 1
        held = Counter[Resource]()
        for instance in self.executing:
            held.update(self.needs[instance].resources)
        assert +held == +Counter(self.limiter.held)
        for instance in granted:
            for resource in +Counter(self.needs[instance].resources):
                # Not of one it needs none of: others may hold more than there is, after a larger instance was removed.
                assert held[resource] <= self.limiter.amounts[resource]
        most = Counter[Resource]()
        for needs in self.needs.values():
            most |= Counter(needs.resources)
        assert +most == +Counter(self.limiter.amounts)
        assert self.executing or not self.waiting, "an instance waits although none executes"
        for instance in self.waiting:
            needed = +Counter(self.needs[instance].resources)
            others = [other for other in (*self.executing, *self.waiting) if other != instance]
            assert any(needed.keys() & (+Counter(self.needs[other].resources)).keys() for other in others)


resources = st.dictionaries(st.sampled_from([A, ("A", 1), B, ("C", GLOBAL)]), st.integers(0, 3), max_size=3)
needs = st.builds(Needs, resources, st.integers(1, 4))


@settings(max_examples=200)
@given(st.data())
def test_no_amount_is_exceeded_and_every_request_is_granted(data: st.DataObject) -> None:
    model = Model()
    for number, need in enumerate(data.draw(st.lists(needs, min_size=1, max_size=5))):
        model.add(number, need)
    last = len(model.needs)
    for _ in range(data.draw(st.integers(1, 40))):
        idle = sorted(model.needs.keys() - model.executing - set(model.waiting))
        choices = ["add"]
        choices += ["request"] * 3 if idle else []
        choices += ["give back"] * 3 if model.executing else []
        choices += ["remove"] if model.needs else []
        match data.draw(st.sampled_from(choices)):
            case "add":
                model.add(last, data.draw(needs))
                last += 1
            case "remove":
                model.remove(data.draw(st.sampled_from(sorted(model.needs))))
            case "request":
                model.request(data.draw(st.sampled_from(idle)))
            case _:
                model.release(data.draw(st.sampled_from(sorted(model.executing))), data.draw(st.booleans()))
    while model.executing:
        model.release(min(model.executing), False)
    assert not model.waiting


@settings(max_examples=60)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=6), st.integers(50, 300))
def test_instances_that_always_wait_execute_by_priority(priorities: list[int], permits: int) -> None:
    model = Model()
    for number, priority in enumerate(priorities):
        model.add(number, Needs({A: 1}, priority))
    for number in range(len(priorities)):
        model.request(number)
    for _ in range(permits):
        (running,) = model.executing
        model.release(running, True)
    used = [(model.executions[number] + LOADING_EXECUTIONS) * priority for number, priority in enumerate(priorities)]
    assert max(used) - min(used) <= max(priorities)


@settings(max_examples=60)
@given(st.lists(needs, min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_every_waiting_instance_executes_however_often_others_wait(all_needs: list[Needs], random: Any) -> None:
    model = Model()
    for number, need in enumerate(all_needs):
        model.add(number, need)
    for number in range(len(all_needs)):
        model.request(number)
    # No instance waits longer than until each other one has executed as often as its priority allows.
    for _ in range(10 * len(all_needs) * len(all_needs)):
        model.release(random.choice(sorted(model.executing)), True)
        if all(model.executions[number] for number in range(len(all_needs))):
            return
    raise AssertionError(model.executions)


def test_priority_2_executes_half_as_often_as_priority_1() -> None:
    model = Model()
    for number, priority in enumerate([1, 2]):
        model.add(number, Needs({A: 1}, priority))
    for number in (0, 1):
        model.request(number)
    for _ in range(299):
        model.release(*model.executing, True)
    assert model.executions == {0: 200, 1: 100}


def test_an_instance_of_a_higher_priority_is_ahead_from_the_start() -> None:
    # The order of Triton 2.51, which counts the initialization and the warm-up of an instance as executions of it.
    for first in (0, 1):
        limiter: RateLimiter[int] = RateLimiter()
        limiter.add(0, Needs({A: 1}, 1))
        limiter.add(1, Needs({A: 1}, 2))
        order = limiter.request(first)
        limiter.request(1 - first)
        for _ in range(8):
            order += limiter.release(order[-1], True)
        assert order == [[0, 0, 1, 0, 0, 1, 0, 0, 1], [1, 0, 0, 0, 0, 1, 0, 0, 1]][first]


def test_two_clients_with_requests_in_flight_are_served_as_by_triton() -> None:
    """Each client keeps 8 requests in flight; both stop when one has sent 80. Triton serves 80 and 44 of them."""
    limiter: RateLimiter[int] = RateLimiter()
    limiter.add(0, Needs({("R1", 0): 4}, 1))
    limiter.add(1, Needs({("R1", 0): 2, ("R2", GLOBAL): 2}, 2))
    sent, served = [8, 8], [0, 0]
    (running,) = limiter.request(0)
    limiter.request(1)
    is_over, waits_to_send = False, [True, True]
    while True:
        served[running] += 1
        if waits_to_send[running]:
            sent[running] += 1
            is_over = is_over or sent[running] == 80
            waits_to_send[running] = not is_over
        granted = limiter.release(running, sent[running] > served[running])
        if not granted:
            break
        (running,) = granted
    assert served == [80, 44]


def test_a_waiting_instance_is_not_overtaken_by_one_with_smaller_needs() -> None:
    model = Model()
    model.add(0, Needs({A: 2}))
    for number in (1, 2):
        model.add(number, Needs({A: 1}))
        model.request(number)
    model.request(0)
    model.release(1, False)
    model.request(1)
    assert model.waiting == [0, 1], "one of two is free, but it is kept"
    model.release(2, False)
    assert model.executing == {0}


def test_a_waiting_instance_does_not_block_other_resources() -> None:
    model = Model()
    model.add(0, Needs({A: 1}))
    model.add(1, Needs({A: 1}))
    model.add(2, Needs({B: 1}))
    model.add(3, Needs({}))
    for number in range(4):
        model.request(number)
    assert model.executing == {0, 2, 3}


def test_an_instance_that_is_added_late_starts_level_with_the_others() -> None:
    model = Model()
    model.add(0, Needs({A: 1}))
    model.request(0)
    for _ in range(1000):
        model.release(0, True)
    model.add(1, Needs({A: 1}))
    model.request(1)
    for _ in range(10):
        model.release(*model.executing, True)
    assert abs(model.executions[0] - 1000 - model.executions[1]) <= 2


def limit(**fields: Any) -> RateLimiterConfig:
    return RateLimiterConfig.model_validate(fields)


def test_needs_are_read_from_the_configuration() -> None:
    rows = [{"name": "R1", "count": 4}, {"name": "R2", "global": True, "count": 2}]
    assert needs_of(limit(resources=rows, priority=3), 1) == Needs({("R1", 1): 4, ("R2", GLOBAL): 2}, 3)
    assert needs_of(limit(), 0).priority == 1
    assert needs_of(None, 0) == Needs({})


def test_amounts_are_read_from_the_command_line() -> None:
    assert explicit_amounts(["R1:10", "R1:3:1"]) == {("R1", EACH_DEVICE): 10, ("R1", 1): 3}


@pytest.mark.parametrize(
    ("texts", "resource", "amount"),
    [
        (["A:5"], A, 5),
        (["A:5:0"], A, 5),
        (["A:5:1"], A, 0),
        (["A:2", "A:7:0", "A:9:1"], A, 7),
        (["B:5"], B, 5),
        (["B:5:3", "B:4:1"], B, 5),
        (["C:5"], A, 0),
    ],
)
def test_explicit_amounts_replace_the_largest_needs(texts: list[str], resource: Resource, amount: int) -> None:
    limiter: RateLimiter[str] = RateLimiter(explicit_amounts(texts))
    limiter.add("other", Needs({}))
    if amount:
        limiter.add("m", Needs({resource: amount}))
        limiter.remove("m")
        limiter.add("m", Needs({resource: 1}))
        assert limiter.amounts == {resource: amount}
    text = (
        f'Resource count for "{resource[0]}" is limited to {amount} which will prevent scheduling of one or more model '
        f"instances, the minimum required count is {amount + 1}"
    )
    with pytest.raises(WeirError, match=f"^INVALID_ARG: {re.escape(text)}$") as error:
        limiter.add("n", Needs({resource: amount + 1}))
    assert error.value.code is ErrorCode.INVALID_ARG
    assert limiter.request("other") == ["other"], "other instances are not affected"


def test_a_resource_is_global_or_of_devices() -> None:
    limiter: RateLimiter[str] = RateLimiter()
    limiter.add("m", Needs({("R", 0): 1}))
    text = 'Resource "R" is present as both global and device-specific resource in the model configuration.'
    for needs in (Needs({("R", GLOBAL): 1}), Needs({("Q", 0): 1, ("R", GLOBAL): 1})):
        with pytest.raises(WeirError, match=f"^INVALID_ARG: {re.escape(text)}$"):
            limiter.add("n", needs)
    assert limiter.amounts == {("R", 0): 1}
    limiter.remove("m")
    limiter.add("n", Needs({("R", GLOBAL): 1}))


def test_there_are_no_permits_without_a_limit_or_needs() -> None:
    assert rate_limiter_permits("off", ["R:1"]) is None
    permits = rate_limiter_permits("execution_count", ["R:1"])
    assert permits is not None
    assert permits.join(Needs({}, 3)) is None, "an instance without needs has no permit"
    with pytest.raises(WeirError, match="minimum required count is 2"):
        permits.join(Needs({("R", 0): 2}))


def join(permits: RateLimiterPermits, needs: Needs) -> InstancePermit:
    permit = permits.join(needs)
    assert permit is not None
    return permit


def test_threads_that_share_a_resource_never_execute_together() -> None:
    permits = RateLimiterPermits(RateLimiter())
    inside: list[int] = []
    most: list[int] = []

    def run(number: int) -> None:
        permit = join(permits, Needs({A: 1}, number + 1))
        for left in reversed(range(200)):
            permit.acquire()
            inside.append(number)
            most.append(len(inside))
            inside.remove(number)
            permit.release(wants_more=left % 3 != 0)
        permit.leave()

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert len(most) == 800
    assert max(most) == 1


def test_an_instance_that_leaves_withdraws_its_request() -> None:
    permits = RateLimiterPermits(RateLimiter())
    leaving, staying = join(permits, Needs({A: 1})), join(permits, Needs({A: 1}))
    leaving.acquire()
    leaving.release(wants_more=True)
    leaving.leave()
    staying.acquire()
    staying.release(wants_more=False)
    staying.leave()


def test_changes_of_amounts_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "weir.worker")
    permits = rate_limiter_permits("execution_count", ())
    assert permits is not None
    first = permits.join(Needs({("R1", 0): 4}))
    permits.join(Needs({("R1", 0): 3, ("R2", GLOBAL): 1}))
    assert first is not None
    first.leave()
    assert [record.getMessage() for record in caplog.records] == [
        "rate limiter: Device: 0, Resource: R1\t Count: 4",
        "rate limiter: Device: GLOBAL, Resource: R2\t Count: 1",
        "rate limiter: Device: 0, Resource: R1\t Count: 3",
    ]
