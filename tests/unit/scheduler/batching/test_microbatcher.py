"""Microbatches: which requests travel together to a fast model, and what happens to those that did not run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scheduling.requests import keys, request
from weir.scheduler.batching.dynamic_batcher import MAX_BATCH_BYTES
from weir.scheduler.batching.microbatcher import (
    MAX_MICROBATCH_REQUESTS,
    MAX_MICROBATCH_US,
    SINGLE_BATCHES_AFTER_SLOW,
    SLOW_US,
    Microbatcher,
    forms_microbatches,
)
from weir.scheduler.batching.version_scheduler import VersionScheduler
from weir.scheduler.model_scheduler import batcher_for
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.wire.messages import BatchOutcome

ANSWERED, UNANSWERED, NOT_RUN, HANDED_BACK = (
    BatchOutcome.ANSWERED,
    BatchOutcome.UNANSWERED,
    BatchOutcome.NOT_RUN,
    BatchOutcome.HANDED_BACK,
)


def known_to_take(busy_us: int, instances: int = 1) -> VersionScheduler:
    """A version of which one request has run, for so long."""
    version = VersionScheduler(1, batcher_for(ModelConfig(name="m")))
    version.set_instances("a", instances)
    ran(version, busy_us)
    return version


def ran(version: VersionScheduler, *busy_us: int) -> None:
    for each_us in busy_us:
        version.enqueue([request(key=0)])
        (batch,), _ = version.dispatch(0)
        version.complete(0, batch.id, ANSWERED, each_us)


def sizes(version: VersionScheduler, requests: int) -> list[int]:
    """Of the batches that are sent when so many come."""
    version.enqueue([request(key=key) for key in range(1, requests + 1)])
    return [len(batch.requests) for batch in version.dispatch(0)[0]]


@pytest.mark.parametrize(
    ("fields", "forms"),
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
def test_which_models_form_microbatches(fields: dict[str, Any], forms: bool):
    assert forms_microbatches(ModelConfig.model_validate({"name": "m", **fields})) is forms


def test_the_first_request_runs_alone():
    version = VersionScheduler(1, Microbatcher())
    version.set_instances("a", 1)
    assert sizes(version, 40) == [1, 1]


@pytest.mark.parametrize(
    ("busy_us", "instances", "waiting", "sent"),
    [
        (100, 1, 1, [1]),
        (100, 1, 2, [1, 1]),  # one to be executed and one to be staged: none waits for another
        (100, 1, 3, [2, 1]),
        (50, 1, 80, [MAX_MICROBATCH_REQUESTS, MAX_MICROBATCH_REQUESTS]),
        (400, 1, 40, [5, 5]),
        (MAX_MICROBATCH_US, 1, 40, [1, 1]),
        (100, 4, 8, [1] * 8),
        (100, 4, 9, [2, *[1] * 7]),
        (100, 4, 30, [4, 4, 4, 4, 4, 4, 3, 3]),
    ],
)
def test_the_size_of_a_microbatch(busy_us: int, instances: int, waiting: int, sent: list[int]):
    assert sizes(known_to_take(busy_us, instances), waiting) == sent


def test_a_slow_request_suspends_microbatches():
    version = known_to_take(100)
    ran(version, SLOW_US, *[100] * (SINGLE_BATCHES_AFTER_SLOW - 1))
    assert version.dispatch(0) == ([], None)
    ran(version, 100)
    assert sizes(version, 4) == [2, 2]


def test_microbatches_end_if_all_requests_become_slower():
    version = known_to_take(100)
    ran(version, *[MAX_MICROBATCH_US] * 100)
    assert sizes(version, 40) == [1, 1]


def test_a_request_lost_before_runs_alone():
    version = known_to_take(100)
    version.enqueue([request(now, key=now) for now in range(1, 7)])
    (first, second), _ = version.dispatch(10)
    assert (keys(first.requests), keys(second.requests)) == ([1, 2, 3], [4, 5, 6])
    version.complete(20, first.id, UNANSWERED, 0)
    version.enqueue([request(now, key=now) for now in range(7, 20)])
    (third,), _ = version.dispatch(20)
    assert (keys(third.requests), third.is_microbatch) == ([1], False)
    version.complete(30, second.id, ANSWERED, 300)
    assert [keys(batch.requests) for batch in version.dispatch(30)[0]] == [[2]]


def test_deadlines_are_sent_to_workers():
    version = known_to_take(50)
    version.enqueue([request(key=1), request(key=2, deadline_ms=1_000), *(request(key=key) for key in range(3, 80))])
    first, second = version.dispatch(0)[0]
    assert keys([*first.requests, *second.requests]) == list(range(1, 2 * MAX_MICROBATCH_REQUESTS + 1))
    assert first.has_deadlines
    assert keys([failure.request for failure in version.overdue(1_000_000)]) == [], (
        "sent requests belong to their worker"
    )


def test_bodies_of_a_microbatch_are_bounded():
    version = known_to_take(100)
    body = bytes(MAX_BATCH_BYTES // 3)
    version.enqueue([request(key=key, body=body) for key in range(1, 20)])
    assert [keys(batch.requests) for batch in version.dispatch(0)[0]] == [[1, 2, 3], [4, 5, 6]]


def test_cancelled_requests_are_passed_over():
    version = known_to_take(100)
    requests = [request(key=key) for key in range(1, 9)]
    version.enqueue(requests)
    for cancelled in requests[1:4]:
        cancelled.cancelled = True
    version.drop_cancelled(requests[1:4])
    assert [keys(batch.requests) for batch in version.dispatch(0)[0]] == [[1, 5, 6], [7, 8]]
    assert version.waiting == 0


@pytest.mark.parametrize(("outcome", "attempts"), [(UNANSWERED, 1), (NOT_RUN, 0), (ANSWERED, 0)])
def test_unanswered_requests_of_a_microbatch_are_repeated(outcome: int, attempts: int):
    version = known_to_take(100)
    version.enqueue([request(key=key) for key in range(1, 7)])
    (series, other), _ = version.dispatch(0)
    answered, failures = version.complete(5, series.id, outcome, 50, [1, 99, -1])
    assert (keys(list(answered)), failures) == ([1, 3], [])
    assert [(r.key, r.attempts) for r in series.requests] == [(1, 0), (2, attempts), (3, 0)]
    version.complete(5, other.id, ANSWERED, 50)
    assert [keys(batch.requests) for batch in version.dispatch(6)[0]] == [[2]]


def test_returned_requests_run_elsewhere_and_end_once():
    version = known_to_take(100)
    version.enqueue([request(key=key) for key in range(1, 7)])
    (series, _), _ = version.dispatch(0)
    series.requests[2].cancelled = True
    answered, failures = version.complete(5, series.id, HANDED_BACK, 0, [1, 2, 7])
    assert (keys(list(answered)), failures) == ([3], []), "its caller has left"
    assert version.complete(5, series.id, HANDED_BACK, 0, [1, 2]) == ([], [])
    version.set_instances("b", 1)
    (again,), _ = version.dispatch(6)
    assert (again.instance.worker, keys(again.requests)) == ("b", [2])
    assert version.complete(7, again.id, ANSWERED, 5) == (again.requests, ())
    answered, failures = version.complete(8, series.id, ANSWERED, 9_000, [1, 2])
    assert (keys(list(answered)), failures) == ([1], [])


def test_a_returned_request_suspends_microbatches():
    version = known_to_take(100, instances=2)
    version.enqueue([request(key=key) for key in range(1, 21)])
    first, *_ = version.dispatch(0)[0]
    assert len(first.requests) == 5
    version.complete(5, first.id, HANDED_BACK, 0, [2, 3, 4])
    version.complete(6, first.id, ANSWERED, 100, [2, 3, 4])
    assert [len(batch.requests) for batch in version.dispatch(7)[0]] == [1]


def test_all_but_one_request_of_an_executing_microbatch_are_pending():
    version = known_to_take(100)
    assert sizes(version, 6) == [3, 3]
    assert version.staged == 5
