from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from weir.bus.naming.identity import host_of
from weir.scheduler.placement.instances import SLOTS, STAGING_LEAD_US, Instance, Instances


def named(instance: Instance | None) -> tuple[str, int] | None:
    return None if instance is None else (instance.worker, instance.number)


def occupied(placement: Instances, now_us: int = 0) -> tuple[str, int] | None:
    """Puts a batch on the next slot."""
    instance = placement.next_slot()
    if instance is not None:
        placement.occupy(instance, now_us)
    return named(instance)


def test_idle_instances_come_first_then_each_is_staged_one():
    placement = Instances()
    placement.set_instances("a", 2)
    placement.set_instances("b", 1)
    given_out = [occupied(placement, now) for now in range(7)]
    everyone = [("a", 0), ("a", 1), ("b", 0)]
    assert given_out == [*everyone, *everyone, None]


def test_the_instance_idle_for_longest_comes_first():
    placement = Instances()
    placement.set_instances("a", 2)
    first = placement.next_slot()
    placement.occupy(first, 0)
    second = placement.next_slot()
    placement.occupy(second, 0)
    placement.free(second, 10, 10)
    placement.free(first, 20, 20)
    assert placement.next_slot() is second


def test_a_batch_is_staged_behind_the_one_that_began_first():
    placement = Instances()
    placement.set_instances("a", 2)
    assert [occupied(placement, now) for now in (0, 5)] == [("a", 0), ("a", 1)]
    assert named(placement.next_slot()) == ("a", 0)


def test_a_removed_instance_gets_no_batches_and_keeps_its_slots_if_it_returns():
    placement = Instances()
    placement.set_instances("a", 1)
    instance = placement.next_slot()
    placement.occupy(instance, 0)
    placement.set_instances("a", 0)
    assert placement.next_slot() is None
    assert len(placement) == 0
    placement.set_instances("a", 1)
    assert placement.next_slot() is instance
    placement.occupy(instance, 1)
    assert placement.next_slot() is None


def test_a_removed_instance_is_forgotten_with_its_last_batch():
    placement = Instances()
    placement.set_instances("a", 1)
    instance = placement.next_slot()
    placement.occupy(instance, 0)
    placement.set_instances("a", 0)
    placement.free(instance, 10, 10)
    placement.set_instances("a", 1)
    assert placement.next_slot() is not instance
    assert occupied(placement) == ("a", 0)


def test_a_partial_batch_is_staged_shortly_before_the_expected_end():
    placement = Instances()
    placement.set_instances("a", 1)
    instance = placement.next_slot()
    placement.occupy(instance, 0)
    assert instance.stages_partial_at_us(0.0) is None
    placement.free(instance, 10_000, 10_000)
    placement.occupy(instance, 20_000, rows=2)
    assert instance.stages_partial_at_us(5_000.0) == 30_000 - STAGING_LEAD_US


def test_a_partial_batch_is_never_staged_behind_short_ones():
    placement = Instances()
    placement.set_instances("a", 1)
    instance = placement.next_slot()
    placement.occupy(instance, 0)
    placement.free(instance, 10, 2 * STAGING_LEAD_US - 1)
    placement.occupy(instance, 20)
    assert instance.stages_partial_at_us(2.0 * STAGING_LEAD_US - 1) is None


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("set"), st.sampled_from("abc"), st.integers(0, 3)),
            st.tuples(st.just("occupy"), st.integers(1, 4), st.just(0)),
            st.tuples(st.just("free"), st.integers(0, 20), st.integers(0, 3000)),
        ),
        max_size=60,
    )
)
def test_slots_are_never_exceeded_and_idle_instances_never_passed_over(events: list[tuple[str, object, int]]):
    placement = Instances()
    counts: dict[str, int] = defaultdict(int)
    held: list[Instance] = []

    def batches_on(name: tuple[str, int]) -> int:
        return sum(named(instance) == name for instance in held)

    for now_us, (name, what, number) in enumerate(events):
        if name == "set":
            placement.set_instances(what, number)
            counts[what] = number
        elif name == "occupy":
            for _ in range(what):
                present = [(worker, i) for worker, count in counts.items() for i in range(count)]
                free = [instance for instance in present if batches_on(instance) < SLOTS]
                idle = [instance for instance in free if batches_on(instance) == 0]
                instance = placement.next_slot()
                assert (instance is None) == (not free)
                if instance is not None:
                    assert named(instance) in (idle or free)
                    assert instance.held == batches_on(named(instance))
                    placement.occupy(instance, now_us)
                    held.append(instance)
        elif held:
            instance = held.pop(what % len(held))
            placement.free(instance, now_us, number)
        assert len(placement) == sum(counts.values())
        assert placement.workers() == {worker for worker, count in counts.items() if count}
        assert all(batches_on(named(instance)) <= SLOTS for instance in held)


