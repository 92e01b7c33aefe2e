from __future__ import annotations

import pytest

from tests.support.scheduling.requests import keys, request
from weir.scheduler.batching.batch import Batch
from weir.scheduler.batching.dispatch import BATCH, EVENT
from weir.scheduler.batching.dynamic_former import DynamicFormer
from weir.scheduler.batching.former import EnsembleFormer, Former, SingleFormer
from weir.scheduler.batching.queue_rules import LevelRules, QueueRules
from weir.scheduler.batching.request import Terms
from weir.scheduler.batching.retry import LOST_STEPS, LOST_STREAM
from weir.scheduler.batching.version_queue import MAX_DIRECT_US, VersionQueue
from weir.scheduler.placement.instances import STAGING_LEAD_US
from weir.schemas.core.errors import ErrorCode
from weir.schemas.wire.batches import BatchEnded, BatchLost, BatchNotRun, BatchReleased, NotRunReason


def version_with(*workers: str, instances: int = 1, **options: int) -> VersionQueue:
    version = VersionQueue(1, DynamicFormer(4, **options))
    for worker in workers:
        version.set_instances(worker, instances)
    return version


def sent(version: VersionQueue, now_us: int = 0) -> list[tuple[str, list[int]]]:
    """(worker, keys) of each batch that is dispatched now."""
    return [(batch.instance.worker, [r.key for r in batch.requests]) for batch in version.dispatch(now_us)[0]]


def test_batches_go_to_idle_instances_then_full_ones_are_staged():
    version = version_with("a", "b")
    version.enqueue([request(key=key) for key in range(1, 19)])
    assert sent(version) == [("a", [1, 2, 3, 4]), ("b", [5, 6, 7, 8]), ("a", [9, 10, 11, 12]), ("b", [13, 14, 15, 16])]
    assert version.waiting == 2


def test_a_batch_that_can_grow_is_staged_only_shortly_before_the_instance_is_free():
    version = version_with("a")
    version.enqueue([request(0, key=1)])
    (first,), _ = version.dispatch(0)
    version.complete(10_000, BatchEnded(first.id, 10_000))
    version.enqueue([request(10_000, key=2)])
    version.dispatch(20_000)
    version.enqueue([request(21_000, key=3)])
    expected_end_us = 20_000 + 10_000
    assert version.dispatch(22_000) == ([], expected_end_us - STAGING_LEAD_US)
    assert sent(version, expected_end_us - STAGING_LEAD_US) == [("a", [3])]


def test_the_wake_time_is_the_end_of_the_oldest_requests_delay():
    version = version_with("a", max_queue_delay_us=100)
    version.enqueue([request(1_000, key=1)])
    version.enqueue([request(1_050, key=2)])
    assert version.dispatch(1_060) == ([], 1_100)
    batches, wake_at_us = version.dispatch(1_100)
    assert keys(batches[0].requests) == [1, 2]
    assert wake_at_us is None


def test_without_instances_there_is_no_wake_time():
    version = version_with()
    version.enqueue([request()])
    assert version.dispatch(0) == ([], None)


def test_a_completed_batch_ends_once():
    version = version_with("a")
    version.enqueue([request(key=1)])
    (batch,), _ = version.dispatch(0)
    assert version.in_flight_on("a") == [batch.id]
    assert version.complete(5, BatchEnded(batch.id, 5)) == (batch.requests, ())
    assert version.complete(5, BatchEnded(batch.id, 5)) is None
    assert version.in_flight_on("a") == []


def test_requests_of_a_lost_worker_run_first_in_their_order():
    version = version_with("a")
    version.enqueue([request(now, key=now) for now in range(1, 11)])
    assert sent(version) == [("a", [1, 2, 3, 4]), ("a", [5, 6, 7, 8])]
    assert version.worker_lost(20, "a") == ([], [])
    version.set_instances("b", 1)
    assert sent(version, 20) == [("b", [1, 2, 3, 4]), ("b", [5, 6, 7, 8])]


def test_batches_lost_one_after_the_other_stand_in_the_order_they_came():
    version = version_with("a")
    version.enqueue([request(now, key=now) for now in range(1, 10)])
    (first, second), _ = version.dispatch(10)
    version.complete(20, BatchLost(first.id))
    version.complete(20, BatchLost(second.id))
    assert sent(version, 20) == [("a", [1, 2, 3, 4]), ("a", [5, 6, 7, 8])]


