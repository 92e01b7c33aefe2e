"""The rows of batch messages, error responses, and cancellations."""

from __future__ import annotations

import pytest

from tests.support.scheduling.requests import CountingFrame, request
from weir.scheduler.batching.batch import Batch
from weir.scheduler.batching.outcome import Failure
from weir.scheduler.placement.instances import Instance
from weir.scheduler.service.messages import batch_rows, error_responses
from weir.schemas.core.errors import overloaded
from weir.schemas.wire.batches import NO_REPLY, SequencePosition


def batch(requests: int = 2, **attributes: object) -> Batch:
    made = Batch(1, 1, Instance("w", 0), [request(10, key=key, body=b"%d" % key) for key in range(1, requests + 1)])
    made.has_deadlines = False
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def test_a_plain_row_has_the_gateway_the_key_the_time_in_the_queue_and_the_body():
    assert batch_rows(batch(), 25) == [("gateway", 1, 15, b"1"), ("gateway", 2, 15, b"2")]


@pytest.mark.parametrize(("attribute", "length"), [("has_deadlines", 5), ("has_lanes", 7)])
def test_deadlines_and_lanes_are_sent_only_if_the_batch_needs_them(attribute: str, length: int):
    assert {len(row) for row in batch_rows(batch(**{attribute: True}), 0)} == {length}


def test_a_sequences_place_follows_the_deadline():
    place = SequencePosition(3, 0, False, 7, 0)
    (row,) = batch_rows(batch(1, places=[place]), 10)
    assert row == ("gateway", 1, 0, b"1", 0, place)


def test_padding_rows_stand_at_their_positions_without_a_caller():
    rows = batch_rows(batch(2, padding_rows=[0, 2]), 10)
    assert [row[0] for row in rows] == [NO_REPLY, "gateway", NO_REPLY, "gateway"]
    assert rows[0][3] == b"1", "padding has the shapes of the batch"


def test_error_responses_are_grouped_by_gateway_and_end_their_frames():
    one, two, three = request(key=1, gateway="g"), request(key=2, gateway="h"), request(key=3, gateway="g")
    responses = error_responses([Failure(each, overloaded()) for each in (one, two, three)])
    assert {gateway: [row[0] for row in rows] for gateway, rows in responses.items()} == {"g": [1, 3], "h": [2]}
    for each in (one, two, three):
        assert isinstance(each.frame, CountingFrame)
        assert each.frame.ended == 1
