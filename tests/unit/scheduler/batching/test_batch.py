"""Batches in flight by worker, and which of them heartbeats show to be lost."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from weir.scheduler.batching.batch import Batch, BatchesInFlight, BatchReconciler
from weir.scheduler.placement.instances import Instance
from weir.schemas.wire.registry import Heartbeat


def batch(id: int, worker: str = "w") -> Batch:
    return Batch(id, 1, Instance(worker, 0), [])


def heartbeat(*ids: int, scheduler: str = "s", worker: str = "w") -> Heartbeat:
    return Heartbeat(worker, {scheduler: list(ids)})


def in_flight(*ids: int) -> Iterable[int]:
    return lambda worker: ids if worker == "w" else ()  # type: ignore[return-value]


def test_batches_are_found_by_id_and_by_worker_in_the_order_they_were_sent():
    batches = BatchesInFlight()
    for id, worker in ((3, "v"), (1, "w"), (2, "v")):
        batches.add(batch(id, worker))
    assert [each.id for each in batches] == [3, 1, 2]
    assert batches.on("v") == [3, 2]
    assert batches.get(1) is not None
    assert batches.pop(3) is not None
    assert batches.pop(3) is None
    assert (batches.on("v"), len(batches)) == ([2], 2)


def test_a_batch_that_two_heartbeats_in_a_row_do_not_list_is_lost():
    reconciler = BatchReconciler("s")
    assert reconciler.lost(heartbeat(1), in_flight(1, 2)) == set(), "the batch may still be on its way"
    assert reconciler.lost(heartbeat(1), in_flight(1, 2)) == {2}
    assert reconciler.lost(heartbeat(1), in_flight(1)) == set()


def test_a_batch_that_is_listed_in_between_is_not_lost():
    reconciler = BatchReconciler("s")
    reconciler.lost(heartbeat(), in_flight(1))
    assert reconciler.lost(heartbeat(1), in_flight(1)) == set()
    assert reconciler.lost(heartbeat(), in_flight(1)) == set()


def test_a_heartbeat_without_batches_of_this_scheduler_lists_none():
    reconciler = BatchReconciler("s")
    reconciler.lost(heartbeat(1, scheduler="another"), in_flight(1))
    assert reconciler.lost(heartbeat(1, scheduler="another"), in_flight(1)) == {1}


def test_heartbeats_of_other_workers_do_not_count():
    reconciler = BatchReconciler("s")
    reconciler.lost(heartbeat(), in_flight(1))
    reconciler.lost(heartbeat(worker="v"), in_flight(1))
    assert reconciler.lost(heartbeat(1), in_flight(1)) == set()


def test_after_a_reconnection_counting_starts_again():
    reconciler = BatchReconciler("s")
    reconciler.lost(heartbeat(), in_flight(1))
    reconciler.clear()
    assert reconciler.lost(heartbeat(), in_flight(1)) == set()
    assert reconciler.lost(heartbeat(), in_flight(1)) == {1}


def test_a_worker_that_returns_under_its_name_starts_again():
    reconciler = BatchReconciler("s")
    reconciler.lost(heartbeat(), in_flight(1))
    reconciler.forget("w")
    assert reconciler.lost(heartbeat(), in_flight(1)) == set()


@given(st.lists(st.tuples(st.sets(st.integers(0, 4)), st.sets(st.integers(0, 4)))))
def test_a_batch_is_lost_once_and_only_after_two_heartbeats_without_it(steps: list[tuple[set[int], set[int]]]):
    reconciler = BatchReconciler("s")
    missed: dict[int, int] = {}
    for held, sent in steps:
        lost = reconciler.lost(heartbeat(*held), in_flight(*sent))
        missed = {id: missed.get(id, 0) + 1 for id in sent - held}
        assert lost == {id for id, times in missed.items() if times == 2}
        missed = {id: times for id, times in missed.items() if times < 2}
