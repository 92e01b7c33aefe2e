"""Windows: how many batches an instance of a fast model holds, and what becomes of those that it returns."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scheduling.requests import keys, request
from weir.scheduler.batching.batch import Batch
from weir.scheduler.batching.dynamic_former import former_for
from weir.scheduler.batching.former import SingleFormer
from weir.scheduler.batching.version_queue import VersionQueue
from weir.scheduler.placement.instances import FIRST_BACKOFF_US, MAX_BACKOFF_US
from weir.scheduler.placement.window import (
    MAX_WINDOW,
    MAX_WINDOW_US,
    NARROW_BATCHES,
    SLOTS,
    SLOW_US,
    Window,
    runs_singly,
)
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.wire.batches import BatchEnded, BatchLost, BatchNotRun, NotRunReason


def known_to_take(busy_us: int, instances: int = 1) -> VersionQueue:
    """A version of which one request has run, for so long."""
    version = VersionQueue(1, former_for(ModelConfig(name="m")))
    version.set_instances("a", instances)
    ran(version, busy_us)
    return version


def ran(version: VersionQueue, *busy_us: int) -> None:
    for each_us in busy_us:
        version.enqueue([request(key=0)])
        (batch,), _ = version.dispatch(0)
        version.complete(0, BatchEnded(batch.id, each_us))


def sent(version: VersionQueue, requests: int, now_us: int = 0) -> list[Batch]:
    """The batches that are sent when so many come."""
    version.enqueue([request(now_us, key=key) for key in range(1, requests + 1)])
    return version.dispatch(now_us)[0]


@pytest.mark.parametrize(
    ("fields", "is_wide"),
    [
        ({}, True),
        ({"max_batch_size": 8}, True),
        ({"max_batch_size": 8, "dynamic_batching": {}}, False),
        ({"sequence_batching": {}}, False),
        ({"platform": "ensemble"}, False),
        ({"model_transaction_policy": {"decoupled": True}}, False),
        ({"instance_group": [{"count": 2}]}, True),
        ({"instance_group": [{}, {"rate_limiter": {"priority": 1}}]}, False),
    ],
)
def test_which_models_have_windows(fields: dict[str, Any], is_wide: bool):
    assert runs_singly(ModelConfig.model_validate({"name": "m", **fields})) is is_wide


def test_a_model_whose_speed_is_unknown_has_two_slots():
    version = VersionQueue(1, SingleFormer(runs_singly=True))
    version.set_instances("a", 1)
    assert len(sent(version, 40)) == SLOTS


@pytest.mark.parametrize(
    ("busy_us", "places"),
    [(1, MAX_WINDOW), (50, MAX_WINDOW), (100, 20), (400, 5), (1_000, 2), (MAX_WINDOW_US, SLOTS), (1_000_000, SLOTS)],
)
def test_a_window_holds_what_an_instance_executes_in_its_time(busy_us: int, places: int):
    assert Window().size(busy_us, is_wide=True) == places
    assert Window().size(busy_us, is_wide=False) == SLOTS


@pytest.mark.parametrize(
    ("busy_us", "instances", "waiting", "by_instance"),
    [
        (100, 1, 1, [1]),
        (100, 1, 3, [3]),
        (400, 1, 40, [5]),
        (100, 4, 8, [2, 2, 2, 2]),
        (100, 4, 9, [3, 2, 2, 2]),
        (400, 4, 40, [5, 5, 5, 5]),
    ],
)
def test_windows_are_filled_breadth_first(busy_us: int, instances: int, waiting: int, by_instance: list[int]):
    batches = sent(known_to_take(busy_us, instances), waiting)
    numbers = [batch.instance.number for batch in batches]
    assert sorted(map(numbers.count, set(numbers)), reverse=True) == by_instance
    assert len(set(numbers[:instances])) == min(instances, waiting)
    assert [keys(batch.requests) for batch in batches] == [[key] for key in range(1, len(batches) + 1)]


def test_a_place_that_is_free_is_filled_again():
    version = known_to_take(400)
    first, *_ = sent(version, 40)
    version.complete(400, BatchEnded(first.id, 400))
    assert [keys(batch.requests) for batch in version.dispatch(400)[0]] == [[6]]


def test_a_slow_request_narrows_the_window():
    version = known_to_take(100)
    ran(version, SLOW_US, *[100] * (NARROW_BATCHES - 1))
    assert len(sent(version, 40)) == SLOTS
    version = known_to_take(100)
    ran(version, SLOW_US, *[100] * NARROW_BATCHES)
    assert len(sent(version, 40)) > SLOTS


def test_the_window_follows_requests_that_become_slower():
    version = known_to_take(100)
    ran(version, *[MAX_WINDOW_US] * 100)
    assert len(sent(version, 40)) == SLOTS


def test_a_loss_narrows_the_window():
    version = known_to_take(400)
    first, *others = sent(version, 40)
    version.complete(5, BatchLost(first.id))
    for batch in others:
        version.complete(5, BatchEnded(batch.id, 400))
    again = version.dispatch(6)[0]
    assert [keys(batch.requests) for batch in again] == [[1], [6]]
    assert first.requests[0].attempts == 1


def test_a_request_that_was_lost_twice_has_its_instance_for_itself():
    version = known_to_take(400)
    killer, *_ = sent(version, 1)
    version.complete(5, BatchLost(killer.id))
    (again,), _ = version.dispatch(6)
    version.complete(7, BatchLost(again.id))
    version.enqueue([request(7, key=2)])
    assert [keys(batch.requests) for batch in version.dispatch(8)[0]] == [[1]]


def test_cancelled_requests_are_passed_over():
    version = known_to_take(400)
    requests = [request(key=key) for key in range(1, 9)]
    version.enqueue(requests)
    for cancelled in requests[1:4]:
        cancelled.cancelled = True
    version.drop_cancelled(requests[1:4])
    assert [keys(batch.requests) for batch in version.dispatch(0)[0]] == [[1], [5], [6], [7], [8]]
    assert version.waiting == 0


@pytest.mark.parametrize("reason", NotRunReason)
def test_a_returned_batch_runs_elsewhere_and_counts_as_no_loss(reason: NotRunReason):
    version = known_to_take(400)
    head, *_, last = sent(version, 5)
    assert version.complete(5, BatchNotRun(last.id, reason)) == ([], [])
    version.set_instances("b", 1)
    (again,), _ = version.dispatch(6)
    assert (again.instance.worker, keys(again.requests), again.requests[0].attempts) == ("b", [5], 0)
    assert version.complete(7, BatchEnded(again.id, 5)) == (again.requests, ())
    assert version.complete(8, BatchEnded(head.id, 5)) == (head.requests, ())


def test_the_caller_of_a_returned_batch_may_have_left():
    version = known_to_take(400)
    (batch,) = sent(version, 1)
    batch.requests[0].cancelled = True
    assert version.complete(5, BatchNotRun(batch.id, NotRunReason.SLOW)) == (batch.requests, [])


@pytest.mark.parametrize(("reason", "places"), [(NotRunReason.SLOW, SLOTS), (NotRunReason.CALLING, 1)])
def test_an_instance_behind_a_slow_batch_holds_less(reason: NotRunReason, places: int):
    version = known_to_take(400)
    head, *staged = sent(version, 40)
    for batch in staged:
        version.complete(5, BatchNotRun(batch.id, reason))
    assert len(version.dispatch(6)[0]) == places - 1
    version.complete(7, BatchEnded(head.id, 400))
    assert len(version.dispatch(8)[0]) == 1


def test_an_instance_that_is_down_gets_nothing_for_longer_each_time():
    version = known_to_take(400)
    version.enqueue([request(key=1)])
    now_us, backoff_us = 1_000, FIRST_BACKOFF_US
    for _ in range(10):
        (batch,), _ = version.dispatch(now_us)
        version.complete(now_us, BatchNotRun(batch.id, NotRunReason.DOWN))
        assert version.dispatch(now_us) == ([], now_us + backoff_us)
        assert version.dispatch(now_us + backoff_us - 1) == ([], now_us + backoff_us)
        now_us, backoff_us = now_us + backoff_us, min(2 * backoff_us, MAX_BACKOFF_US)
    (batch,), _ = version.dispatch(now_us)
    version.complete(now_us, BatchEnded(batch.id, 5))
    version.enqueue([request(key=2)])
    (batch,), _ = version.dispatch(now_us)
    version.complete(now_us, BatchNotRun(batch.id, NotRunReason.DOWN))
    assert version.dispatch(now_us) == ([], now_us + FIRST_BACKOFF_US)


def test_the_batches_that_an_instance_returns_together_count_once():
    version = known_to_take(400)
    for batch in sent(version, 5):
        version.complete(1_000, BatchNotRun(batch.id, NotRunReason.DOWN))
    assert version.dispatch(1_000) == ([], 1_000 + FIRST_BACKOFF_US)
    assert [keys(batch.requests) for batch in version.dispatch(1_000 + FIRST_BACKOFF_US)[0]] == [
        [key] for key in range(1, 6)
    ]


def test_the_others_run_what_an_instance_returns():
    version = known_to_take(400, instances=2)
    first, second = sent(version, 2)
    version.complete(5, BatchNotRun(first.id, NotRunReason.DOWN))
    (again,), _ = version.dispatch(6)
    assert again.instance is second.instance
    assert version.busy_instances == 2


def test_an_instance_that_its_worker_offers_again_is_open():
    version = known_to_take(400)
    (batch,) = sent(version, 1)
    version.complete(5, BatchNotRun(batch.id, NotRunReason.GONE))
    assert version.dispatch(6)[0] == []
    version.set_instances("a", 0)
    version.set_instances("a", 1)
    assert [keys(batch.requests) for batch in version.dispatch(7)[0]] == [[1]]


def test_all_but_the_executing_batch_are_staged():
    version = known_to_take(400)
    assert len(sent(version, 5)) == 5
    assert version.staged == 4