def test_unstarted_requests_return_unchanged():
    version = version_with("a")
    version.enqueue([request(key=1), request(key=2), request(key=3)])
    for now in range(10):
        (batch,), _ = version.dispatch(now)
        assert keys(batch.requests) == [1, 2, 3], "no loss was counted: they stay together and none fails"
        assert version.complete(now, BatchNotRun(batch.id, NotRunReason.SLOW)) == ([], [])
    (batch,), _ = version.dispatch(10)
    batch.requests[1].cancelled = True
    answered, failures = version.complete(11, BatchNotRun(batch.id, NotRunReason.SLOW))
    assert (keys(answered), failures) == ([2], [])
    assert version.failures["CANCELED"] == 1
    assert sent(version, 12) == [("a", [1, 3])]


def test_a_request_that_kills_workers_fails_and_others_of_its_batch_do_not():
    version = version_with()
    version.enqueue([request(key=1), request(key=2)])
    lost_with: list[list[int]] = []
    failed: list[int] = []
    for attempt in range(4):
        worker = f"w{attempt}"
        version.set_instances(worker, 1)
        lost_with += [keys_of for _, keys_of in sent(version, attempt)]
        _, failures = version.worker_lost(attempt, worker)
        failed += [failure.request.key for failure in failures]
        assert all(failure.error.code is ErrorCode.INTERNAL for failure in failures)
    assert lost_with == [[1, 2], [1, 2], [1], [1]]
    assert failed == [1]
    version.set_instances("b", 1)
    assert sent(version, 9) == [("b", [2])]


def test_a_cancelled_request_is_over_when_its_batch_is_lost():
    version = version_with("a")
    version.enqueue([request(key=1), request(key=2)])
    (batch,), _ = version.dispatch(0)
    batch.requests[0].cancelled = True
    answered, failures = version.batches_lost(1, [batch.id])
    assert (keys(answered), failures) == ([1], [])
    assert sent(version, 1) == [("a", [2])]


def test_another_rule_takes_over_the_queue():
    version = version_with("a")
    version.enqueue([request(key=1), request(key=2)])
    version.use(SingleFormer(10))
    assert sent(version) == [("a", [1]), ("a", [2])]


def test_requests_over_the_queue_size_are_rejected():
    version = VersionQueue(1, SingleFormer(2))
    failures = version.enqueue([request(key=1), request(key=2), request(key=3)])
    assert [(f.request.key, f.error.message) for f in failures] == [(3, "Exceeds maximum queue size")]


def test_requests_for_unserved_versions_expire():
    version = VersionQueue(1, SingleFormer(10), unavailable_timeout_us=100)
    version.enqueue([request(key=1)])
    assert version.expire(1_000) == []
    assert keys(version.expire(1_100)) == [1]
    version.enqueue([request(key=2)])
    version.set_instances("a", 1)
    assert version.expire(9_000) == []
    version.set_instances("a", 0)
    assert version.expire(9_050) == []
    assert keys(version.expire(9_150)) == [2]


def test_a_released_instance_takes_the_next_batch_while_the_first_goes_on():
    version = version_with("a")
    version.use(SingleFormer(10))
    version.enqueue([request(key=key) for key in range(1, 5)])
    (first, second), _ = version.dispatch(0)
    assert version.complete(5, BatchReleased(first.id, 5)) == ((), ())
    assert sent(version, 5) == [("a", [3])]
    assert version.complete(6, BatchReleased(first.id, 5)) == ((), ()), "a repeated message frees one slot"
    assert sent(version, 6) == []
    assert version.complete(7, BatchEnded(first.id)) == (first.requests, ())
    assert sent(version, 7) == []
    assert version.complete(8, BatchEnded(second.id, 3)) == (second.requests, ())
    assert sent(version, 8) == [("a", [4])]


def test_a_lost_decoupled_batch_is_not_repeated():
    version = version_with("a")
    version.is_decoupled = True
    version.enqueue([request(key=key) for key in range(1, 9)])
    (released, staged), _ = version.dispatch(0)
    version.complete(1, BatchReleased(released.id, 1))
    staged.requests[0].cancelled = True
    answered, failures = version.worker_lost(2, "a")
    assert keys(answered) == []
    assert [failure.request.key for failure in failures] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert failures.pop(4).error.code is ErrorCode.CANCELLED
    assert {(f.error.code, f.error.message) for f in failures} == {(ErrorCode.UNAVAILABLE, LOST_STREAM)}
    assert version.failures == {"REJECTED": 0, "CANCELED": 1}
    version.set_instances("b", 1)
    assert sent(version, 3) == []


