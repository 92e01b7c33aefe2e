from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queued import CountingFrame, part, request

from scheduler.queued_request import NO_TERMS, BothFrames, arrival, requests_of
from schemas.wire import MalformedMessage


def test_a_request_holds_the_routing_facts_of_its_part():
    frame = CountingFrame(1)
    (made,) = requests_of("g", [part(7, version=3, batch_size=4, shape_key="2,3", body=b"abc")], 99, frame)
    assert (made.gateway, made.key, made.version, made.batch_size, made.shape_key) == ("g", 7, 3, 4, "2,3")
    assert (made.body, made.enqueued_us, made.frame, made.attempts, made.cancelled) == (b"abc", 99, frame, 0, False)


@pytest.mark.parametrize(
    "change",
    [
        {"key": "7"},
        {"key": True},
        {"version": None},
        {"version": [1]},
        {"batch_size": 0},
        {"batch_size": -1},
        {"batch_size": 1.5},
        {"shape_key": 3},
        {"body": "text"},
        {"body": None},
        {"lane": 3},
        {"lane": -1},
        {"lane": True},
        {"lane": "batch"},
        {"lane": [1]},
    ],
)
def test_a_row_with_a_field_of_the_wrong_type_is_malformed(change: dict[str, Any]):
    with pytest.raises(MalformedMessage):
        requests_of("g", [part(1), part(2)._replace(**change)], 0, CountingFrame())


def test_a_request_of_another_lane_is_told_by_its_terms():
    made = requests_of("g", [part(1), part(2, lane=1), part(3, lane=2), part(4)[:11]], 0, CountingFrame())
    assert [r.lane for r in made] == [0, 1, 2, 0]
    assert made[0].terms is made[3].terms is NO_TERMS


@given(st.one_of(st.none(), st.integers(), st.text(), st.lists(st.integers()), st.dictionaries(st.text(), st.none())))
def test_anything_else_in_the_place_of_a_row_is_malformed(row: Any):
    with pytest.raises(MalformedMessage):
        requests_of("g", [row], 0, CountingFrame())


def test_running_alone_makes_a_shape_that_no_request_has():
    first, second = request(), request()
    assert first.shape_key == second.shape_key
    first.run_alone()
    second.run_alone()
    assert first.shape_key != second.shape_key
    assert first.shape_key != ""


def test_requests_arrive_in_the_order_of_time_and_within_a_frame_of_their_keys():
    requests = [request(5, key=2), request(5, key=1), request(4, key=9)]
    assert [r.key for r in sorted(requests, key=arrival)] == [9, 1, 2]


def test_both_frames_are_told_and_neither_is_delegated():
    first, second = CountingFrame(), CountingFrame()
    both = BothFrames(first, second)
    assert both.delegate(1, 1) is None
    both.requests_ended(1, 4)
    assert (first.ended, first.batch_ids, second.ended, second.batch_ids) == (1, [4], 1, [4])
