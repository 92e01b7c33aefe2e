"""What the registry's records of a model mean for its queue."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.outlook import outlook
from schemas.registry import MAX_INSTANCES, ModelRecord, ModelState, VersionRecord

LOADING, READY, UNLOADING, UNAVAILABLE = ModelState
CONFIG = {"name": "m"}


def record(**states: ModelState) -> ModelRecord:
    """Versions (`v1`) in these states, each loaded one with two instances."""
    loaded = (READY, UNLOADING)
    versions = {int(v[1:]): VersionRecord(state, "", 2 * (state in loaded)) for v, state in states.items()}
    return ModelRecord("m", versions, CONFIG)


def test_ready_versions_run_on_every_worker_that_has_them():
    seen = outlook({"a": record(v1=READY), "b": record(v1=READY, v2=READY), "c": record(v1=UNAVAILABLE)}, ())
    assert seen.instances == {"a": {1: 2}, "b": {1: 2, 2: 2}, "c": {}}
    assert (seen.retiring, seen.given_up, seen.is_given_up) == (frozenset(), frozenset(), False)


def test_a_version_being_unloaded_runs_until_its_worker_is_let_go():
    records = {"a": record(v1=UNLOADING, v2=READY)}
    seen = outlook(records, ())
    assert (seen.instances, seen.retiring, seen.given_up) == ({"a": {1: 2, 2: 2}}, {1}, set())
    seen = outlook(records, {("a", 1)})
    assert (seen.instances, seen.retiring, seen.given_up) == ({"a": {2: 2}}, set(), {1})
    assert not seen.is_given_up


def test_a_worker_that_unloads_gets_nothing_more_while_others_serve():
    seen = outlook({"a": record(v1=UNLOADING), "b": record(v1=READY)}, ())
    assert (seen.instances, seen.retiring, seen.given_up) == ({"a": {}, "b": {1: 2}}, set(), set())


def test_what_is_coming_is_not_given_up():
    assert not outlook({"a": record(v1=LOADING)}, ()).is_given_up
    assert not outlook({"a": record(v1=LOADING), "b": record(v1=UNAVAILABLE)}, ()).given_up


def test_a_model_is_given_up_when_all_who_tell_of_it_have_it_no_longer():
    assert outlook({"a": record(v1=UNAVAILABLE)}, ()).is_given_up
    assert outlook({"a": ModelRecord("m", reason="why")}, ()).is_given_up
    assert not outlook({}, ()).is_given_up, "a worker that died tells nothing, and its successor may come"
    assert not outlook({"a": ModelRecord("m")}, ()).is_given_up, "nor does one who never had it"


def test_who_leaves_a_model_to_others_does_not_give_it_up():
    """They may have died just now: the model comes back with them, or where it came from."""
    for state in (UNAVAILABLE, UNLOADING):
        others = replace(record(v1=state), elsewhere=True)
        seen = outlook({"a": others}, {("a", 1)})
        assert (seen.given_up, seen.is_given_up) == (frozenset(), False)
        seen = outlook({"a": others, "b": record(v1=UNAVAILABLE)}, {("a", 1)})
        assert (seen.given_up, seen.is_given_up) == (frozenset({1}), True)


@pytest.mark.parametrize("instances", [-1, MAX_INSTANCES + 1, 1.5, "2", None])
def test_a_number_of_instances_that_can_t_be_is_refused(instances):
    with pytest.raises(ValueError):
        outlook({"a": ModelRecord("m", {1: VersionRecord(READY, "", instances)}, CONFIG)}, ())


STATES = st.dictionaries(st.integers(1, 3), st.sampled_from(list(ModelState)), max_size=3)


@given(st.dictionaries(st.sampled_from("abc"), STATES), st.sets(st.tuples(st.sampled_from("abc"), st.integers(1, 3))))
def test_a_version_with_instances_is_never_given_up_and_one_given_up_has_none(states, released):
    records = {
        worker: ModelRecord("m", {n: VersionRecord(state, "", 1) for n, state in of_worker.items()}, CONFIG)
        for worker, of_worker in states.items()
    }
    seen = outlook(records, released)
    running = {number for instances in seen.instances.values() for number in instances}
    assert not running & seen.given_up
    assert seen.retiring <= running
    assert not (seen.is_given_up and running)
    ready = {(w, n) for w, of_worker in states.items() for n, state in of_worker.items() if state is READY}
    assert ready <= {(w, n) for w, instances in seen.instances.items() for n in instances}