class Rule:
    """The rule in its plainest form: of all instances with a free slot, the first by batches held, then by since when."""

    def __init__(self) -> None:
        self.since: dict[Instance, int] = {}
        self.changes = 0

    def changed(self, instance: Instance) -> None:
        self.since[instance] = self.changes = self.changes + 1

    def next_slot(self) -> Instance | None:
        free = [instance for instance in self.since if instance.present and instance.held < SLOTS]
        return min(free, key=lambda instance: (instance.held, self.since[instance]), default=None)

    def idle_near(self, host: str) -> Instance | None:
        """Of the idle ones on that host the first by since when; None where there is no choice between hosts."""
        there = [instance for instance in self.since if instance.present]
        idle = [instance for instance in there if not instance.held and host_of(instance.worker) == host]
        has_choice = len({host_of(instance.worker) for instance in there}) > 1
        return min(idle, key=self.since.__getitem__, default=None) if has_choice else None


HOSTS = ["00000001", "00000002"]
WORKERS = [f"worker-{HOSTS[0]}-a", f"worker-{HOSTS[0]}-b", f"worker-{HOSTS[1]}-c"]


@settings(max_examples=int(os.environ.get("WEIR_SIMULATIONS", "60")), deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("set"), st.sampled_from(WORKERS), st.integers(0, 4)),
            st.tuples(st.just("occupy"), st.integers(1, 6), st.sampled_from(["", *HOSTS])),
            st.tuples(st.just("free"), st.integers(0, 20), st.integers(1, 4)),
        ),
        min_size=30,
        max_size=80,
    )
)
def test_the_next_slot_is_that_of_the_plain_rule(events: list[tuple[str, Any, Any]]):
    placement, rule = Instances(), Rule()
    held: list[Instance] = []
    for now_us, (name, what, number) in enumerate(events):
        if name == "set":
            before = {instance for instance in rule.since if instance.present}
            placement.set_instances(what, number)
            for instance in present(placement):
                if instance not in before:
                    rule.changed(instance)
        elif name == "occupy":
            for _ in range(what):
                near = placement.idle_near(number)
                assert near is rule.idle_near(number)
                instance = near or placement.next_slot()
                assert instance is (near or rule.next_slot())
                if instance is not None:
                    placement.occupy(instance, now_us)
                    rule.changed(instance)
                    held.append(instance)
        else:
            for _ in range(min(number, len(held))):
                instance = held.pop(what % len(held))
                placement.free(instance, now_us, 10)
                rule.changed(instance)
        assert placement.next_slot() is rule.next_slot()
        assert [placement.idle_near(host) for host in HOSTS] == [rule.idle_near(host) for host in HOSTS]


def present(placement: Instances) -> list[Instance]:
    """The instances there are, by number, in the order in which one call of `set_instances` adds them."""
    there = [i for instances in placement._instances.values() for i in instances.values() if i.present]
    return sorted(there, key=lambda instance: instance.number)
