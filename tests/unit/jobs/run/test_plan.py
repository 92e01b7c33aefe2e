"""Jobs are cut, killed, paused and answered in any order: each item is once in the output, in its place."""

from __future__ import annotations

import heapq
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from weir.jobs.run.plan import JobPlan, PlanLimits

EVENTS: Counter[str] = Counter()

LIMITS = st.builds(
    PlanLimits,
    window=st.integers(1, 20),
    most_in_flight=st.integers(1, 40),
    in_flight_bytes=st.integers(1, 2000),
    held_bytes=st.integers(1, 5000),
    span=st.integers(1, 200),
    shard_items=st.integers(1, 30),
    shard_bytes=st.integers(1, 3000),
    shard_age_s=st.sampled_from([0.5, 10.0]),
    attempts=st.integers(1, 4),
)


class Disk:
    """What survives: the items in shards."""

    def __init__(self) -> None:
        self.items: list[int] = []
        self.outcomes: list[str] = []


class Drive:
    """A runner of a plan on a clock of its own, until it ends or is killed."""

    def __init__(self, disk: Disk, total: int, limits: PlanLimits, chance: random.Random) -> None:
        self.disk, self.total, self.limits, self.chance = disk, total, limits, chance
        self.plan = JobPlan(len(disk.items), limits)
        self.now_s = 0.0
        self.asked: dict[int, int] = {}
        self.outcomes: dict[int, str] = {}
        self.in_flight: set[int] = set()
        self.next_read = len(disk.items)
        self.read_end = False
        self.writing = False
        self.sizes: dict[int, int] = {}

    def step(self) -> None:
        chance = self.chance
        can = ["time"]
        if self.plan.has_room():
            can += ["read"] * 3
        can += ["submit"] * 2
        if self.in_flight:
            can += ["answer"] * 4 + ["refused", "once"]
        can += ["write"] * 2
        event = chance.choice(can)
        EVENTS[event] += 1
        getattr(self, event)()
        assert len(self.in_flight) <= self.limits.most_in_flight
        assert self.plan.in_flight == len(self.in_flight)
        in_flight = sum(self.sizes[number] for number in self.in_flight)
        assert in_flight <= self.limits.in_flight_bytes or len(self.in_flight) == 1
        assert self.next_read - len(self.disk.items) <= self.limits.span

    def time(self) -> None:
        wake_s = self.plan.wake_s(self.now_s)
        self.now_s = max(self.now_s + self.chance.random(), wake_s or 0.0)

    def read(self) -> None:
        if self.next_read == self.total:
            self.plan.read_all()
            self.read_end = True
            return
        if self.chance.random() < 0.05:
            number = self.plan.read_unreadable(self.now_s)
            self.outcomes[number] = "unreadable"
        else:
            size = self.chance.randrange(400)
            number = self.plan.read(size)
            self.sizes[number] = size
        assert number == self.next_read
        self.next_read += 1

    def submit(self) -> None:
        for number in self.plan.next_submits(self.now_s, self.chance.randrange(1, 8)):
            assert number not in self.in_flight
            assert number not in self.outcomes
            self.in_flight.add(number)

    def pick(self) -> int:
        return self.chance.choice(sorted(self.in_flight))

    def answer(self) -> None:
        number = self.pick()
        self.in_flight.remove(number)
        self.outcomes[number] = "answered"
        self.plan.completed(self.now_s, number, self.chance.randrange(500))

    def refused(self) -> None:
        number = self.pick()
        self.in_flight.remove(number)
        self.plan.pause(self.now_s, number)

    def once(self) -> None:
        number = self.pick()
        self.asked[number] = self.asked.get(number, 0) + 1
        assert self.asked[number] <= self.limits.attempts
        self.in_flight.remove(number)
        if not self.plan.failed_once(self.now_s, number):
            assert self.asked[number] == self.limits.attempts
            self.outcomes[number] = "failed"
            self.plan.completed(self.now_s, number, 10)

    def write(self) -> None:
        cut = self.plan.next_shard(self.now_s)
        if cut is None:
            return
        assert self.plan.next_shard(self.now_s) is None
        if self.chance.random() < 0.1:
            self.plan.shard_failed()
            return
        assert cut.first == len(self.disk.items)
        assert 1 <= cut.count <= self.limits.shard_items
        numbers = range(cut.first, cut.first + cut.count)
        self.disk.items += numbers
        self.disk.outcomes += [self.outcomes[number] for number in numbers]
        self.plan.shard_written()

    def stop(self) -> None:
        """To the end of what is in flight."""
        self.plan.stop()
        EVENTS["stop"] += 1
        if self.chance.random() < 0.3:
            self.in_flight -= set(self.plan.cancel())
        for _ in range(10_000):
            if self.plan.is_idle:
                break
            assert not self.plan.next_submits(self.now_s, 10)
            assert not self.plan.has_room()
            if self.in_flight:
                self.chance.choice([self.answer, self.refused, self.once])()
            self.write()
        assert self.plan.is_idle
        assert self.plan.written == len(self.disk.items)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 150), LIMITS, st.integers(0, 2**32), st.lists(st.integers(1, 400), max_size=5))
