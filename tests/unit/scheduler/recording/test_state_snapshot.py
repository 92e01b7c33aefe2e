"""A policy's state survives a snapshot; what can not be stored raises."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import msgpack
import pytest

from tests.support.scheduling.recording import (
    config,
)
from tests.support.scheduling.requests import CountingFrame
from weir.scheduler.batching.request import requests_of
from weir.scheduler.model_scheduler import ModelScheduler
from weir.scheduler.recording.state_snapshot import UnsupportedState, pack_state, unpack_state
from weir.schemas.core.requests import SEQUENCE_START
from weir.schemas.wire.messages import BatchOutcome, RequestEnvelope


def test_counters_continue_in_a_restored_state():
    scheduler = ModelScheduler("model")
    scheduler.numbers = count(3)
    scheduler.draw = count(7).__next__
    next(scheduler.numbers)
    scheduler.draw()
    read = unpack_state(pack_state(scheduler, lambda: 0), lambda: 0)
    assert [next(read.numbers), next(read.numbers), read.draw(), read.draw()] == [4, 5, 8, 9]
    assert next(scheduler.numbers) == 4


def test_a_restored_policy_decides_as_the_original():
    original = ModelScheduler("model")
    original.configure(1, config("direct"))
    original.set_instances("w", {1: 2})
    rows = [RequestEnvelope(key, -1, 1, "", 0, 0, 0, key % 3 + 1, SEQUENCE_START, "", b"body") for key in range(6)]
    original.enqueue(requests_of("g", rows, 10, CountingFrame()))
    original.dispatch(20)
    numbers = count(100)
    restored = unpack_state(pack_state(original, original._next_batch_id), numbers.__next__)
    assert (len(restored), restored.waiting, restored.workers()) == (len(original), original.waiting, {"w"})
    assert restored.in_flight_on("w") == original.in_flight_on("w")
    for scheduler in (original, restored):
        for batch_id in scheduler.in_flight_on("w"):
            scheduler.complete(30, batch_id, BatchOutcome.ANSWERED, 5)
    chosen = [[[r.key for r in batch.requests] for batch in each.dispatch(40)[0]] for each in (original, restored)]
    assert chosen[0] == chosen[1] != []


def test_an_object_of_another_package_can_not_be_stored():
    scheduler = ModelScheduler("model")
    scheduler.hook = Path()
    with pytest.raises(UnsupportedState, match="can not be stored"):
        pack_state(scheduler, lambda: 0)


@pytest.mark.parametrize("data", [b"", b"\xc1", msgpack.packb([]), msgpack.packb([["new", ["os", "stat_result"], []]])])
def test_malformed_states_are_rejected(data: bytes):
    with pytest.raises(UnsupportedState):
        unpack_state(data, lambda: 0)
