"""Which batches are sent to which instances: the order of lanes, staging, windows, and the host of a payload."""

from __future__ import annotations

from itertools import count

import pytest

from tests.support.scheduling.requests import keys, request
from weir.scheduler.batching.batch import BatchesInFlight
from weir.scheduler.batching.batcher import Batcher, DefaultBatcher
from weir.scheduler.batching.dispatch import Dispatch
from weir.scheduler.batching.dynamic_batcher import DynamicBatcher
from weir.scheduler.batching.lanes import BATCH, EVENT, LIVE, LaneQueues
from weir.scheduler.batching.request import QueuedRequest
from weir.scheduler.placement.instances import Placement


class Version:
    """The dispatch of a version with `instances` on worker w."""

    def __init__(self, batcher: Batcher, instances: int = 1) -> None:
        self.lanes = LaneQueues(batcher)
        self.placement = Placement()
        self.placement.set_instances("w", instances)
        self.in_flight = BatchesInFlight()
        self.dispatch = Dispatch(1, self.lanes, self.placement, self.in_flight, count(1).__next__)

    def add(self, *requests: QueuedRequest) -> None:
        self.dispatch.record_arrivals(list(requests))
        self.lanes.enqueue(list(requests))

    def send(self, now_us: int = 0) -> list[list[int] | None]:
        return [keys(batch.requests) for batch in self.dispatch.batches(now_us)[0]]

    def end(self, batch_id: int, now_us: int, busy_us: int) -> None:
        batch = self.in_flight.pop(batch_id)
        assert batch is not None
        self.dispatch.batch_ended(batch, now_us, busy_us)


def test_batches_fill_idle_instances_and_then_the_slots_behind_them():
    version = Version(DefaultBatcher(), instances=2)
    version.add(*(request(key=key) for key in range(1, 7)))
    assert version.send() == [[1], [2], [3], [4]]
    assert [(batch.instance.number, batch.id) for batch in version.in_flight] == [(0, 1), (1, 2), (0, 3), (1, 4)]
    version.end(2, 10, 10)
    assert version.send(10) == [[5]]


def test_a_batch_that_could_grow_waits_for_the_instance():
    version = Version(DynamicBatcher(4))
    version.add(request(key=1))
    assert version.send() == [[1]]
    version.end(1, 10_000, 10_000)
    version.add(request(10_000, key=2))
    assert version.send(10_000) == [[2]]
    version.add(request(10_000, key=3))
    batches, wake_at_us = version.dispatch.batches(10_000)
    assert batches == []
    assert wake_at_us == 20_000 - 500, "shortly before the running batch is expected to end"
    assert version.send(wake_at_us) == [[3]]


def test_a_fast_model_has_a_window_of_batches():
    version = Version(DefaultBatcher(runs_singly=True))
    version.add(request(key=1))
    assert version.send() == [[1]]
    version.end(1, 100, 100)
    version.add(*(request(100, key=key) for key in range(2, 8)))
    assert version.send(100) == [[2], [3], [4], [5], [6], [7]]


def test_lanes_are_served_in_order():
    version = Version(DefaultBatcher(), instances=3)
    version.add(request(key=1, lane=BATCH))
    version.add(request(key=2, lane=EVENT))
    version.add(request(key=3, lane=LIVE))
    sent = version.send()
    assert sent[:2] == [[3], [2]]
    assert all(not batch.is_batch_lane for batch in list(version.in_flight)[:2])


def test_events_join_a_batch_of_live_requests():
    version = Version(DynamicBatcher(4))
    version.add(request(key=1, lane=EVENT))
    version.add(request(key=2, lane=LIVE))
    assert version.send() == [[2, 1]]


def test_a_request_goes_to_the_host_of_its_payload_if_an_instance_is_idle_there():
    version = Version(DefaultBatcher(), instances=0)
    for host in ("00000001", "00000002"):
        version.placement.set_instances(f"worker-{host}-a", 1)
    near = request(key=1)
    near.payload_host = "00000002"
    version.add(near)
    version.send()
    (batch,) = version.in_flight
    assert batch.instance.worker == "worker-00000002-a"


@pytest.mark.parametrize("lane", [LIVE, EVENT])
def test_a_request_that_runs_alone_takes_all_places(lane: int):
    version = Version(DynamicBatcher(4))
    alone = request(key=1, lane=lane)
    alone.run_alone()
    version.add(alone, request(key=2, lane=lane))
    assert version.send() == [[1]]
    assert version.placement.next_slot() is None
    version.end(1, 10, 10)
    assert version.send(10) == [[2]]
