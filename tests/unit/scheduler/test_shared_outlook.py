"""What each partition of a model has of the instances that workers tell of."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queued import CountingFrame, part

from bus.live_queues import LiveQueue
from scheduler.event_log import EventLog
from scheduler.model_scheduler import ModelScheduler
from scheduler.outlook import outlook
from scheduler.placement import Placement
from scheduler.queued_request import requests_of
from scheduler.shared_outlook import shared_by
from scheduler.wanted_queues import latest_config, queues_by, queues_of
from schemas.model_config import ModelConfig
from schemas.registry import ModelRecord, ModelState, VersionRecord
from schemas.requests import SEQUENCE_START

PARTITIONS = 3


def config(partitions: int = PARTITIONS, **more: Any) -> dict[str, Any]:
    return {"name": "m", "parameters": {"weir_partitions": {"string_value": str(partitions)}}, **more}


def record(versions: dict[int, VersionRecord], written_ns: int = 0, **more: Any) -> ModelRecord:
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
let_go = st.sets(st.tuples(st.sampled_from([f"worker-{number}" for number in range(8)]), st.sampled_from([1, 2])))


@settings(max_examples=50)
@given(clusters, st.lists(let_go, min_size=PARTITIONS, max_size=PARTITIONS), st.booleans())
def test_no_instance_has_two_partitions(
    told: dict[str, dict[int, VersionRecord]], released: list[set[tuple[str, int]]], of_sequences: bool
) -> None:
    """Also while the owner of one has let go of what that of another still needs."""
    more = {"sequence_batching": {"direct": {}}} if of_sequences else {}
    records = {worker: record(versions, **more) for worker, versions in told.items()}
    whole = outlook(records, ())
    shares = []
    for partition in range(PARTITIONS):
        ahead = outlook(records, released[partition])
        mine = shared_by(ahead, records, partition, PARTITIONS)
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


def test_the_queues_of_a_model() -> None:
    assert queues_of(ModelConfig.model_validate({"name": "m"})) == [LiveQueue("m")]
    assert queues_of(ModelConfig.model_validate(config(2)), "ns::m") == [LiveQueue("ns::m"), LiveQueue("ns::m", 1)]
    assert queues_of(None, "m") == [LiveQueue("m")]
    records = [record({}, 5, partitions=4), record({}, 9, partitions=2), ModelRecord("ns::m", written_ns=11)]
    assert len(queues_by(records, "ns::m")) == 2, "what was written last holds, as for callers"
    assert latest_config([]) is None
    assert queues_by([ModelRecord("m", config={"parameters": {"weir_partitions": 3}})], "m") == [LiveQueue("m")]


def test_instances_are_used_by_their_numbers() -> None:
    """Or all partitions would use the first of each worker."""
    placement = Placement()
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
def test_partitions_of_one_scheduler_name_their_sequences_apart(strategy: str, tmp_path: Any) -> None:
    """Instances and checkpoints know a sequence by its scheduler and the number of its run."""
    batching = {"direct": {}} if strategy == "direct" else {"oldest": {"max_candidate_sequences": 2}}
    of_sequences = ModelConfig.model_validate({"name": "m", "max_batch_size": 2, "sequence_batching": batching})
    draw, runs = count(1).__next__, []
    log = EventLog(tmp_path, "scheduler")
    for partition in range(2):
        scheduler: ModelScheduler = log.model(LiveQueue("m", partition), draw)
        scheduler.configure(1, of_sequences)
        scheduler.set_instances("w", {1: 1}, {1: [partition]})
        begins = part(1)._replace(correlation_id=7, sequence_flags=SEQUENCE_START)
        scheduler.enqueue(requests_of("gateway", [begins], 1, CountingFrame()))
        (batch,), _ = scheduler.dispatch(1)
        assert batch.instance.number == partition
        runs.append(batch.places[0].run)
    assert len(set(runs)) == 2
    log.close()
    files = sorted(path.name.split(".")[0] for path in tmp_path.iterdir())
    assert files == ["m", "m=p1"], "each has files of its own"