def test_a_lost_request_of_a_sequence_to_an_ensemble_is_not_repeated():
    version = VersionQueue(1, EnsembleFormer())
    version.set_instances("a", 1)
    requests = [request(key=key) for key in range(1, 5)]
    for sequential in requests[1:3]:
        sequential.terms = Terms(correlation_id=7)
    version.enqueue(requests)
    version.dispatch(0)
    requests[2].cancelled = True
    answered, failures = version.worker_lost(2, "a")
    assert [(f.request.key, f.error.message) for f in failures] == [(2, LOST_STEPS.format(7))]
    assert failures[0].error.code is ErrorCode.UNAVAILABLE
    assert keys(answered) == [3]
    version.set_instances("b", 1)
    assert sent(version, 3) == [("b", [1, 4])]


def test_a_decoupled_batch_that_did_not_run_is_repeated():
    version = version_with("a")
    version.is_decoupled = True
    version.enqueue([request(key=1)])
    (batch,), _ = version.dispatch(0)
    assert version.complete(1, BatchLost(batch.id)) == ([], [])
    assert sent(version, 1) == [("a", [1])]


def test_requests_cancelled_in_the_queue_are_counted():
    version = version_with()
    waiting = [request(key=key) for key in range(1, 5)]
    version.enqueue(waiting)
    for cancelled in waiting[:2]:
        cancelled.cancelled = True
    version.drop_cancelled(waiting[:2])
    assert version.failures["CANCELED"] == 2
    assert version.waiting == 2


def test_a_payload_on_a_host_goes_to_an_idle_instance_there_and_never_waits():
    here, there = "worker-00000001-a", "worker-00000002-b"
    version = version_with(here, there)
    asked = request(key=1)
    asked.payload_host = "00000002"
    version.enqueue([asked])
    assert sent(version) == [(there, [1])], "though the other is idle for longer"
    asked = request(key=2)
    asked.payload_host = "00000002"
    version.enqueue([asked])
    assert sent(version) == [(here, [2])], "rather than to wait"


# Leave for a worker to run its own requests itself


def first_batch(version: VersionQueue, busy_us: int = 300, lane: int = 0) -> Batch:
    """A batch of the version after one that kept its instance busy for `busy_us`."""
    version.set_instances("a", 1)
    version.enqueue([request(key=1)])
    (known,), _ = version.dispatch(1_000)
    version.complete(1_000 + busy_us, BatchEnded(known.id, busy_us))
    version.enqueue([request(key=2), request(key=3)])
    if lane:
        version.enqueue([request(key=key, lane=lane) for key in range(4, 40)])
    return version.dispatch(10_000)[0][0]


@pytest.mark.parametrize("former", [DynamicFormer(4), SingleFormer(), SingleFormer(runs_singly=True)])
def test_a_worker_may_run_requests_of_a_fast_model_that_wait_for_nothing_but_an_instance(former: Former):
    version = VersionQueue(1, former)
    assert version.direct_request_us(first_batch(version))


@pytest.mark.parametrize(
    "former",
    [
        DynamicFormer(4, max_queue_delay_us=100),
        DynamicFormer(4, preferred_batch_sizes=[2]),
        DynamicFormer(4, rules=QueueRules(levels=2)),
        DynamicFormer(4, rules=QueueRules(LevelRules(timeout_us=5))),
        DynamicFormer(4, rules=QueueRules(may_stage=False)),
        EnsembleFormer(),
    ],
)
def test_a_worker_may_not_run_requests_that_have_rules_of_their_own(former: Former):
    version = VersionQueue(1, former)
    assert not version.direct_request_us(first_batch(version))


def test_a_worker_may_not_run_requests_of_a_slow_or_unknown_model():
    version = version_with("a")
    assert not version.direct_request_us(first_batch(version, MAX_DIRECT_US))
    unknown = version_with("a")
    unknown.enqueue([request()])
    assert not unknown.direct_request_us(unknown.dispatch(0)[0][0])


def test_a_worker_may_not_run_requests_of_a_decoupled_model():
    version = version_with("a")
    version.is_decoupled = True
    assert not version.direct_request_us(first_batch(version))


@pytest.mark.parametrize("lane", [EVENT, BATCH])
def test_a_worker_may_not_run_requests_while_those_of_other_lanes_wait(lane: int):
    version = version_with("a")
    assert not version.direct_request_us(first_batch(version, lane=lane))


def test_requests_that_a_worker_ran_itself_count_as_served():
    version = version_with("a")
    version.record_direct_runs(70, 3, 900)
    assert (version.cost.served, version.cost.busy_us) == (3, 900)