def test_each_item_is_written_once_in_order(total: int, limits: PlanLimits, seed: int, cuts: list[int]) -> None:
    chance = random.Random(seed)
    disk = Disk()
    for steps in cuts:
        drive = Drive(disk, total, limits, chance)
        for _ in range(steps):
            if drive.plan.is_done:
                break
            drive.step()
        if chance.random() < 0.5:
            drive.stop()
        EVENTS["restart"] += 1
        assert disk.items == list(range(len(disk.items)))
    last = Drive(disk, total, limits, chance)
    for _ in range(200_000):
        if last.plan.is_done:
            break
        last.step()
    assert last.plan.is_done
    assert disk.items == list(range(total))
    assert len(disk.outcomes) == total


def test_a_job_that_nobody_serves_asks_ever_more_seldom() -> None:
    plan = JobPlan(0, PlanLimits())
    plan.read(1)
    plan.read(1)
    asked_s: list[float] = []
    now_s = 0.0
    while now_s < 60:
        for number in plan.next_submits(now_s, 100):
            asked_s.append(now_s)
            plan.pause(now_s, number)
        wake_s = plan.wake_s(now_s)
        assert wake_s is not None
        now_s = max(wake_s, now_s + 0.001)
    assert 10 < len(asked_s) < 25
    assert plan.is_paused
    (number,) = plan.next_submits(now_s, 100)
    plan.completed(now_s, number, 1)
    assert not plan.is_paused
    assert len(plan.next_submits(now_s, 100)) == 1


def test_a_slow_job_writes_what_it_has() -> None:
    plan = JobPlan(0, PlanLimits(shard_age_s=10.0))
    for _ in range(3):
        plan.read(1)
    plan.next_submits(0.0, 3)
    plan.completed(1.0, 0, 5)
    plan.completed(2.0, 2, 5)
    assert plan.next_shard(5.0) is None
    assert plan.wake_s(5.0) == 11.0
    cut = plan.next_shard(11.0)
    assert cut is not None
    assert (cut.first, cut.count) == (0, 1)


def test_the_window_grows_while_that_helps_and_no_further() -> None:
    """Workers that have 100 places, each of which takes 0.1 s an item."""
    plan = JobPlan(0, PlanLimits(window=8, most_in_flight=4096, held_bytes=1 << 30))
    now_s, free_s = 0.0, [0.0] * 100
    ends: list[tuple[float, int]] = []
    sizes = []
    for _ in range(15_000):
        while plan.has_room():
            plan.read(1)
        for number in plan.next_submits(now_s, 10_000):
            place = min(range(100), key=free_s.__getitem__)
            free_s[place] = max(free_s[place], now_s) + 0.1
            heapq.heappush(ends, (free_s[place], number))
        now_s, number = heapq.heappop(ends)
        plan.completed(now_s, number, 1)
        if plan.next_shard(now_s) is not None:
            plan.shard_written()
        sizes.append(plan.in_flight)
    assert 100 <= max(sizes) <= 400
    assert sum(sizes[-5_000:]) / 5_000 >= 95
