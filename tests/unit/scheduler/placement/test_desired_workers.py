"""`DesiredWorkers`: it follows the load at once, never flaps, and comes to rest."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from weir.scheduler.placement.desired_workers import (
    HOLD_US,
    IDLE_US,
    MAX_DESIRED,
    TARGET_UTILIZATION,
    DesiredWorkers,
    Load,
)

S = 1_000_000


class Cluster:
    """Workers of one instance each that run requests of a fixed cost, as many workers as are asked for, after a while."""

    def __init__(self, cost_s: float, workers: int = 1, starts_after_s: int = 20, seed: int = 1, step: float = 1.0):
        self.policy = DesiredWorkers(step)
        self.cost_s = cost_s
        self.workers = workers
        self.waiting = 0
        self.asked: list[float] = []
        self._starts_after_s = starts_after_s
        self._random = random.Random(seed)
        self._arrived = self._served = 0

    def run(self, per_s: Callable[[int], float], seconds: int) -> list[float]:
        """The demand in each second."""
        for second in range(len(self.asked), len(self.asked) + seconds):
            rate = per_s(second)
            came = max(0, round(self._random.gauss(rate, math.sqrt(rate)))) if rate else 0
            self._arrived += came
            done = min(self.waiting + came, int(self.workers / self.cost_s))
            self.waiting += came - done
            self._served += done
            busy_us = int(self._served * self.cost_s * 1e6)
            load = Load(self._arrived, self._served, busy_us, self.waiting, False, self.workers, self.workers)
            self.asked.append(self.policy.update((second + 1) * S, load))
            if len(self.asked) > self._starts_after_s:
                self.workers = math.ceil(self.asked[-self._starts_after_s])
        return self.asked


def changes(asked: list[float]) -> list[tuple[int, float]]:
    """(second, number) where it became another."""
    return [(second + 1, after) for second, (before, after) in enumerate(pairwise(asked)) if before != after]


def test_a_steady_load_gets_what_it_needs_and_keeps_it() -> None:
    asked = Cluster(0.01, workers=3).run(lambda _: 150, 1200)
    assert set(asked[60:]) == {3}, "150 requests/s of 10 ms keep 2.1 of them busy for 0.7 of the time"


def test_a_burst_counts_within_a_scrape() -> None:
    cluster = Cluster(0.01)
    asked = cluster.run(lambda second: 20 if second < 300 else 800, 600)
    assert set(asked[200:300]) == {1}
    assert asked[302] >= 4, "within three seconds"
    assert asked[315] >= math.ceil(800 * 0.01 / TARGET_UTILIZATION), "within one scrape of 15 s there are enough"
    assert cluster.waiting == 0


def test_the_number_falls_late_and_monotonically() -> None:
    asked = Cluster(0.01).run(lambda second: 800 if 100 <= second < 200 else 20, 900)
    held = asked[200 : 200 + HOLD_US // S - 30]
    assert min(held) >= 12, "recent demand is kept"
    assert all(after <= before for before, after in pairwise(asked[210:]))
    assert asked[-1] == 1


def test_to_zero_and_back() -> None:
    cluster = Cluster(0.02)
    asked = cluster.run(lambda second: 50 if second < 200 or second >= 900 else 0, 1000)
    assert asked[200 + IDLE_US // S - 5] >= 1
    assert set(asked[200 + IDLE_US // S + 2 : 900]) == {0}
    assert asked[900] == 1, "at once"
    cluster.run(lambda _: 50, 300)
    assert cluster.waiting == 0


def test_a_waiting_request_gets_a_worker_before_anything_is_measured() -> None:
    policy = DesiredWorkers()
    assert policy.update(0, Load(0, 0, 0, 0, False, 0, 0)) == 0
    assert policy.update(1, Load(1, 0, 0, 1, False, 0, 0)) == 1


def test_a_new_policy_does_not_reduce_the_number_of_workers() -> None:
    policy = DesiredWorkers()
    reported = [policy.update(second * S, Load(0, 0, 0, 0, False, 8, 8)) for second in range(HOLD_US // S)]
    assert set(reported) == {8}


def test_workers_of_several_instances_do_more() -> None:
    def asked(instances: int) -> float:
        policy = DesiredWorkers()
        for second in range(200):
            done = 100 * second
            policy.update(second * S, Load(done, done, done * 50_000, 0, True, instances, 1))
        return policy.value

    assert (asked(1), asked(4)) == (8, 2), "100 requests/s of 50 ms keep 7.1 instances busy"


def test_parts_of_several_queues_are_fractions() -> None:
    parts = [Cluster(0.01, workers=1, starts_after_s=10**6, seed=seed, step=0.25) for seed in range(4)]
    for part in parts:
        part.run(lambda _: 30, 300)
    assert math.ceil(sum(part.asked[-1] for part in parts)) == 2, "four times 0.43 workers"


LOADS = st.lists(
    st.tuples(
        st.integers(0, 5000), st.integers(0, 10**7), st.integers(0, 10**6), st.integers(0, 50), st.integers(0, 400)
    ),
    min_size=1,
    max_size=200,
)
tried = 0


@settings(max_examples=150)
@given(LOADS)
def test_any_measurement_gives_a_valid_number(loads: list[tuple[int, int, int, int, int]]) -> None:
    """A waiting request has a worker; the number stays in its bounds and never falls within `HOLD_US` of a rise."""
    global tried
    policy = DesiredWorkers()
    now_us = arrived = served = busy_us = 0
    before, rose_us = 0.0, -HOLD_US
    for number, (requests, cost_us, waiting, workers, elapsed_ms) in enumerate(loads):
        tried += 1
        now_us += elapsed_ms * 10_000
        arrived, served, busy_us = arrived + requests, served + requests // 2, busy_us + cost_us
        asked = policy.update(now_us, Load(arrived, served, busy_us, waiting, False, workers, workers))
        assert 0 <= asked <= MAX_DESIRED
        assert asked == int(asked)
        if waiting:
            assert asked >= 1
        if number and asked < before and asked:
            assert now_us - rose_us >= HOLD_US
        if asked > before:
            rose_us = now_us
        before = asked


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.floats(0.005, 0.5), st.floats(0.1, 20.0))
def test_a_steady_load_does_not_flap(seed: int, cost_s: float, busy: float) -> None:
    """Whatever the load, after some minutes there are at most a few changes in twenty minutes, none soon undone."""
    global tried
    workers = math.ceil(busy / TARGET_UTILIZATION) + 1
    asked = Cluster(cost_s, workers, seed=seed).run(lambda _: busy / cost_s, 1500)
    tried += len(asked)
    late = changes(asked[300:])
    assert len(late) <= 12
    for (first_s, first), (second_s, second) in pairwise(late):
        assert second > first or second_s - first_s >= HOLD_US // S - 1 or second < first


def test_the_property_test_covers_all_events() -> None:
    print(f"{tried} events")
    assert tried > 5000
