"""Turns of owners in a queue: shares by weight whatever is offered, nobody starves, and one owner's queue is as without."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.scheduling.requests import FormedQueue, keys, request, requests_in_memory
from tests.support.steps import steps
from weir.scheduler.batching.dynamic_former import DynamicFormer
from weir.scheduler.batching.former import EnsembleFormer, Former, SingleFormer
from weir.scheduler.batching.ordered_queue import FairOrderedQueue
from weir.scheduler.batching.queue_rules import LevelRules, QueueRules
from weir.scheduler.batching.request import QueuedRequest
from weir.scheduler.batching.version_queue import VersionQueue
from weir.schemas.wire.calls import Caller

quick = settings(deadline=None, max_examples=60)


def of(owner: str, count: int = 1, weight: int = 1, now_us: int = 0, **terms: Any) -> list[QueuedRequest]:
    """Requests of one owner that arrive together."""
    made = [request(now_us, **terms) for _ in range(count)]
    for each in made:
        each.caller = Caller(owner, 0, weight)
    return made


def rows(batch: list[QueuedRequest] | None) -> Counter[str]:
    """The rows of each owner in a batch."""
    assert batch is not None
    return Counter({owner: sum(r.batch_size for r in batch if r.caller.owner == owner) for owner in owners(batch)})


def owners(batch: list[QueuedRequest]) -> list[str]:
    return [each.caller.owner for each in batch]


def drained(queue: FormedQueue) -> list[list[QueuedRequest]]:
    batches = []
    while len(queue):
        batch = queue.next_batch(0)
        assert batch is not None
        batches.append(batch)
    return batches


@pytest.mark.parametrize("former", [SingleFormer(), DynamicFormer(8), EnsembleFormer()])
def test_who_offers_fifty_times_as_much_makes_the_other_wait_for_its_turn_only(former: Former) -> None:
    queue = FormedQueue(former)
    queue.enqueue(of("busy", 500))
    for _ in range(20):
        (quiet,) = of("quiet")
        queue.enqueue([quiet])
        queue.enqueue(of("busy", 50))
        batches = [queue.next_batch(0), queue.next_batch(0)]
        assert quiet in [each for batch in batches for each in batch or ()]


@quick
@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9), min_size=2, max_size=4),
    st.lists(st.integers(1, 4), min_size=1, max_size=7),
    st.sampled_from([1, 4, 8]),
)
def test_places_of_those_who_always_wait_are_as_their_weights(
    weights: dict[str, int], sizes: list[int], largest: int
) -> None:
    queue = FormedQueue(DynamicFormer(largest))
    for owner, weight in weights.items():
        for number in range(200):
            queue.enqueue(of(owner, 1, weight, batch_size=sizes[number % len(sizes)]))
    waiting, served = Counter(dict.fromkeys(weights, 200)), Counter[str]()
    least = min(weights.values())
    while True:
        batch = queue.next_batch(0)
        assert batch is not None
        for each in batch:
            waiting[each.caller.owner] -= 1
            served[each.caller.owner] += each.batch_size
        if not all(waiting.values()):
            break
        normal = {owner: served[owner] / weight for owner, weight in weights.items()}
        # A turn and a request of each, and for the request that did not fit into the batch another one.
        assert max(normal.values()) - min(normal.values()) <= 1 / least + 3 * max(sizes) / least


@quick
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["", "x"]), st.integers(0, 3)), max_size=40), st.data()
)
def test_requests_that_return_to_the_queue_are_lost_nowhere_and_cost_their_owner_nothing(
    arrivals: list[tuple[str, str, int]], data: st.DataObject
) -> None:
    queue = FormedQueue(DynamicFormer(4, max_queue_delay_us=100))
    left: dict[QueuedRequest, None] = {}
    for now_us, (owner, shape_key, action) in enumerate(arrivals):
        coming = of(owner, 1, 1 + (owner == "b"), now_us, shape_key=shape_key)
        assert queue.enqueue(coming) == []
        left.update(dict.fromkeys(coming))
        queue.ready_at_us()  # forms a batch
        if action == 1 and left:
            cancelled = data.draw(st.sampled_from(list(left)))
            cancelled.cancelled = True
            queue.drop_cancelled([cancelled])
            del left[cancelled]
        elif action == 2:
            queue.return_forming()
        elif action == 3:
            for each in queue.next_batch(now_us) or ():
                del left[each]
        assert len(queue) == len(left)
    for batch in drained_at(queue, 10_000):
        assert len({each.shape_key for each in batch}) == 1
        for each in batch:
            del left[each]
    assert not left


def drained_at(queue: FormedQueue, now_us: int) -> list[list[QueuedRequest]]:
    batches = []
    while len(queue):
        batch = queue.next_batch(now_us)
        assert batch
        batches.append(batch)
    return batches


def test_a_batch_that_returns_is_formed_of_the_same_shares_again() -> None:
    queue = FormedQueue(DynamicFormer(8, preferred_batch_sizes=(100,), max_queue_delay_us=100))
    queue.enqueue(of("a", 80) + of("b", 80, 3))
    served = Counter[str]()
    for _ in range(8):
        for _ in range(5):
            queue.ready_at_us()
            queue.return_forming()
        served += rows(queue.next_batch(100))
    assert abs(served["b"] - 3 * served["a"]) <= 4
    assert served.total() == 64


def test_the_queue_of_one_owner_is_plain_and_in_the_order_of_arrival() -> None:
    queue = FormedQueue(DynamicFormer(4))
    for owner in ("a", "b", ""):
        requests = of(owner, 6)
        queue.enqueue(requests[:3])
        queue.enqueue(requests[3:])
        assert not queue.is_timed
        assert [each for batch in drained(queue) for each in batch] == requests


def test_a_queue_is_plain_again_once_requests_of_several_owners_have_left() -> None:
    queue = FormedQueue(DynamicFormer(4))
    queue.enqueue(of("a", 2))
    queue.enqueue(of("b", 2))
    assert queue.is_timed
    assert sorted(owners(queue.next_batch(0) or [])) == ["a", "a", "b", "b"]
    queue.enqueue(of("b", 1))
    assert not queue.is_timed
    queue.enqueue([request(1)], is_plain=True)
    assert queue.is_timed, "nobody's requests take turns with those of an owner"
    assert len(drained(queue)) == 1


def test_priorities_come_before_owners_and_deadlines_within_one() -> None:
    queue = FormedQueue(DynamicFormer(1, rules=QueueRules(levels=2, default_level=2)))
    late, first = of("a", key=1), of("a", key=2, deadline_ms=1)
    queue.enqueue(late + first)
    queue.enqueue(of("b", key=3) + of("b", key=4, priority=1) + of("b", key=5, priority=1))
    assert [keys(batch) for batch in drained(queue)] == [[4], [5], [2], [3], [1]]


def test_delayed_requests_come_last_whoever_owns_them() -> None:
    rules = QueueRules(LevelRules(timeout_us=50, delays=True))
    queue = FormedQueue(DynamicFormer(1, rules=rules))
    queue.enqueue(of("a", key=1))
    queue.enqueue(of("b", key=2))
    assert queue.overdue(50) == []
    queue.enqueue(of("b", 1, 1, 60, key=3) + of("b", 1, 1, 60, key=4))
    assert [keys(batch) for batch in drained(queue)] == [[3], [4], [1], [2]]


def test_owners_whose_shapes_differ_get_full_batches_and_their_shares() -> None:
    queue = FormedQueue(DynamicFormer(8))
    queue.enqueue(of("a", 200, shape_key="x"))
    queue.enqueue(of("b", 200, 3, shape_key="y"))
    batches = [queue.next_batch(0) for _ in range(24)]
    assert {len(batch or ()) for batch in batches} == {8}
    served = sum(map(rows, batches), Counter[str]())
    assert abs(served["b"] - 3 * served["a"]) <= 3 * 8


def test_one_whose_turn_it_is_has_the_first_place_of_the_next_batch() -> None:
    queue = FormedQueue(DynamicFormer(4))
    queue.enqueue(of("a", 20, shape_key="x"))
    (other,) = of("b", shape_key="y")
    queue.enqueue([other])
    assert other in [*(queue.next_batch(0) or ()), *(queue.next_batch(0) or ())]


def test_a_full_queue_takes_the_places_of_those_who_have_most() -> None:
    queue = FormedQueue(DynamicFormer(4, rules=QueueRules(LevelRules(max_size=10))))
    flood = of("busy", 12)
    assert queue.enqueue(flood) == flood[10:]
    assert queue.enqueue(of("busy")) != []
    quiet = of("quiet", 7)
    displaced = queue.enqueue(quiet)
    assert len(displaced) == 7
    assert sum(each in quiet for each in displaced) == 2, "it has half of the places"
    assert not set(displaced) & set(flood[:4]), "who came first stays"
    assert len(queue) == 10
    assert sum(map(rows, drained(queue)), Counter[str]()) == {"busy": 5, "quiet": 5}


def test_a_weight_that_changes_counts_at_once() -> None:
    queue = FormedQueue(DynamicFormer(1))
    queue.enqueue(of("a", 100) + of("b", 100))
    for _ in range(10):
        queue.next_batch(0)
    queue.enqueue(of("b", 1, 4))
    served = sum((rows(queue.next_batch(0)) for _ in range(50)), Counter[str]())
    assert abs(served["b"] - 40) <= 4


def test_a_long_queue_costs_a_request_no_more_than_a_short_one() -> None:
    def steps_of(count: int) -> int:
        queue = FormedQueue(DynamicFormer(4))
        for number in range(count):
            queue.enqueue(of(f"owner {number % 50}"))
        queue.ready_at_us()  # what has come since the last time takes its place
        return steps(lambda: [queue.next_batch(0) for _ in range(20)])

    assert steps_of(4_000) < 2 * steps_of(400)


def test_owners_who_come_and_go_leave_nothing_behind() -> None:
    before = requests_in_memory()
    queue = FairOrderedQueue(QueueRules(levels=1000, default_level=5))
    kept = of("kept", priority=900)
    queue.add(kept)
    for number in range(3_000):
        coming = of(f"owner {number}", 3, priority=1 + number % 800)
        queue.add(coming)
        queue.drop(coming[1:])
        queue.leave([queue.popleft()])
    assert len(queue) == 1
    assert len(queue._keys) <= 801
    assert (queue._stored, len(queue._groups)) in [(1, 1), (0, 0)]
    assert queue.popleft() is kept[0]
    assert requests_in_memory() - before < 200


def refused(version: VersionQueue, requests: list[QueuedRequest]) -> list[tuple[str, bool]]:
    """The owners of those that are rejected on arrival, and whether their callers are to hold back others."""
    return [(f.request.caller.owner, f.error.backoff_us > 0) for f in version.enqueue(requests)]


def test_who_waits_too_long_is_rejected_for_its_own_requests() -> None:
    version = VersionQueue(1, SingleFormer())
    version.set_instances("w", 1)
    version.cost.record(1, 10_000)
    version.limit_wait(100_000)
    assert refused(version, of("busy", 60)) == [("busy", False)] * 49
    assert refused(version, of("busy")) == [("busy", True)]
    assert refused(version, of("quiet")) == [], "it waits for its turn only"
    assert refused(version, of("quiet", 10)) == [("quiet", False)] * 5, "each of its own takes twice as long now"
    assert refused(version, of("heavy", 7, 8)) == []
    assert refused(version, [request()]) == []
    assert [f.request.caller.owner for f in version.enqueue(of("busy"))] == ["busy"]
