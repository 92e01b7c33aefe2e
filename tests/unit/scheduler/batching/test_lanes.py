"""The order of lanes, which requests join a batch, and how much the batch lane gets beside live requests."""

from __future__ import annotations

from itertools import pairwise

from tests.support.scheduling.requests import keys, request
from weir.scheduler.batching.dispatch import AGED_US, BATCH, EVENT, LIVE
from weir.scheduler.batching.dynamic_former import DynamicFormer
from weir.scheduler.batching.former import EnsembleFormer, Former, SingleFormer
from weir.scheduler.batching.lane_budget import BATCH_LANE_RUN_US, LONGEST_QUIET_US, RECENT_US
from weir.scheduler.batching.queue_rules import LevelRules, QueueRules
from weir.scheduler.batching.request import QueuedRequest
from weir.scheduler.batching.version_queue import VersionQueue
from weir.scheduler.placement.window import SLOTS
from weir.schemas.wire.batches import BatchEnded

BEGIN_US = 1_000_000


class Version:
    """A version with `instances`, the clock, and the running batches."""

    def __init__(self, former: Former, instances: int = 1) -> None:
        self.scheduler = VersionQueue(1, former)
        self.scheduler.set_instances("worker", instances)
        self.now_us = BEGIN_US
        self.running: list[int] = []
        self.next_key = 1

    def come(self, lane: int, count: int = 1, **options: object) -> list[QueuedRequest]:
        """So many requests; returns those refused."""
        made = [request(self.now_us, key=self.next_key + i, lane=lane, **options) for i in range(count)]
        self.next_key += count
        return [failure.request for failure in self.scheduler.enqueue(made)]

    def sent(self) -> list[list[int]]:
        """The keys of each batch that goes out now."""
        return [[r.key for r in requests] for requests in self.sent_requests()]

    def sent_lanes(self) -> list[list[int]]:
        return [[r.lane for r in requests] for requests in self.sent_requests()]

    def sent_requests(self) -> list[list[QueuedRequest]]:
        batches, self.wake_at_us = self.scheduler.dispatch(self.now_us)
        self.running += [batch.id for batch in batches]
        return [list(batch.requests) for batch in batches]

    def end(self, busy_us: int = 100, number: int = 0) -> None:
        """The oldest batch has taken so long."""
        self.now_us += busy_us
        assert self.scheduler.complete(self.now_us, BatchEnded(self.running.pop(number), busy_us)) is not None

    def live_traffic(self, requests: int, every_us: int, busy_us: int) -> None:
        """Live requests, one after another."""
        for _ in range(requests):
            self.come(LIVE)
            self.sent()
            while self.running:
                self.end(busy_us)
            self.now_us += every_us - busy_us
        self.sent()


def test_live_requests_go_first_then_events_then_jobs():
    version = Version(SingleFormer())
    version.come(LIVE)
    version.sent()
    for lane in (BATCH, EVENT, LIVE):
        version.come(lane)
    sent = version.sent_lanes()
    while version.running:
        version.end()
        sent += version.sent_lanes()
    assert sent == [[LIVE], [EVENT]]
    version.now_us += LONGEST_QUIET_US
    assert version.sent_lanes() == [[BATCH]]


def test_a_full_lane_rejects_only_its_own_requests():
    version = Version(DynamicFormer(1, rules=QueueRules(LevelRules(2))), instances=0)
    assert len(version.come(EVENT, 3)) == 1
    assert len(version.come(BATCH, 4)) == 2
    assert not version.come(LIVE, 2)
    assert len(version.come(LIVE)) == 1
    assert [version.scheduler.waiting_in(lane) for lane in (LIVE, EVENT, BATCH)] == [2, 2, 2]


def test_priorities_hold_within_a_lane():
    version = Version(DynamicFormer(1, rules=QueueRules(levels=2, default_level=2)))
    version.come(LIVE)
    version.sent()
    for lane in (EVENT, LIVE):
        version.come(lane, priority=2)
        version.come(lane, priority=1)
    order = []
    for _ in range(4):
        version.end()
        order += version.sent()
    assert order == [[5], [4], [3], [2]]


def test_without_live_traffic_events_and_jobs_are_staged_as_live_requests_are():
    for lane in (EVENT, BATCH):
        version = Version(DynamicFormer(4))
        version.come(lane, 12)
        assert version.sent() == [[1, 2, 3, 4], [5, 6, 7, 8]]
        assert version.scheduler.waiting == 4


def test_events_are_not_staged_while_live_traffic_is_recent():
    version = Version(DynamicFormer(4))
    version.come(LIVE)
    version.come(EVENT, 12)
    version.sent()
    assert len(version.running) == 1
    version.end()
    version.now_us += 2_000_000
    version.sent()
    assert len(version.running) == 2


def test_events_join_a_live_batch_and_those_of_another_shape_do_not():
    version = Version(DynamicFormer(4))
    version.come(EVENT)
    version.come(EVENT, shape_key="other")
    version.come(LIVE)
    assert version.sent() == [[3, 1]]
    version.end()
    assert version.sent() == [[2]]


def test_a_batch_of_a_preferred_size_is_brought_to_another_or_left():
    version = Version(DynamicFormer(8, preferred_batch_sizes=[2, 4]))
    version.come(EVENT, 1)
    version.come(LIVE, 2)
    assert version.sent() == [[2, 3]]
    version.end()
    version.now_us += 2_000_000
    assert version.sent() == [[1]]
    version.end()
    version.come(EVENT, 5)
    version.come(LIVE, 2)
    assert version.sent()[0] == [9, 10, 4, 5]


def test_the_largest_size_alone_is_no_preference_that_keeps_others_out():
    version = Version(DynamicFormer(8, preferred_batch_sizes=[8]))
    version.come(EVENT, 1)
    version.come(LIVE, 2)
    assert version.sent() == [[2, 3, 1]]


