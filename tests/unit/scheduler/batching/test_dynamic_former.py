"""Each rule of the module's docstring by example, and all of them against an oracle that looks at the whole queue."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.scheduling.requests import FormedQueue, keys, request
from weir.scheduler.batching.dynamic_former import DynamicFormer
from weir.scheduler.batching.queue_rules import LevelRules, QueueRules
from weir.scheduler.batching.request import QueuedRequest, arrival
from weir.schemas.wire.observation import BatchReason


def formed_with(*sizes: int, at_us: int = 0, **options: object) -> FormedQueue:
    """A queue that holds requests of these batch sizes, with keys 1, 2, …"""
    formed = FormedQueue(DynamicFormer(**{"max_batch_size": 8, **options}))
    formed.enqueue([request(at_us, key=key, batch_size=size) for key, size in enumerate(sizes, 1)])
    return formed


def test_without_delay_all_that_fits_goes_at_once():
    formed = formed_with(1, 1, 1)
    assert keys(formed.next_batch(0)) == [1, 2, 3]
    assert formed.next_batch(0) is None


def test_a_batch_stops_before_the_maximum_and_never_splits_a_request():
    formed = formed_with(3, 3, 3, 1)
    assert keys(formed.next_batch(0)) == [1, 2]
    assert keys(formed.next_batch(0)) == [3, 4]


def test_a_request_larger_than_the_maximum_runs_alone():
    formed = formed_with(1, 9, 1)
    assert [keys(formed.next_batch(0)) for _ in range(3)] == [[1], [2], [3]]


def test_a_maximum_of_zero_is_one():
    assert keys(formed_with(1, 1, max_batch_size=0).next_batch(0)) == [1]


def test_the_largest_available_preferred_size_is_sent():
    formed = formed_with(1, 1, 1, 1, 1, 1, 1, preferred_batch_sizes=[2, 6], max_queue_delay_us=100)
    assert keys(formed.next_batch(0)) == [1, 2, 3, 4, 5, 6]
    assert formed.next_batch(0) is None
    assert keys(formed.next_batch(100)) == [7]


def test_without_delay_a_preferred_size_goes_before_the_rest():
    formed = formed_with(1, 1, 1, 1, 1, preferred_batch_sizes=[4])
    assert keys(formed.next_batch(0)) == [1, 2, 3, 4]
    assert keys(formed.next_batch(0)) == [5]


def test_once_the_oldest_has_waited_too_long_preferred_sizes_do_not_matter():
    formed = formed_with(1, 1, 1, 1, 1, preferred_batch_sizes=[4], max_queue_delay_us=100)
    assert keys(formed.next_batch(100)) == [1, 2, 3, 4, 5]


def test_a_batch_that_can_not_grow_goes_before_its_delay_is_over():
    formed = FormedQueue(DynamicFormer(8, preferred_batch_sizes=[4], max_queue_delay_us=100))
    formed.enqueue([request(key=1, shape_key="a"), request(key=2, shape_key="b")])
    assert keys(formed.next_batch(0)) == [1]
    assert formed.next_batch(0) is None


def test_a_request_beyond_every_preferred_size_goes_before_its_delay_is_over():
    assert keys(formed_with(7, preferred_batch_sizes=[4], max_queue_delay_us=100).next_batch(0)) == [1]


def test_a_request_beyond_every_preferred_size_is_left_out():
    formed = formed_with(3, preferred_batch_sizes=[2, 6], max_queue_delay_us=100)
    assert formed.next_batch(0) is None
    formed.enqueue([request(50, key=2, batch_size=4)])
    assert formed.ready_at_us() == 0
    assert keys(formed.next_batch(50)) == [1]
    assert formed.next_batch(149) is None
    assert formed.ready_at_us() == 150
    assert keys(formed.next_batch(150)) == [2]


def test_once_the_oldest_has_waited_too_long_all_that_fits_goes():
    formed = formed_with(3, 4, preferred_batch_sizes=[2, 6], max_queue_delay_us=100)
    assert keys(formed.next_batch(100)) == [1, 2]


def test_a_batch_that_may_grow_waits_for_its_delay():
    formed = formed_with(1, at_us=50, max_queue_delay_us=100)
    assert formed.next_batch(149) is None
    assert formed.ready_at_us() == 150
    assert keys(formed.next_batch(150)) == [1]


def test_a_full_batch_is_ready_since_its_first_request_came():
    assert formed_with(8, at_us=50, max_queue_delay_us=100).ready_at_us() == 50


def test_only_a_full_batch_is_returned_with_full_only():
    formed = formed_with(4, 3)
    assert formed.next_batch(0, full_only=True) is None
    formed.enqueue([request(key=3, batch_size=2)])
    assert keys(formed.next_batch(0, full_only=True)) == [1, 2]


def test_bodies_of_a_batch_stay_below_the_limit_except_that_of_one_request():
    formed = FormedQueue(DynamicFormer(8))
    formed.former.max_batch_bytes = 10
    formed.enqueue([request(key=key, body=bytes(size)) for key, size in enumerate((30, 5, 5, 1), 1)])
    assert [keys(formed.next_batch(0)) for _ in range(3)] == [[1], [2, 3], [4]]


def test_a_request_that_runs_alone_shares_no_batch():
    formed = FormedQueue(DynamicFormer(8))
    requests = [request(key=key) for key in (1, 2, 3)]
    requests[1].run_alone()
    formed.enqueue(requests)
    assert [keys(formed.next_batch(0)) for _ in range(3)] == [[1], [2], [3]]


def test_a_request_that_runs_alone_does_not_wait_for_others():
    formed = FormedQueue(DynamicFormer(8, max_queue_delay_us=100))
    alone = request(10, key=1)
    alone.run_alone()
    formed.enqueue([alone])
    assert formed.ready_at_us() == 10
    assert keys(formed.next_batch(20, full_only=True)) == [1]


@pytest.mark.parametrize("change", ["put back", "cancel"])
def test_the_forming_batch_is_formed_again(change: str):
    formed = FormedQueue(DynamicFormer(2, max_queue_delay_us=100))
    first, second = request(10, key=1), request(20, key=2)
    formed.enqueue([first, second])
    assert formed.ready_at_us() == 10
    if change == "put back":
        formed.put_back([request(5, key=0)])
        assert keys(formed.next_batch(30)) == [0, 1]
    else:
        first.cancelled = True
        formed.drop_cancelled([first])
        assert formed.next_batch(30) is None
        assert formed.ready_at_us() == 120


@dataclass(frozen=True)
class Rules:
    """The rules of the module, written for a whole queue instead of one that grows."""

    max_batch_size: int
    preferred: tuple[int, ...]
    delay_us: int
    max_bytes: int

    def batch(self, queue: list[QueuedRequest], now_us: int, full_only: bool) -> list[QueuedRequest] | None:
        if not queue:
            return None
        prefix = self._longest(queue)
        sizes = [sum(r.batch_size for r in prefix[:n]) for n in range(1, len(prefix) + 1)]
        preferred_sizes = self.preferred or (self.max_batch_size,)
        cannot_grow = len(prefix) < len(queue) or sizes[-1] >= max(preferred_sizes) or queue[0].runs_alone
        if full_only and not cannot_grow:
            return None
        waited = now_us - queue[0].enqueued_us
        preferred = [n for n, size in enumerate(sizes, 1) if size in preferred_sizes]
        beyond = [n for n, size in enumerate(sizes) if size > max(preferred_sizes) and n]
        preferred = preferred or beyond[:1]
        if preferred and (self.delay_us == 0 or waited < self.delay_us):
            return queue[: preferred[-1]]
        if cannot_grow or waited >= self.delay_us:
            return prefix
        return None

    def _longest(self, queue: list[QueuedRequest]) -> list[QueuedRequest]:
        prefix = queue[:1]
        for candidate in queue[1:]:
            together = [*prefix, candidate]
            if (
                sum(r.batch_size for r in together) > self.max_batch_size
                or sum(len(r.body) for r in together) > self.max_bytes
                or candidate.shape_key != queue[0].shape_key
            ):
                break
            prefix = together
        return prefix


arrivals = st.lists(
    st.tuples(st.integers(1, 5), st.sampled_from(["", "a"]), st.sampled_from([0, 0, 0, 7])), min_size=1, max_size=6
)
events = st.lists(
    st.one_of(
        st.tuples(st.just("enqueue"), arrivals),
        st.tuples(st.just("next batch"), st.booleans()),
        st.tuples(st.just("put back"), st.integers(1, 4)),
        st.tuples(st.just("alone"), st.integers(0, 9)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("advance"), st.integers(1, 60)),
    ),
    max_size=40,
)
rules = st.builds(
    Rules,
    st.sampled_from([1, 4, 8]),
    st.sampled_from([(), (2,), (4,), (2, 4), (3, 4)]),
    st.sampled_from([0, 50]),
    st.sampled_from([20, 1 << 20]),
)


@given(rules, events)
def test_batches_are_those_of_the_rules_whatever_happens_between(rules: Rules, events: list[tuple[str, object]]):
    preferred = tuple(size for size in rules.preferred if size <= rules.max_batch_size)
    rules = Rules(rules.max_batch_size, preferred, rules.delay_us, rules.max_bytes)
    formed = FormedQueue(DynamicFormer(rules.max_batch_size, preferred, rules.delay_us, QueueRules(LevelRules(20))))
    formed.former.max_batch_bytes = rules.max_bytes
    queue: list[QueuedRequest] = []
    out: list[QueuedRequest] = []
    now_us = 0
    for number, (name, value) in enumerate(events):
        if name == "enqueue":
            new = [
                request(now_us, key=number * 10 + i, batch_size=size, shape_key=shape, body=bytes(length))
                for i, (size, shape, length) in enumerate(value)
            ]
            refused = formed.enqueue(new)
            assert len(queue) + len(new) - len(refused) <= max(20, len(queue))
            queue += new[: len(new) - len(refused)]
        elif name == "next batch":
            expected = rules.batch(queue, now_us, value)
            batch = formed.next_batch(now_us, value)
            assert batch == expected
            out += batch or []
            queue = queue[len(batch or []) :]
        elif name == "put back":
            formed.put_back(out[:value])
            queue, out = sorted([*queue, *out[:value]], key=arrival), out[value:]
        elif name == "alone" and out:
            out[value % len(out)].run_alone()
        elif name == "cancel" and queue:
            gone = queue.pop(value % len(queue))
            gone.cancelled = True
            formed.drop_cancelled([gone])
        elif name == "advance":
            now_us += value
        assert len(formed) == len(queue)
        if queue:
            ready_us = formed.ready_at_us()
            assert ready_us <= queue[0].enqueued_us + rules.delay_us
            assert rules.batch(queue, max(now_us, ready_us), full_only=False) is not None
            if ready_us > now_us:
                assert rules.batch(queue, now_us, full_only=False) is None
    assert formed.drain() == queue


@pytest.mark.parametrize(
    ("sizes", "options", "at_us", "reason"),
    [
        ((1, 1), {}, 0, BatchReason.FREE),
        ((4, 4, 1), {}, 0, BatchReason.FULL),
        ((3, 3, 3), {}, 0, BatchReason.CLOSED),
        ((1, 1, 1), {"preferred_batch_sizes": [2, 8], "max_queue_delay_us": 100}, 0, BatchReason.PREFERRED),
        ((1, 1, 1), {"max_queue_delay_us": 100}, 100, BatchReason.DELAY),
        ((4, 4), {"max_queue_delay_us": 100}, 0, BatchReason.FULL),
        ((9,), {"max_queue_delay_us": 100}, 0, BatchReason.FULL),
        ((1, 1, 1), {"preferred_batch_sizes": [2], "max_queue_delay_us": 100}, 100, BatchReason.DELAY),
    ],
)
def test_a_batch_has_the_reason_for_which_it_was_sent(sizes, options, at_us, reason):
    formed = formed_with(*sizes, **options)
    assert formed.next_batch(at_us)
    assert formed.former.reason is reason


def test_a_request_that_runs_alone_is_the_reason():
    formed = FormedQueue(DynamicFormer(max_batch_size=8, max_queue_delay_us=100))
    lost = request(0, key=1)
    lost.run_alone()
    formed.enqueue([lost])
    assert keys(formed.next_batch(0)) == [1]
    assert formed.former.reason is BatchReason.ALONE
