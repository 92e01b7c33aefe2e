"""Which batches are sent to which instances: the order of lanes, staging, windows, and the host of a payload."""

from __future__ import annotations

import pytest

from tests.support.scheduling.requests import keys, request
from weir.scheduler.batching.batch import Batch
from weir.scheduler.batching.dispatch import BATCH, EVENT, LIVE
from weir.scheduler.batching.dynamic_former import DynamicFormer
from weir.scheduler.batching.former import Former, SingleFormer
from weir.scheduler.batching.request import QueuedRequest
from weir.scheduler.batching.version_queue import VersionQueue
from weir.schemas.wire.batches import BatchEnded


class Version:
    """A version with `instances` on worker w."""

    def __init__(self, former: Former, instances: int = 1) -> None:
        self.queue = VersionQueue(1, former)
        self.queue.set_instances("w", instances)
        self.sent: list[Batch] = []

    def add(self, *requests: QueuedRequest) -> None:
        assert not self.queue.enqueue(list(requests))

    def send(self, now_us: int = 0) -> list[list[int] | None]:
        batches = self.queue.dispatch(now_us)[0]
        self.sent += batches
        return [keys(batch.requests) for batch in batches]

    def end(self, batch_id: int, now_us: int, busy_us: int) -> None:
        assert self.queue.complete(now_us, BatchEnded(batch_id, busy_us)) is not None


def test_batches_fill_idle_instances_and_then_the_slots_behind_them():
    version = Version(SingleFormer(), instances=2)
    version.add(*(request(key=key) for key in range(1, 7)))
    assert version.send() == [[1], [2], [3], [4]]
    assert [(batch.instance.number, batch.id) for batch in version.sent] == [(0, 1), (1, 2), (0, 3), (1, 4)]
    version.end(2, 10, 10)
    assert version.send(10) == [[5]]


def test_a_batch_that_could_grow_waits_for_the_instance():
    version = Version(DynamicFormer(4))
    version.add(request(key=1))
    assert version.send() == [[1]]
    version.end(1, 10_000, 10_000)
    version.add(request(10_000, key=2))
    assert version.send(10_000) == [[2]]
    version.add(request(10_000, key=3))
    batches, wake_at_us = version.queue.dispatch(10_000)
    assert batches == []
    assert wake_at_us == 20_000 - 500, "shortly before the running batch is expected to end"
    assert version.send(wake_at_us) == [[3]]


def test_a_fast_model_has_a_window_of_batches():
    version = Version(SingleFormer(runs_singly=True))
    version.add(request(key=1))
    assert version.send() == [[1]]
    version.end(1, 100, 100)
    version.add(*(request(100, key=key) for key in range(2, 8)))
    assert version.send(100) == [[2], [3], [4], [5], [6], [7]]


def test_lanes_are_served_in_order():
    version = Version(SingleFormer(), instances=3)
    version.add(request(key=1, lane=BATCH))
    version.add(request(key=2, lane=EVENT))
    version.add(request(key=3, lane=LIVE))
    sent = version.send()
    assert sent[:2] == [[3], [2]]
    assert all(not batch.is_batch_lane for batch in version.sent[:2])


def test_events_join_a_batch_of_live_requests():
    version = Version(DynamicFormer(4))
    version.add(request(key=1, lane=EVENT))
    version.add(request(key=2, lane=LIVE))
    assert version.send() == [[2, 1]]


def test_a_request_goes_to_the_host_of_its_payload_if_an_instance_is_idle_there():
    version = Version(SingleFormer(), instances=0)
    for host in ("00000001", "00000002"):
        version.queue.instances.set_instances(f"worker-{host}-a", 1)
    near = request(key=1)
    near.payload_host = "00000002"
    version.add(near)
    version.send()
    (batch,) = version.sent
    assert batch.instance.worker == "worker-00000002-a"


@pytest.mark.parametrize("lane", [LIVE, EVENT])
def test_a_request_that_runs_alone_takes_all_places(lane: int):
    version = Version(DynamicFormer(4))
    alone = request(key=1, lane=lane)
    alone.run_alone()
    version.add(alone, request(key=2, lane=lane))
    assert version.send() == [[1]]
    assert version.queue.instances.next_slot() is None
    version.end(1, 10, 10)
    assert version.send(10) == [[2]]