def test_aged_events_count_as_live_one_batch_at_a_time():
    version = Version(SingleFormer())
    version.come(LIVE)
    version.sent()
    version.come(EVENT, 3)
    version.now_us += AGED_US
    version.come(LIVE, 10)
    order = []
    for _ in range(7):
        version.end()
        order += version.sent_requests()
    events = [at for at, (r,) in enumerate(order) if r.key in (2, 3, 4)]
    assert len(events) == 3
    assert all(later - earlier >= 2 for earlier, later in pairwise(events))


def test_events_that_count_as_live_can_be_cancelled_and_drained():
    version = Version(SingleFormer())
    version.come(LIVE)
    version.sent()
    aged = request(version.now_us, key=50, lane=EVENT)
    version.scheduler.enqueue([aged])
    version.now_us += AGED_US
    version.come(LIVE, 3)
    version.sent()
    if not aged.is_sent:
        aged.cancelled = True
        version.scheduler.drop_cancelled([aged])
    assert 50 not in (keys(version.scheduler.drain()) or [])
    assert version.scheduler.waiting == 0


def test_backfill_joins_as_far_as_rows_are_free():
    version = Version(DynamicFormer(16))
    version.come(BATCH, 50)
    sizes = [1]
    for _ in range(1_500):
        version.come(BATCH, sizes[-1])
        version.come(LIVE)
        sizes += [len(requests) for requests in version.sent_requests()]
        version.end(1_000)
        version.now_us += 100
    assert max(sizes) == 16
    assert sizes[-100:] == [16] * 100


def test_little_backfill_joins_if_each_row_costs():
    version = Version(DynamicFormer(16))
    version.come(BATCH, 5_000)
    riders = 0
    for _ in range(2_000):
        version.come(LIVE)
        (batch,) = version.sent_requests()
        riders += len(batch) - 1
        version.end(1_000 * len(batch))
        version.now_us += 100
    assert 1 <= riders <= 20


def test_on_the_only_instance_the_batch_lane_waits_for_silence():
    version = Version(DynamicFormer(64))
    version.come(BATCH)
    version.live_traffic(1_000, 5_000, 1_000)
    for _ in range(50):  # measures the cost of a row
        version.come(LIVE, 2)
        version.sent()
        version.end(1_500)
        version.now_us += 5_000
    version.come(BATCH, 1_000)
    assert not version.sent()
    assert version.wake_at_us is not None
    assert version.now_us < version.wake_at_us < version.now_us + LONGEST_QUIET_US
    version.now_us = version.wake_at_us
    (batch,) = version.sent_requests()
    assert 500 + 500 * len(batch) <= BATCH_LANE_RUN_US + 1_000
    assert not version.sent(), "none is staged"


def test_with_spare_instances_the_batch_lane_leaves_enough_for_live_requests():
    version = Version(DynamicFormer(1), instances=4)
    version.come(BATCH, 2_000)
    for _ in range(2_500):
        version.come(LIVE)
        version.sent()
        version.end(1_000, number=-1 if len(version.running) == 1 else 0)
        while len(version.running) > 2:
            version.end(1_000)
        version.now_us += 20
    version.sent()
    assert len(version.running) == 3, "one at a time"


def test_long_after_the_last_live_request_the_batch_lane_is_unlimited():
    version = Version(DynamicFormer(4))
    version.come(LIVE)
    version.sent()
    version.end()
    version.now_us += RECENT_US
    version.come(BATCH, 12)
    assert version.sent() == [[1 + i for i in range(1, 5)], [1 + i for i in range(5, 9)]]


def test_a_lost_batch_goes_back_to_the_lanes_it_came_from():
    version = Version(DynamicFormer(8))
    version.come(EVENT)
    version.come(LIVE)
    assert version.sent() == [[2, 1]]
    version.scheduler.worker_lost(version.now_us, "worker")
    assert [version.scheduler.waiting_in(lane) for lane in (LIVE, EVENT, BATCH)] == [1, 1, 0]


def test_another_configuration_takes_over_all_lanes():
    version = Version(DynamicFormer(8), instances=0)
    for lane in (LIVE, EVENT, BATCH):
        version.come(lane)
    version.scheduler.use(SingleFormer())
    assert [version.scheduler.waiting_in(lane) for lane in (LIVE, EVENT, BATCH)] == [1, 1, 1]


def test_deadlines_hold_in_all_lanes():
    version = Version(DynamicFormer(8), instances=0)
    for lane in (LIVE, EVENT, BATCH):
        version.come(lane, deadline_ms=version.now_us // 1000 + 1)
    assert version.scheduler.is_timed
    assert version.scheduler.dispatch(version.now_us)[1] == version.now_us + 1_000
    assert len(version.scheduler.overdue(version.now_us + 1_000)) == 3
    assert version.scheduler.waiting == 0


def test_windows_of_events_use_the_times_of_live_requests():
    version = Version(SingleFormer(runs_singly=True))
    for _ in range(3):
        version.come(LIVE)
        version.sent()
        version.end(50)
    version.come(EVENT, 2)
    version.sent()
    while version.running:
        version.end(50)
        version.sent()
    version.now_us += 2_000_000
    version.come(EVENT, 30)
    assert len(version.sent()) > SLOTS


def test_an_ensemble_forwards_lanes_and_does_not_delay_the_batch_lane():
    version = Version(EnsembleFormer())
    version.come(LIVE)
    version.come(BATCH, 2)
    batches, _ = version.scheduler.dispatch(version.now_us)
    assert [keys(list(batch.requests)) for batch in batches] == [[1], [2, 3]]
    assert all(batch.has_lanes for batch in batches)
