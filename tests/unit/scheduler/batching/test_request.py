from __future__ import annotations

from tests.support.scheduling.requests import CountingFrame, part, request
from weir.scheduler.batching.request import NO_TERMS, DuplicateDelivery, arrival, requests_of


def test_a_request_holds_the_routing_facts_of_its_part():
    frame = CountingFrame()
    (made,) = requests_of("g", [part(7, version=3, batch_size=4, shape_key="2,3", body=b"abc")], 99, frame)
    assert (made.gateway, made.key, made.version, made.batch_size, made.shape_key) == ("g", 7, 3, 4, "2,3")
    assert (made.body, made.enqueued_us, made.frame, made.attempts, made.cancelled) == (b"abc", 99, frame, 0, False)


def test_the_lane_of_a_request_is_in_its_terms():
    made = requests_of("g", [part(1), part(2, lane=1), part(3, lane=2), part(4)], 0, CountingFrame())
    assert [r.lane for r in made] == [0, 1, 2, 0]
    assert made[0].terms is made[3].terms is NO_TERMS


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


def test_both_frames_are_notified():
    first, second = CountingFrame(), CountingFrame()
    DuplicateDelivery(first, second).requests_ended(1)
    assert (first.ended, second.ended) == (1, 1)
