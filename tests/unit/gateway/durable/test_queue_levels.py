"""What may wait on disk for each model, and what is refused with 429."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.durable.queue_limits import QueueLevels
from schemas.errors import ErrorCode
from schemas.queue_bounds import QueueBounds

BOUNDS = {"small": QueueBounds(3, 100, 60.0)}


def levels() -> QueueLevels:
    return QueueLevels(lambda model: BOUNDS.get(model, QueueBounds(1000, 1 << 20, 60.0)))


def test_one_below_at_and_above_the_count() -> None:
    queue = levels()
    queue.added("small", 2, 10)
    assert queue.admit("small") is None
    queue.added("small", 1, 10)
    error = queue.admit("small")
    assert error is not None
    assert (error.code, error.http_status) == (ErrorCode.RESOURCE_EXHAUSTED, 429)
    assert error.message == "the queue of model 'small' is full: 3 requests wait, and 3 may"
    assert queue.admit("other") is None
    queue.ended("small", 1, 10)
    assert queue.admit("small") is None


def test_one_below_at_and_above_the_bytes() -> None:
    queue = levels()
    queue.added("small", 1, 60)
    assert queue.admit("small", 1, 40) is None
    error = queue.admit("small", 1, 41)
    assert error is not None
    assert "60 bytes wait, and with 41 more they would exceed 100" in error.message


def test_what_the_broker_says_holds() -> None:
    queue = levels()
    queue.observe("small", 3, 50)
    assert queue.admit("small") is not None
    queue.observe("small", 0, 0)
    assert (len(queue), queue.waiting("small")) == (0, (0, 0))
    queue.ended("small", 5, 5)
    assert queue.waiting("small") == (0, 0)


EVENTS = st.lists(st.tuples(st.sampled_from(["small", "a", "b"]), st.booleans(), st.integers(0, 50)), max_size=60)


@settings(deadline=None, database=None)
@given(EVENTS)
def test_counts_add_up_and_nothing_is_left(events: list[tuple[str, bool, int]]) -> None:
    queue = levels()
    waiting: dict[str, list[int]] = {}
    for model, is_added, size in events:
        mine = waiting.setdefault(model, [])
        if is_added and queue.admit(model, 1, size) is None:
            queue.added(model, 1, size)
            mine.append(size)
        elif mine:
            queue.ended(model, 1, mine.pop())
        assert queue.waiting(model) == (len(mine), sum(mine))
        assert len(waiting.get("small", [])) <= 3
    assert len(queue) == Counter(map(bool, waiting.values()))[True]
