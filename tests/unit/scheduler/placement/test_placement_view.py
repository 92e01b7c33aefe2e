"""What registry records mean for a queue, and how instances are divided between partitions."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.scheduling.requests import CountingFrame, part
from weir.scheduler.batching.request import requests_of
from weir.scheduler.model_scheduler import ModelScheduler
from weir.scheduler.placement.instances import Instances
from weir.scheduler.placement.placement_view import (
    InstanceKey,
    PartitionShares,
    divide_instances,
    partition_view,
    placement_view,
    share_of,
)
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.requests import SEQUENCE_START
from weir.schemas.wire.registry import MAX_INSTANCES, ModelRecord, ModelState, VersionRecord

LOADING, READY, UNLOADING, UNAVAILABLE = ModelState
CONFIG = {"name": "m"}


def record(**states: ModelState) -> ModelRecord:
    """Versions (`v1`) in these states, each loaded one with two instances."""
    loaded = (READY, UNLOADING)
    versions = {int(v[1:]): VersionRecord(state, "", 2 * (state in loaded)) for v, state in states.items()}
    return ModelRecord("m", versions, CONFIG)


def test_ready_versions_run_on_every_worker_that_has_them():
    seen = placement_view({"a": record(v1=READY), "b": record(v1=READY, v2=READY), "c": record(v1=UNAVAILABLE)}, ())
    assert seen.instances == {"a": {1: 2}, "b": {1: 2, 2: 2}, "c": {}}
    assert (seen.retiring, seen.given_up, seen.is_withdrawn) == (frozenset(), frozenset(), False)


def test_a_version_being_unloaded_runs_until_its_worker_is_released():
    records = {"a": record(v1=UNLOADING, v2=READY)}
    seen = placement_view(records, ())
    assert (seen.instances, seen.retiring, seen.given_up) == ({"a": {1: 2, 2: 2}}, {1}, set())
    seen = placement_view(records, {("a", 1)})
    assert (seen.instances, seen.retiring, seen.given_up) == ({"a": {2: 2}}, set(), {1})
    assert not seen.is_withdrawn


def test_a_worker_that_unloads_gets_nothing_more_while_others_serve():
    seen = placement_view({"a": record(v1=UNLOADING), "b": record(v1=READY)}, ())
    assert (seen.instances, seen.retiring, seen.given_up) == ({"a": {}, "b": {1: 2}}, set(), set())


def test_a_loading_version_is_not_withdrawn():
    assert not placement_view({"a": record(v1=LOADING)}, ()).is_withdrawn
    assert not placement_view({"a": record(v1=LOADING), "b": record(v1=UNAVAILABLE)}, ()).given_up


def test_a_model_is_withdrawn_when_all_its_workers_unloaded_it():
    assert placement_view({"a": record(v1=UNAVAILABLE)}, ()).is_withdrawn
    assert placement_view({"a": ModelRecord("m", reason="why")}, ()).is_withdrawn
    assert not placement_view({}, ()).is_withdrawn, "a dead worker withdraws nothing: another may join"
    assert not placement_view({"a": ModelRecord("m")}, ()).is_withdrawn, "nor does one that never had it"


def test_a_worker_without_the_model_placed_does_not_withdraw_it():
    """They may have died just now: the model comes back with them, or where it came from."""
    for state in (UNAVAILABLE, UNLOADING):
        others = replace(record(v1=state), elsewhere=True)
        seen = placement_view({"a": others}, {("a", 1)})
        assert (seen.given_up, seen.is_withdrawn) == (frozenset(), False)
        seen = placement_view({"a": others, "b": record(v1=UNAVAILABLE)}, {("a", 1)})
        assert (seen.given_up, seen.is_withdrawn) == (frozenset({1}), True)


@pytest.mark.parametrize("instances", [-1, MAX_INSTANCES + 1, 1.5, "2", None])
def test_an_impossible_number_of_instances_is_rejected(instances):
    with pytest.raises(ValueError):
        placement_view({"a": ModelRecord("m", {1: VersionRecord(READY, "", instances)}, CONFIG)}, ())


STATES = st.dictionaries(st.integers(1, 3), st.sampled_from(list(ModelState)), max_size=3)


@given(st.dictionaries(st.sampled_from("abc"), STATES), st.sets(st.tuples(st.sampled_from("abc"), st.integers(1, 3))))
def test_a_version_with_instances_is_never_withdrawn(states, released):
    records = {
        worker: ModelRecord("m", {n: VersionRecord(state, "", 1) for n, state in of_worker.items()}, CONFIG)
        for worker, of_worker in states.items()
    }
    seen = placement_view(records, released)
    running = {number for instances in seen.instances.values() for number in instances}
    assert not running & seen.given_up
    assert seen.retiring <= running
    assert not (seen.is_withdrawn and running)
    ready = {(w, n) for w, of_worker in states.items() for n, state in of_worker.items() if state is READY}
    assert ready <= {(w, n) for w, instances in seen.instances.items() for n in instances}


workers = st.dictionaries(st.uuids().map(lambda id: f"worker-{id.hex[:12]}"), st.integers(1, 6), max_size=12)
partition_counts = st.integers(1, 16)


def instances_of(counts: dict[str, int]) -> frozenset[InstanceKey]:
    return frozenset((worker, number) for worker, count in counts.items() for number in range(count))


def homes(shares: PartitionShares) -> dict[InstanceKey, int]:
    return {instance: partition for partition, share in enumerate(shares) for instance in share}


def moved(before: PartitionShares, after: PartitionShares) -> int:
    """Instances that are there before and after, in another share."""
    earlier, later = homes(before), homes(after)
    return sum(later[instance] != partition for instance, partition in earlier.items() if instance in later)


@given(workers, partition_counts, st.booleans())
def test_shares_cover_all_and_are_disjoint(counts: dict[str, int], partitions: int, exclusive: bool) -> None:
    instances = instances_of(counts)
    shares = divide_instances(instances, partitions, exclusive)
    assert len(shares) == partitions
    assert frozenset().union(*shares) == instances
    sizes = [len(share) for share in shares]
    if len(instances) >= partitions:
        assert sum(sizes) == len(instances), "each instance has one partition"
        assert min(sizes) >= max(1, len(instances) // (2 * partitions))
        assert max(sizes) <= -(-5 * len(instances) // (4 * partitions))
    elif exclusive:
        assert sum(sizes) == len(instances), "none is in two shares"
    elif instances:
        assert set(sizes) == {1}, "each partition has one"


@given(workers, partition_counts, st.randoms(use_true_random=False))
def test_all_schedulers_compute_the_same(counts: dict[str, int], partitions: int, random: object) -> None:
    reported = list(instances_of(counts))
    random.shuffle(reported)  # type: ignore[attr-defined]
    divide_instances.cache_clear()
    first = divide_instances(frozenset(reported), partitions)
    divide_instances.cache_clear()
    assert divide_instances(frozenset(sorted(reported)), partitions) == first


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 3), st.uuids())
def test_nothing_moves_if_all_workers_have_a_multiple(others: int, partitions: int, times: int, new: object) -> None:
    before = {f"worker-{number}": times * partitions for number in range(others)}
    shares = divide_instances(instances_of(before), partitions, True)
    grown = divide_instances(instances_of({**before, f"worker-{new}": times * partitions}), partitions, True)
    assert moved(shares, grown) == 0
    assert len({len(share) for share in shares}) == len({len(share) for share in grown}) == 1


@settings(max_examples=200)
@given(workers.filter(bool), st.integers(2, 8), st.integers(1, 6))
def test_few_move_when_a_worker_comes_or_goes(counts: dict[str, int], partitions: int, more: int) -> None:
    before = instances_of(counts)
    after = before | {("worker-new", number) for number in range(more)}
    if len(before) < partitions:
        return
    assert (
        moved(divide_instances(before, partitions, True), divide_instances(after, partitions, True))
        <= 2 * more + partitions
    )


def test_on_average_fewer_move_than_come() -> None:
    came = moves = 0
    for workers_before in range(4, 40):
        for partitions in (2, 3, 4, 8):
            for per_worker in (1, 2, 3):
                counts = {f"w{n}": per_worker for n in range(workers_before)}
                before, after = instances_of(counts), instances_of({**counts, "w-new": per_worker})
                if len(before) >= partitions:
                    came += per_worker
                    moves += moved(
                        divide_instances(before, partitions, True), divide_instances(after, partitions, True)
                    )
    assert moves < 0.5 * came, f"{moves} moved for {came} that came"


def test_a_partition_that_is_left_over() -> None:
    shares = divide_instances(frozenset({("w", 0), ("w", 1)}), 2)
    assert share_of(shares, 3, exclusive=False) == shares[1]
    assert share_of(shares, 3, exclusive=True) == frozenset()


PARTITIONS = 3


def config(partitions: int = PARTITIONS, **more: Any) -> dict[str, Any]:
    return {"name": "m", "parameters": {"weir_partitions": {"string_value": str(partitions)}}, **more}


def versioned_record(versions: dict[int, VersionRecord], written_ns: int = 0, **more: Any) -> ModelRecord:
    return ModelRecord("ns::m", versions, config(**more), written_ns=written_ns)


rows = st.builds(
    VersionRecord,
    st.sampled_from([ModelState.READY, ModelState.UNLOADING, ModelState.LOADING]),
    instances=st.integers(0, 5),
)
clusters = st.dictionaries(
    st.sampled_from([f"worker-{number}" for number in range(8)]),
    st.dictionaries(st.sampled_from([1, 2]), rows),
    max_size=8,
)
released_versions = st.sets(
    st.tuples(st.sampled_from([f"worker-{number}" for number in range(8)]), st.sampled_from([1, 2]))
)


@settings(max_examples=50)
@given(clusters, st.lists(released_versions, min_size=PARTITIONS, max_size=PARTITIONS), st.booleans())
def test_no_instance_has_two_partitions(
    reported: dict[str, dict[int, VersionRecord]], released: list[set[tuple[str, int]]], of_sequences: bool
) -> None:
    """Also while one owner has released what another still needs."""
    more = {"sequence_batching": {"direct": {}}} if of_sequences else {}
    records = {worker: versioned_record(versions, **more) for worker, versions in reported.items()}
    whole = placement_view(records, ())
    shares = []
    for partition in range(PARTITIONS):
        ahead = placement_view(records, released[partition])
        mine = partition_view(ahead, records, partition, PARTITIONS)
        assert mine.instances == {w: {v: len(of) for v, of in by.items()} for w, by in mine.numbers.items()}
        assert (mine.retiring, mine.given_up) == (ahead.retiring, ahead.given_up)
        shares.append({(w, v, n) for w, by in mine.numbers.items() for v, of in by.items() for n in of})
    for version in (1, 2):
        there = sum(by.get(version, 0) for by in whole.instances.values())
        counts = [sum(v == version for _, v, _ in share) for share in shares]
        if of_sequences or there >= PARTITIONS:
            of_version = [{key for key in share if key[1] == version} for share in shares]
            assert len(set().union(*of_version)) == sum(counts)
        if not any(released) and there >= PARTITIONS:
            assert min(counts) > 0
            assert sum(counts) == there


def test_instances_are_used_by_their_numbers() -> None:
    """Or all partitions would use the first of each worker."""
    placement = Instances()
    placement.set_instances("w", 2, [1, 3])
    used = []
    for _ in range(2):
        instance = placement.next_slot()
        assert instance is not None
        placement.occupy(instance, 0)
        used.append(instance.number)
    assert used == [1, 3]
    placement.set_instances("w", 2, [3, 4])
    assert len(placement) == 2
    assert placement.next_idle().number == 4  # type: ignore[union-attr]


@pytest.mark.parametrize("strategy", ["direct", "oldest"])
def test_partitions_of_one_scheduler_number_their_sequences_uniquely(strategy: str) -> None:
    """Instances and checkpoints know a sequence by its scheduler and the number of its run."""
    batching = {"direct": {}} if strategy == "direct" else {"oldest": {"max_candidate_sequences": 2}}
    of_sequences = ModelConfig.model_validate({"name": "m", "max_batch_size": 2, "sequence_batching": batching})
    draw, runs = count(1).__next__, []
    for partition in range(2):
        scheduler = ModelScheduler("m", draw)
        scheduler.configure(1, of_sequences)
        scheduler.set_instances("w", {1: 1}, {1: [partition]})
        begins = part(1)._replace(correlation_id=7, sequence_flags=SEQUENCE_START)
        scheduler.enqueue(requests_of("gateway", [begins], 1, CountingFrame()))
        (batch,), _ = scheduler.dispatch(1)
        assert batch.instance.number == partition
        runs.append(batch.places[0].run)
    assert len(set(runs)) == 2
