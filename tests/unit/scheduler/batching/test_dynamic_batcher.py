"""Each rule of the module's docstring by example, and all of them against an oracle that looks at the whole queue."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.scheduling.requests import keys, request
from weir.scheduler.batching.dynamic_batcher import DynamicBatcher
from weir.scheduler.batching.request import QueuedRequest, arrival
from weir.scheduler.batching.request_queue import LevelRules, QueueRules
from weir.schemas.wire.observation import BatchReason


def batcher_with(*sizes: int, at_us: int = 0, **options: object) -> DynamicBatcher:
    """A batcher whose queue holds requests of these batch sizes, with keys 1, 2, …"""
    batcher = DynamicBatcher(**{"max_batch_size": 8, **options})
    batcher.enqueue([request(at_us, key=key, batch_size=size) for key, size in enumerate(sizes, 1)])
    return batcher


def test_without_delay_all_that_fits_goes_at_once():
    batcher = batcher_with(1, 1, 1)
    assert keys(batcher.next_batch(0)) == [1, 2, 3]
    assert batcher.next_batch(0) is None


def test_a_batch_stops_before_the_maximum_and_never_splits_a_request():
    batcher = batcher_with(3, 3, 3, 1)
    assert keys(batcher.next_batch(0)) == [1, 2]
    assert keys(batcher.next_batch(0)) == [3, 4]


def test_a_request_larger_than_the_maximum_runs_alone():
    batcher = batcher_with(1, 9, 1)
    assert [keys(batcher.next_batch(0)) for _ in range(3)] == [[1], [2], [3]]


def test_a_maximum_of_zero_is_one():
    assert keys(batcher_with(1, 1, max_batch_size=0).next_batch(0)) == [1]


def test_the_largest_available_preferred_size_is_sent():
    batcher = batcher_with(1, 1, 1, 1, 1, 1, 1, preferred_batch_sizes=[2, 6], max_queue_delay_us=100)
    assert keys(batcher.next_batch(0)) == [1, 2, 3, 4, 5, 6]
    assert batcher.next_batch(0) is None
    assert keys(batcher.next_batch(100)) == [7]


def test_without_delay_a_preferred_size_goes_before_the_rest():
    batcher = batcher_with(1, 1, 1, 1, 1, preferred_batch_sizes=[4])
    assert keys(batcher.next_batch(0)) == [1, 2, 3, 4]
    assert keys(batcher.next_batch(0)) == [5]


def test_once_the_oldest_has_waited_too_long_preferred_sizes_do_not_matter():
    batcher = batcher_with(1, 1, 1, 1, 1, preferred_batch_sizes=[4], max_queue_delay_us=100)
    assert keys(batcher.next_batch(100)) == [1, 2, 3, 4, 5]


def test_a_batch_that_can_not_grow_goes_before_its_delay_is_over():
    batcher = DynamicBatcher(8, preferred_batch_sizes=[4], max_queue_delay_us=100)
    batcher.enqueue([request(key=1, shape_key="a"), request(key=2, shape_key="b")])
    assert keys(batcher.next_batch(0)) == [1]
    assert batcher.next_batch(0) is None


def test_a_request_beyond_every_preferred_size_goes_before_its_delay_is_over():
    assert keys(batcher_with(7, preferred_batch_sizes=[4], max_queue_delay_us=100).next_batch(0)) == [1]


def test_a_request_beyond_every_preferred_size_is_left_out():
    batcher = batcher_with(3, preferred_batch_sizes=[2, 6], max_queue_delay_us=100)
    assert batcher.next_batch(0) is None
    batcher.enqueue([request(50, key=2, batch_size=4)])
    assert batcher.ready_at_us() == 0
    assert keys(batcher.next_batch(50)) == [1]
    assert batcher.next_batch(149) is None
    assert batcher.ready_at_us() == 150
    assert keys(batcher.next_batch(150)) == [2]


def test_once_the_oldest_has_waited_too_long_all_that_fits_goes():
    batcher = batcher_with(3, 4, preferred_batch_sizes=[2, 6], max_queue_delay_us=100)
    assert keys(batcher.next_batch(100)) == [1, 2]


def test_a_batch_that_may_grow_waits_for_its_delay():
    batcher = batcher_with(1, at_us=50, max_queue_delay_us=100)
    assert batcher.next_batch(149) is None
    assert batcher.ready_at_us() == 150
    assert keys(batcher.next_batch(150)) == [1]


def test_a_full_batch_is_ready_since_its_first_request_came():
    assert batcher_with(8, at_us=50, max_queue_delay_us=100).ready_at_us() == 50


def test_only_a_full_batch_is_returned_with_full_only():
    batcher = batcher_with(4, 3)
    assert batcher.next_batch(0, full_only=True) is None
    batcher.enqueue([request(key=3, batch_size=2)])
    assert keys(batcher.next_batch(0, full_only=True)) == [1, 2]


def test_bodies_of_a_batch_stay_below_the_limit_except_that_of_one_request():
    batcher = DynamicBatcher(8)
    batcher.max_batch_bytes = 10
    batcher.enqueue([request(key=key, body=bytes(size)) for key, size in enumerate((30, 5, 5, 1), 1)])
    assert [keys(batcher.next_batch(0)) for _ in range(3)] == [[1], [2, 3], [4]]


def test_a_request_that_runs_alone_shares_no_batch():
    batcher = DynamicBatcher(8)
    requests = [request(key=key) for key in (1, 2, 3)]
    requests[1].run_alone()
    batcher.enqueue(requests)
    assert [keys(batcher.next_batch(0)) for _ in range(3)] == [[1], [2], [3]]


def test_a_request_that_runs_alone_does_not_wait_for_others():
    batcher = DynamicBatcher(8, max_queue_delay_us=100)
    alone = request(10, key=1)
    alone.run_alone()
    batcher.enqueue([alone])
    assert batcher.ready_at_us() == 10
    assert keys(batcher.next_batch(20, full_only=True)) == [1]


@pytest.mark.parametrize("change", ["put back", "cancel"])
def test_the_forming_batch_is_formed_again(change: str):
    batcher = DynamicBatcher(2, max_queue_delay_us=100)
    first, second = request(10, key=1), request(20, key=2)
    batcher.enqueue([first, second])
    assert batcher.ready_at_us() == 10
    if change == "put back":
        batcher.put_back([request(5, key=0)])
        assert keys(batcher.next_batch(30)) == [0, 1]
    else:
        first.cancelled = True
        batcher.drop_cancelled([first])
        assert batcher.next_batch(30) is None
        assert batcher.ready_at_us() == 120


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
    batcher = DynamicBatcher(rules.max_batch_size, preferred, rules.delay_us, QueueRules(LevelRules(20)))
    batcher.max_batch_bytes = rules.max_bytes
    queue: list[QueuedRequest] = []
    out: list[QueuedRequest] = []
    now_us = 0
    for number, (name, value) in enumerate(events):
        if name == "enqueue":
            new = [
                request(now_us, key=number * 10 + i, batch_size=size, shape_key=shape, body=bytes(length))
                for i, (size, shape, length) in enumerate(value)
            ]
            refused = batcher.enqueue(new)
            assert len(queue) + len(new) - len(refused) <= max(20, len(queue))
            queue += new[: len(new) - len(refused)]
        elif name == "next batch":
            expected = rules.batch(queue, now_us, value)
            batch = batcher.next_batch(now_us, value)
            assert batch == expected
            out += batch or []
            queue = queue[len(batch or []) :]
        elif name == "put back":
            batcher.put_back(out[:value])
            queue, out = sorted([*queue, *out[:value]], key=arrival), out[value:]
        elif name == "alone" and out:
            out[value % len(out)].run_alone()
        elif name == "cancel" and queue:
            gone = queue.pop(value % len(queue))
            gone.cancelled = True
            batcher.drop_cancelled([gone])
        elif name == "advance":
            now_us += value
        assert len(batcher) == len(queue)
        if queue:
            ready_us = batcher.ready_at_us()
            assert ready_us <= queue[0].enqueued_us + rules.delay_us
            assert rules.batch(queue, max(now_us, ready_us), full_only=False) is not None
            if ready_us > now_us:
                assert rules.batch(queue, now_us, full_only=False) is None
    assert batcher.drain() == queue


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
    batcher = batcher_with(*sizes, **options)
    assert batcher.next_batch(at_us)
    assert batcher.reason is reason


def test_a_request_that_runs_alone_is_the_reason():
    batcher = DynamicBatcher(max_batch_size=8, max_queue_delay_us=100)
    lost = request(0, key=1)
    lost.run_alone()
    batcher.enqueue([lost])
    assert keys(batcher.next_batch(0)) == [1]
    assert batcher.reason is BatchReason.ALONE
