"""Order, timeouts and bounds of one queue; whole lives of models are in `test_model_simulation`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.scheduling.requests import FormedQueue, keys, request, requests_in_memory
from tests.support.steps import steps
from weir.scheduler.batching.dynamic_former import DynamicFormer
from weir.scheduler.batching.former import Former, SingleFormer
from weir.scheduler.batching.ordered_queue import NEVER_US, VIRTUAL_DEADLINE_US, OrderedQueue
from weir.scheduler.batching.queue_rules import LevelRules, QueueRules

SECOND_US = 1_000_000


def drained(queue: OrderedQueue) -> list[int]:
    return [queue.popleft().key for _ in range(len(queue))]


def test_levels_come_before_deadlines_and_deadlines_before_arrival():
    queue = OrderedQueue(QueueRules(levels=2, default_level=2))
    queue.add(
        [
            request(0, key=1),
            request(0, key=2, deadline_ms=500),
            request(0, key=3, deadline_ms=400),
            request(0, key=4, priority=1),
            request(0, key=5, priority=9, deadline_ms=300),
        ]
    )
    assert drained(queue) == [4, 5, 3, 2, 1]


def test_a_distant_deadline_delays_no_request_and_none_is_overtaken_forever():
    queue = OrderedQueue(QueueRules())
    queue.add([request(0, key=1, deadline_ms=60_000), request(1, key=2)])
    late_us = VIRTUAL_DEADLINE_US + 2
    queue.add([request(late_us, key=3, deadline_ms=late_us // 1000 + 1)])
    assert drained(queue) == [1, 2, 3]


def test_deadlines_change_no_order_that_was_promised():
    queue = OrderedQueue(QueueRules(is_deadline_first=False))
    queue.add([request(0, key=1), request(0, key=2, deadline_ms=1)])
    assert drained(queue) == [1, 2]


def test_a_timeout_rejects_or_delays_as_its_level_says():
    rules = QueueRules(
        levels=2,
        default_level=2,
        by_level={1: LevelRules(timeout_us=100), 2: LevelRules(timeout_us=50, delays=True, allows_override=True)},
    )
    queue = OrderedQueue(rules)
    queue.add([request(0, key=1, priority=1), request(0, key=2), request(0, key=3, timeout_us=10)])
    assert queue.next_expiry_us == 10
    assert queue.overdue(9) == []
    assert queue.overdue(60) == []
    queue.add([request(60, key=4)])
    assert keys(queue.overdue(100)) == [1]
    assert queue.next_expiry_us == 110
    assert drained(queue) == [4, 3, 2]


def test_a_delayed_request_still_has_its_deadline():
    queue = OrderedQueue(QueueRules(LevelRules(timeout_us=50, delays=True)))
    queue.add([request(0, key=1, deadline_ms=1)])
    assert queue.overdue(50) == []
    assert keys(queue.overdue(1_000)) == [1]
    assert queue.next_expiry_us == NEVER_US


def test_a_request_sent_in_time_does_not_time_out_after_a_loss():
    queue = OrderedQueue(QueueRules(LevelRules(max_size=1, timeout_us=50)))
    lost, waiting = request(0, key=1), request(0, key=2)
    lost.attempts = 1
    queue.add([waiting])
    queue.put_back([lost])
    assert keys(queue.overdue(60)) == [2]
    assert drained(queue) == [1]


def test_levels_have_room_of_their_own_and_leave_nothing_behind():
    queue = OrderedQueue(QueueRules(LevelRules(max_size=1), levels=2**64 - 1, default_level=5))
    coming = [request(key=1, priority=7), request(key=2, priority=7), request(key=3), request(key=4, priority=2**64)]
    assert keys(queue.add(coming)) == [2, 4]
    taken = [queue.popleft()]
    assert keys(queue.add([request(key=5)])) == [5], "a request taken for an unsent batch still waits"
    queue.leave(taken)
    assert queue.add([request(key=6)]) == []
    assert keys(queue.drain()) == [6, 1]
    assert keys(queue.add([request(key=7), request(key=8, priority=7)])) == [], "every level has its room again"


def test_entries_of_requests_that_leave_in_time_do_not_pile_up():
    before = requests_in_memory()
    queue = OrderedQueue(QueueRules(LevelRules(timeout_us=3600 * SECOND_US)))
    for now_us in range(2_000):
        queue.add([request(now_us)])
        queue.leave([queue.popleft()])
    assert len(queue) == 0
    assert requests_in_memory() - before < 200


def test_a_queue_without_deadlines_is_plain_again():
    formed = FormedQueue(DynamicFormer(4))
    formed.enqueue([request(0, key=1), request(0, key=2, deadline_ms=SECOND_US)])
    assert formed.is_timed
    assert keys(formed.next_batch(0)) == [1, 2]
    formed.enqueue([request(1, key=3)])
    assert not formed.is_timed
    assert keys(formed.next_batch(1)) == [3]


def test_a_higher_priority_enters_a_forming_batch():
    rules = QueueRules(levels=2, default_level=2)
    formed = FormedQueue(DynamicFormer(4, max_queue_delay_us=100, rules=rules))
    formed.enqueue([request(0, key=1), request(0, key=2), request(0, key=3, shape_key="other")])
    assert formed.ready_at_us() == 0
    formed.enqueue([request(5, key=4, priority=1), request(5, key=5, priority=1, shape_key="third")])
    assert keys(formed.next_batch(5)) == [4]
    assert formed.next_batch(5) is not None


def test_a_request_that_no_longer_limits_a_batch_does_not_end_it():
    formed = FormedQueue(DynamicFormer(4, max_queue_delay_us=100, rules=QueueRules(LevelRules(timeout_us=1_000))))
    formed.enqueue([request(0, key=1)])
    other = request(0, key=2, shape_key="other")
    formed.enqueue([other])
    assert formed.ready_at_us() == 0
    other.cancelled = True
    formed.drop_cancelled([other])
    assert formed.next_batch(1) is None
    assert formed.ready_at_us() == 100


def cancel_all(formed: FormedQueue, count: int) -> None:
    """So many requests come, and are cancelled one after the other."""
    requests = [request(at, priority=at % 3) for at in range(count)]
    formed.enqueue(requests)
    formed.ready_at_us()
    for one in requests:
        one.cancelled = True
        formed.drop_cancelled([one])
        if len(formed):
            formed.ready_at_us()
    assert len(formed) == 0
    assert formed.drain() == []


@pytest.mark.parametrize(
    "new_former",
    [
        lambda: DynamicFormer(8),
        SingleFormer,
        lambda: DynamicFormer(8, rules=QueueRules(LevelRules(timeout_us=SECOND_US), levels=3)),
    ],
    ids=["dynamic", "default", "by priority"],
)
def test_cancelling_many_is_not_quadratic(new_former: Callable[[], Former]):
    few, many = (steps(lambda count=count: cancel_all(FormedQueue(new_former()), count)) for count in (500, 4_000))
    assert many < 8 * few * 1.5, "looking through the queue for each would take 64 times as many steps"
