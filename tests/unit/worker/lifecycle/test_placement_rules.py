"""The placement plan for random clusters, and simulated clusters in which workers join and leave."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.schemas.config.parameters import ModelNeeds, ResourceAmounts
from weir.worker.lifecycle.placement_rules import Holding, PlacementStep, Plan, WorkerFacts, plan, shortage, steps

EVENTS: Counter[str] = Counter()
"""The events of the simulated clusters, by kind."""

NAMES = [f"m{number}" for number in range(8)]
TAKES_ROOM = (Holding.LOADING, Holding.READY, Holding.LEAVING)

amounts = st.builds(
    ResourceAmounts,
    st.integers(0, 12),
    st.dictionaries(st.sampled_from(["gpu", "licence"]), st.integers(0, 3), max_size=2),
)
models = st.dictionaries(
    st.sampled_from(NAMES), st.builds(ModelNeeds, amounts, st.sampled_from([0, 1, 1, 2, 3])), max_size=8
)


@st.composite
def clusters(draw: st.DrawFn) -> list[WorkerFacts]:
    offered = draw(models)
    count = draw(st.integers(1, 6))
    return [
        WorkerFacts(
            f"w{number}",
            draw(amounts),
            {name: needs for name, needs in offered.items() if draw(st.integers(0, 4))},
        )
        for number in range(count)
    ]


def used(one: WorkerFacts, names: list[str]) -> tuple[int, Counter[str]]:
    resources: Counter[str] = Counter()
    for name in names:
        resources.update(one.offers[name].takes.resources)
    return sum(one.offers[name].takes.memory_bytes for name in names), resources


def fits(one: WorkerFacts, names: list[str]) -> bool:
    memory_bytes, resources = used(one, names)
    has_memory = not one.capacity.memory_bytes or memory_bytes <= one.capacity.memory_bytes
    return has_memory and all(count <= one.capacity.resources.get(name, 0) for name, count in resources.items())


def given_to(planned: Plan, worker: str) -> list[str]:
    return [name for name, workers in planned.items() if worker in workers]


@settings(max_examples=150, deadline=None)
@given(clusters(), st.randoms(use_true_random=False))
def test_a_plan_fits_and_places_every_model_that_fits(cluster: list[WorkerFacts], chance: random.Random) -> None:
    planned = plan(cluster)
    shuffled = [
        replace(one, offers=dict(chance.sample(list(one.offers.items()), len(one.offers))))
        for one in chance.sample(cluster, len(cluster))
    ]
    assert plan(shuffled) == planned, "the order in which facts come makes no difference"
    assert planned.keys() == {name for one in cluster for name in one.offers}
    for one in cluster:
        assert fits(one, given_to(planned, one.worker))
    for name, holders in planned.items():
        offering = [one for one in cluster if name in one.offers]
        needs = offering[0].offers[name]
        assert holders <= {one.worker for one in offering}
        assert not needs.workers or len(holders) <= needs.workers
        if not needs.workers or len(holders) < needs.workers:
            for one in offering:
                if one.worker not in holders:
                    assert not fits(one, [*given_to(planned, one.worker), name]), "it would have had room"


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 8), st.integers(1, 30), st.integers(1, 2))
def test_a_worker_that_joins_or_leaves_moves_as_few_models_as_possible(workers: int, count: int, copies: int) -> None:
    offers = {f"model{number}": ModelNeeds(workers=copies) for number in range(count)}
    cluster = [WorkerFacts(f"w{number}", ResourceAmounts(), offers) for number in range(workers + 1)]
    before, after = plan(cluster[:-1]), plan(cluster)
    for name in offers:
        gained, lost = after[name] - before[name], before[name] - after[name]
        assert gained <= {cluster[-1].worker}
        assert len(lost) <= len(gained)
        leaving = plan([*cluster[:-1], replace(cluster[-1], leaving=True)])
        assert leaving[name] == before[name]


def test_models_are_spread_over_the_workers() -> None:
    offers = {f"model{number}": ModelNeeds(workers=1) for number in range(400)}
    planned = plan([WorkerFacts(f"worker-{number}", ResourceAmounts(), offers) for number in range(4)])
    shares = Counter(name for workers in planned.values() for name in workers)
    assert min(shares.values()) > 60


@dataclass
class Life:
    """A cluster whose workers follow the rules, one step at a time, in random order."""

    chance: random.Random
    offers: dict[str, ModelNeeds]
    workers: dict[str, WorkerFacts] = field(default_factory=dict)
    gaps_allowed: set[str] = field(default_factory=set)
    born: int = 0

    def facts(self) -> list[WorkerFacts]:
        return list(self.workers.values())

    def hold(self, worker: str, name: str, holding: Holding) -> None:
        one = self.workers[worker]
        holds = {**one.holds, name: holding}
        if holding is Holding.ABSENT:
            del holds[name]
        self.workers[worker] = replace(one, holds=holds)
        if holding in TAKES_ROOM:
            there = [held for held, how in holds.items() if how in TAKES_ROOM]
            assert fits(self.workers[worker], there), "more than there is room for"

    def ready(self, name: str) -> list[str]:
        return [one.worker for one in self.facts() if one.holding(name) is Holding.READY]

    def join(self) -> None:
        name = f"w{self.born}"
        self.born += 1
        capacity = ResourceAmounts(
            self.chance.choice([0, 8, 12, 20]), {"gpu": self.chance.choice([0, 2, 5]), "licence": 4}
        )
        self.workers[name] = WorkerFacts(name, capacity, self.offers)
        EVENTS["join"] += 1

    def leave(self) -> None:
        name = self.chance.choice(list(self.workers))
        self.workers[name] = replace(self.workers[name], leaving=True)
        EVENTS["leave"] += 1

    def die(self) -> None:
        del self.workers[self.chance.choice(list(self.workers))]
        EVENTS["death"] += 1

    def turn(self) -> bool:
        """Performs one random step; returns whether there was one."""
        possible = []
        facts = self.facts()
        planned = plan(facts)
        for one in facts:
            for name, holding in one.holds.items():
                if holding in (Holding.LOADING, Holding.LEAVING):
                    possible.append((one.worker, name, holding))
            for name, step in steps(one.worker, facts, planned).items():
                if step in (PlacementStep.LOAD, PlacementStep.UNLOAD):
                    possible.append((one.worker, name, step))
        if not possible:
            return False
        worker, name, what = self.chance.choice(possible)
        EVENTS["step"] += 1
        if what is PlacementStep.LOAD:
            self.hold(worker, name, Holding.LOADING)
        elif what is Holding.LOADING:
            self.hold(worker, name, Holding.FAILED if self.chance.random() < 0.05 else Holding.READY)
        elif what is PlacementStep.UNLOAD:
            others = [other for other in self.ready(name) if other != worker]
            if not others:
                homeless = [n for n in self.offers if not self.ready(n)]
                assert homeless, "a model went without anything that needed its room"
                EVENTS["made room by force"] += 1
            self.hold(worker, name, Holding.LEAVING)
        else:
            self.hold(worker, name, Holding.ABSENT)
        return True


@settings(max_examples=120, deadline=None)
@given(models, st.integers(0, 2**32))
def test_clusters_settle_and_never_exceed_a_capacity(offers: dict[str, ModelNeeds], seed: int) -> None:
    life = Life(random.Random(seed), offers)
    for _ in range(life.chance.randint(1, 4)):
        life.join()
    for _ in range(12):
        kind = life.chance.random()
        if kind < 0.4 or not life.workers:
            life.join()
        elif kind < 0.6:
            life.leave()
        elif kind < 0.7:
            life.die()
        for _ in range(life.chance.randint(0, 15)):
            life.turn()
    for _ in range(2_000):
        if not life.turn():
            break
    else:
        pytest.fail("it does not come to rest")
    planned = plan(life.facts())
    for name, holders in planned.items():
        if any(life.workers[worker].holding(name) is Holding.ABSENT for worker in holders):
            served = life.ready(name)
            failed = [one for one in holders if life.workers[one].holding(name) is Holding.FAILED]
            assert served or failed, f"{name} is to be at {holders} and is nowhere"


def test_a_model_is_unloaded_only_after_another_worker_serves_it() -> None:
    """The model is unloaded when the other worker serves it, and not before."""
    offers = {"m": ModelNeeds(workers=1)}
    cluster = [WorkerFacts(name, ResourceAmounts(), offers) for name in ("a", "b")]
    (new,) = plan(cluster)["m"]
    old = "b" if new == "a" else "a"

    def decided(how: Holding) -> tuple[PlacementStep, PlacementStep]:
        facts = [replace(one, holds={"m": Holding.READY if one.worker == old else how}) for one in cluster]
        return steps(old, facts, plan(facts))["m"], steps(new, facts, plan(facts))["m"]

    assert decided(Holding.ABSENT) == (PlacementStep.KEEP, PlacementStep.LOAD)
    assert decided(Holding.LOADING) == (PlacementStep.KEEP, PlacementStep.KEEP)
    assert decided(Holding.FAILED) == (PlacementStep.KEEP, PlacementStep.KEEP)
    assert decided(Holding.READY) == (PlacementStep.UNLOAD, PlacementStep.KEEP)


def test_a_shortage_names_needs_and_capacities() -> None:
    needs = ModelNeeds(ResourceAmounts(100, {"a100": 2}))
    cluster = [
        WorkerFacts("a", ResourceAmounts(50), {"m": needs}),
        WorkerFacts("b", ResourceAmounts(70, {"a100": 1}), {"m": needs}),
    ]
    assert plan(cluster) == {"m": frozenset()}
    assert steps("a", cluster, plan(cluster)) == {"m": PlacementStep.NOWHERE}
    assert shortage(needs, cluster) == (
        "no worker has room for the model: it needs 100 bytes of memory, of which the largest worker has 70 in all; "
        "2 of 'a100', of which a worker has 1 at most"
    )
