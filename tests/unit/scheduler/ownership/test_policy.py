"""Ownership of queues: even, stable, one owner for each epoch, and short times without an owner."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.scheduling.ownership import World
from weir.bus.naming.live_queues import LiveQueue
from weir.scheduler.ownership.policy import Acquire, HandOver, OwnershipPolicy, ReadOwner

QUEUES = [LiveQueue(f"m{number}") for number in range(7)]

steps = st.lists(
    st.tuples(
        st.sampled_from(["start", "kill", "pause", "drain", "forget", "run", "lossy", "slow", "failing", "fix"]),
        st.integers(0, 5),
        st.floats(0.05, 2.5),
    ),
    max_size=14,
)

TRIED: Counter[str] = Counter()


def moves(world: World) -> dict[str, int]:
    """How often a queue was acquired or handed over. A scheduler that missed announcements may read records at times."""
    return {action: times for action, times in world.actions.items() if action != "Look"}


@given(seed=st.integers(0, 2**32), queues=st.integers(0, 9), schedulers=st.integers(1, 4), steps=steps)
@settings(deadline=None, max_examples=40)
def test_whatever_happens_each_queue_has_one_owner_in_the_end(
    seed: int, queues: int, schedulers: int, steps: list[tuple[str, int, float]]
) -> None:
    world = World(seed, queues)
    for _ in range(schedulers):
        world.start(skew_ms=world.draw.randrange(-5000, 5000))
    for what, which, seconds in steps:
        alive = world.alive
        process = alive[which % len(alive)]
        staying = sum(not other.is_draining for other in alive)
        if what == "start" and len(alive) < 6:
            world.start(skew_ms=world.draw.randrange(-5000, 5000))
        elif what == "kill" and (staying > 1 or process.is_draining):
            process.is_alive = False
        elif what == "pause":
            process.paused_until_s = world.now_s + seconds
        elif what == "drain" and staying > 1:
            process.is_draining = True
            process.policy.drain()
        elif what == "forget":
            # The broker lost its memory: connected processes are first notified of the reconnection.
            world.store.forget()
            for other in alive:
                other.sure_until_s = float("-inf")
                if other.paused_until_s <= world.now_s:
                    for queue in list(other.held):
                        other.confirm(queue)
        elif what == "lossy":
            world.loss = seconds / 4
        elif what == "slow":
            world.late_s = seconds / 4
        elif what == "failing":
            world.failures = seconds / 4
        elif what == "fix" and world.queues:
            process.fixed = {world.queues[which % len(world.queues)]}
        world.run(seconds / 2)
    world.loss = world.failures = 0.0
    world.late_s = 0.02
    for process in world.alive:
        process.fixed.clear()
        process.paused_until_s = 0.0
    world.run(10.0)
    assert world.owned() == Counter(world.queues)
    shares = [len(process.held) for process in world.alive if not process.is_draining]
    assert max(shares) - min(shares) <= 1
    assert not any(process.held for process in world.alive if process.is_draining)
    before = moves(world)
    world.run(5.0)
    assert moves(world) == before, "nothing is moved at rest"
    TRIED.update(worlds=1, events=world.events, ticks=world.ticks, **world.actions)


def test_the_queues_of_a_killed_scheduler_are_acquired_within_a_second() -> None:
    world = World(1, 10)
    first, second = world.start(), world.start()
    world.run(3.0)
    assert sorted(map(len, (first.held, second.held))) == [5, 5]
    first.is_alive = False
    world.run(0.6)
    assert len(second.held) == 10


def test_a_paused_scheduler_loses_its_queues_and_regains_its_share() -> None:
    world = World(2, 10)
    first, second = world.start(), world.start()
    world.run(3.0)
    before = set(second.held)
    first.paused_until_s = world.now_s + 3.0
    world.run(1.6)
    assert len(second.held) == 10
    assert len(first.held) == 5, "it believes so still"
    world.run(4.0)
    assert (len(first.held), len(second.held)) == (5, 5)
    assert len(before & set(second.held)) >= 0


def policy_of_two(now_s: float = 10.0) -> OwnershipPolicy:
    policy = OwnershipPolicy("a")
    policy.add_queues(0.0, QUEUES)
    for queue in QUEUES:
        policy.acquired(0.0, queue, 5)
    policy.scheduler_seen(now_s, "b", {})
    return policy


def test_a_newcomer_gets_half_of_the_queues_after_a_delay() -> None:
    policy = policy_of_two()
    assert policy.tick(10.1) == []
    given = policy.tick(10.6)
    assert [type(action) for action in given] == [HandOver] * 3
    assert {action.to for action in given if isinstance(action, HandOver)} == {"b"}
    assert policy.tick(10.7) == [], "nothing is decided twice"
    policy.scheduler_gone("b")
    for action in given:
        policy.released(action.queue)
        policy.owner_reported(11.0, action.queue, "b", 6)
    assert policy.tick(11.5) == [], "b has sent no heartbeat since: it may be alive"
    assert policy.tick(12.2) == [Acquire(action.queue) for action in sorted(given)]


def test_a_queue_that_must_not_move_stays() -> None:
    policy = policy_of_two()
    policy._is_movable = lambda queue: queue in QUEUES[:2]
    assert [action.queue for action in policy.tick(10.6)] == [QUEUES[1], QUEUES[0]]


def test_a_scheduler_that_leaves_hands_over_all_and_acquires_nothing() -> None:
    policy = policy_of_two()
    policy.drain()
    assert len(policy.tick(10.0)) == 7
    policy.add_queues(10.0, [LiveQueue("new")])
    assert policy.tick(20.0) == [ReadOwner(LiveQueue("new"))], "it may have been given to this one before"


def test_an_outdated_announcement_changes_nothing() -> None:
    policy = policy_of_two()
    policy.owner_reported(11.0, QUEUES[0], "b", 4, is_read=False)
    assert policy.held == frozenset(QUEUES)
    policy.owner_reported(11.0, QUEUES[0], "b", 6, is_read=False)
    assert policy.held == frozenset(QUEUES[1:])
