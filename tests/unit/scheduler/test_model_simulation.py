"""Whatever happens, in whatever order, no request is lost, run beside the rules, or ended twice.

`WEIR_SIMULATIONS=100000 pytest tests/unit/scheduler/test_model_simulation.py -s` tries as many lives as that and prints
how many events they had.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_simulation import CONFIGS, Event, Simulation
from queued import LATEST

LIVES = int(os.environ.get("WEIR_SIMULATIONS", "40"))

workers = st.sampled_from(["a", "b"])
gateways = st.sampled_from(["g1", "g2"])
numbers = st.integers(0, 30)
few = st.lists(numbers, min_size=1, max_size=3)


def lives(versions: list[int], wanted: list[int]) -> st.SearchStrategy[list[Event]]:
    """Lists of events for a model of these versions, of which requests ask for the wanted ones."""
    requests = st.lists(
        st.tuples(st.sampled_from(wanted), st.integers(1, 5), st.sampled_from(["", "", "x"])), min_size=1, max_size=8
    )
    version = st.sampled_from(versions)
    arrive = st.tuples(st.just("arrive"), gateways, requests)
    complete = st.tuples(st.just("complete"), numbers, st.sampled_from([0, 0, 1]), st.sampled_from([0, 5, 4000]))
    serve = st.tuples(st.just("serve"), workers, version, st.integers(0, 2))
    event = st.one_of(
        arrive,
        arrive,
        complete,
        complete,
        serve,
        st.tuples(st.just("configure"), version, st.integers(0, len(CONFIGS) - 1)),
        st.tuples(st.just("send_again"), numbers),
        st.tuples(st.just("advance"), st.sampled_from([1, 40, 100, 4000])),
        st.tuples(st.just("wake")),
        st.tuples(st.just("release"), numbers),
        st.tuples(st.just("complete_abandoned"), numbers),
        st.tuples(st.just("miss"), few),
        st.tuples(st.just("lose"), workers),
        st.tuples(st.just("cancel"), few),
        st.tuples(st.just("expire")),
        st.tuples(st.just("unload"), st.lists(version, max_size=2), st.lists(version, max_size=2)),
    )
    begin = st.tuples(st.tuples(st.just("configure"), version, st.integers(0, len(CONFIGS) - 1)), serve).map(list)
    long = st.one_of(*(st.lists(event, min_size=size, max_size=100) for size in (0, 20, 60)))
    return st.builds(list.__add__, st.one_of(begin, begin, st.just([])), long)


@pytest.fixture(scope="module")
def events_played() -> Iterator[list[int]]:
    """How many events each life had."""
    played: list[int] = []
    yield played
    print(f"\n{sum(played)} events in {len(played)} lives")


def live(events: list[Event], events_played: list[int]) -> None:
    simulation = Simulation()
    simulation.replay(events)
    events_played.append(simulation.events_played)


thorough = settings(max_examples=LIVES, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@thorough
@given(events=lives([1], [LATEST, 1]))
def test_a_model_of_one_version(events_played: list[int], events: list[Event]):
    live(events, events_played)


@thorough
@given(events=lives([1, 2], [LATEST, LATEST, 1, 2, 7]))
def test_a_model_of_several_versions(events_played: list[int], events: list[Event]):
    live(events, events_played)
