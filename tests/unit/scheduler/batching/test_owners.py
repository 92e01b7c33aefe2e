"""Limits of owners: what counts for whom, and what statistics show. Whole lives are in `test_model_simulation`."""

from __future__ import annotations

import pytest

from tests.support.scheduling.requests import CONFIGS, CountingFrame, part, request
from weir.scheduler.batching.admission import MAX_REMEMBERED, OwnersInFlight
from weir.scheduler.batching.request import QueuedRequest, requests_of
from weir.scheduler.model_scheduler import ModelScheduler
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode
from weir.schemas.core.requests import SEQUENCE_START
from weir.schemas.wire.batches import BatchEnded
from weir.schemas.wire.calls import Caller
from weir.schemas.wire.statistics import MAX_OWNERS


def of(caller: Caller, key: int, gateway: str = "gateway") -> QueuedRequest:
    return requests_of(gateway, [part(key)._replace(**caller._asdict())], 0, CountingFrame())[0]


def model_of(config: ModelConfig) -> ModelScheduler:
    model = ModelScheduler("model")
    model.configure(1, config)
    model.set_instances("w", {1: 1})
    return model


@pytest.mark.parametrize(("partitions", "allowed"), [(1, 5), (2, 3), (4, 2), (8, 1)])
def test_each_queue_of_a_model_allows_its_part_of_a_limit(partitions: int, allowed: int) -> None:
    config = CONFIGS[0].model_dump() | {"parameters": {"weir_partitions": {"string_value": str(partitions)}}}
    model = model_of(ModelConfig.model_validate(config))
    refused = [model.enqueue([of(Caller("key a", 5), key)]) for key in range(10)]
    assert [bool(failures) for failures in refused] == [False] * allowed + [True] * (10 - allowed)
    (failure,) = refused[-1]
    assert failure.error.code is ErrorCode.RESOURCE_EXHAUSTED
    assert failure.error.retry_after_s == 1
    assert failure.error.message == "too many requests in flight: the access policy allows 'key a' 5 at this model"


def test_requests_of_one_owner_count_together_whatever_gateway_they_come_by() -> None:
    model = model_of(CONFIGS[0])
    assert not model.enqueue([of(Caller("key a", 2), 1, "g")])
    assert not model.enqueue([of(Caller("key a", 2), 1, "h")])
    assert not model.enqueue([of(Caller("key b", 2), 2, "g"), request(key=3, gateway="g")])
    assert model.enqueue([of(Caller("key a", 2), 4, "g")])
    assert not model.enqueue([of(Caller("key a", 3), 5, "g")]), "a changed limit holds at once"


def test_a_running_request_counts_until_it_ends_even_if_it_is_cancelled() -> None:
    model = model_of(CONFIGS[0])
    model.enqueue([of(Caller("key a", 1), 1)])
    (batch,), _ = model.dispatch(0)
    model.cancel("gateway", [1])
    assert model.enqueue([of(Caller("key a", 1), 2)])
    model.complete(5, BatchEnded(batch.id, 5))
    assert not model.enqueue([of(Caller("key a", 1), 3)])
    model.cancel("gateway", [3])
    assert not model.owners


def test_requests_of_sequences_count_too() -> None:
    stateful = {"name": "model", "max_batch_size": 4, "sequence_batching": {"max_sequence_idle_microseconds": 10**6}}
    model = model_of(ModelConfig.model_validate(stateful))
    rows = [
        part(key)._replace(correlation_id=key, sequence_flags=SEQUENCE_START, owner="key a", in_flight_limit=2)
        for key in (1, 2, 3)
    ]
    (failure,) = model.enqueue(requests_of("gateway", rows, 0, CountingFrame(3)))
    assert failure.request.key == 3
    assert model.owners["key a"] == 2
    model.dispatch(0)
    model.cancel("gateway", [1])
    assert model.owners["key a"] == 2, "it runs"
    model.worker_lost(5, "w")
    assert not model.owners, "a sequence that is lost with its instance ends its requests"


def test_statistics_show_the_owners_with_most_and_remember_a_bounded_number() -> None:
    owners = OwnersInFlight()
    for number in range(2 * MAX_REMEMBERED):
        assert owners.admit(of(Caller(f"key {number}", 1), 1)) is None
        assert owners.admit(of(Caller(f"key {number}", 1), 2)) is not None
        owners.ended([of(Caller(f"key {number}", 1), 1)])
    assert owners.admit(of(Caller("key busy"), 1)) is None
    assert not owners.largest()[1].in_flight
    assert owners.largest()[0] == ("key busy", 1, 0)
    assert len(owners.largest()) == MAX_OWNERS
    assert len(owners._refused) <= MAX_REMEMBERED
