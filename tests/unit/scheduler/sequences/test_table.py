"""Which sequences get slots, and what happens to them when instances leave."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.scheduling.requests import request
from weir.scheduler.batching.request import QueuedRequest
from weir.scheduler.sequences.table import QUARANTINE_US, SequenceTable
from weir.schemas.core.requests import SEQUENCE_START, Lane

IDLE_US = 1_000


def of(id: int, now_us: int = 0, flags: int = 0, lane: int = 0) -> QueuedRequest:
    made = request(now_us, lane=lane)
    made.terms = made.terms._replace(correlation_id=id, sequence_flags=flags)
    return made


def start(table: SequenceTable, *ids: int, now_us: int = 0, lane: int = 0) -> None:
    for id in ids:
        assert table.add(of(id, now_us, SEQUENCE_START, lane), starts=True, ends=False)


def ready(table: SequenceTable) -> dict[tuple[str, int], list[object]]:
    return {key: [each.id for each in instance.ready] for key, instance in table.instances.items()}


def run(table: SequenceTable, worker: str, now_us: int) -> None:
    """Runs one request of each sequence of the worker's instance 0."""
    instance = table.instances[worker, 0]
    for sequence in list(instance.ready):
        taken, _ = table.take(sequence)
        sequence.progress.ended(taken)
        table.request_ended(sequence, now_us)


@pytest.fixture
def new() -> Callable[..., SequenceTable]:
    def make(slots: int = 2, every: int = 0, workers: str = "v") -> SequenceTable:
        table = SequenceTable(slots, IDLE_US, every)
        for worker in workers:
            assert table.set_instances(worker, [0]) == []
        return table

    return make


def test_sequences_get_slots_on_the_instance_with_most_free_ones(new: Callable[..., SequenceTable]):
    table = new(slots=2, workers="vw")
    start(table, 1, 2, 3, 4, 5)
    table.assign_slots(0)
    assert sorted(map(len, ready(table).values())) == [2, 2]
    assert table.open_sequences == 5
    assert table.waiting == 5


def test_a_slot_that_becomes_free_goes_to_the_lane_that_comes_first(new: Callable[..., SequenceTable]):
    table = new(slots=1)
    start(table, 1)
    table.assign_slots(0)
    start(table, 2, lane=Lane.BATCH.value)
    start(table, 3, lane=Lane.LIVE.value)
    run(table, "v", 0)
    table.assign_slots(IDLE_US)
    assert ready(table) == {("v", 0): [3]}, "sequence 1 expired while it was idle"


def test_a_request_without_start_is_rejected(new: Callable[..., SequenceTable]):
    table = new()
    assert not table.add(of(1), starts=False, ends=False)
    start(table, 1)
    assert table.add(of(1), starts=False, ends=True)
    assert not table.add(of(1), starts=False, ends=False), "the sequence has ended"


def test_an_idle_sequence_expires_and_wakes_in_time(new: Callable[..., SequenceTable]):
    table = new()
    start(table, 1)
    table.assign_slots(0)
    run(table, "v", 100)
    assert table.assign_slots(200) == 100 + IDLE_US
    assert table.assign_slots(100 + IDLE_US) is None
    assert table.open_sequences == 0


def test_sequences_of_a_removed_instance_are_lost_until_they_start_again(new: Callable[..., SequenceTable]):
    table = new()
    start(table, 1, 2)
    table.assign_slots(0)
    lost = table.set_instances("v", [])
    assert sorted(each.id for each in lost) == [1, 2]
    assert table.is_lost(1)
    start(table, 1)
    assert not table.is_lost(1)
    assert table.is_lost(2)


def test_checkpointed_sequences_of_a_removed_instance_move(new: Callable[..., SequenceTable]):
    table = new(every=1, workers="vw", slots=1)
    start(table, 1)
    table.assign_slots(0)
    (worker,) = [key[0] for key, ids in ready(table).items() if ids]
    run(table, worker, 0)
    assert table.add(of(1, 1), starts=False, ends=False)
    assert table.set_instances(worker, []) == []
    table.assign_slots(1)
    assert list(ready(table).values()) == [[1]]


def test_a_quarantined_instance_gets_no_sequences_for_a_while(new: Callable[..., SequenceTable]):
    table = new()
    instance = table.instances["v", 0]
    table.quarantine(instance, 0)
    start(table, 1)
    assert table.assign_slots(1) == QUARANTINE_US
    assert ready(table) == {("v", 0): []}
    table.assign_slots(QUARANTINE_US)
    assert ready(table) == {("v", 0): [1]}


def test_a_backlog_is_drained_by_arrival(new: Callable[..., SequenceTable]):
    table = new(workers="")
    start(table, 1, now_us=10)
    start(table, 2, now_us=20)
    assert [each.correlation_id for each in table.drain_backlog(15)] == [1]
    assert table.open_sequences == 1


def test_a_worker_is_needed_while_it_holds_a_sequence(new: Callable[..., SequenceTable]):
    table = new(workers="vw", slots=1)
    start(table, 1)
    table.assign_slots(0)
    assert [table.holds(worker) for worker in "vw"].count(True) == 1
