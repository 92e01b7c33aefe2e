"""Whatever happens, in whatever order, no request is lost, run beside the rules, or ended twice.

`WEIR_SIMULATIONS=100000 pytest tests/unit/scheduler/test_model_simulation.py -s` tries as many lives as that and prints
how many events they had.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.scheduling.requests import CONFIGS, LATEST, config, policy
from tests.support.scheduling.simulation import Event, Simulation
from weir.schemas.wire.batches import NotRunReason
from weir.schemas.wire.calls import Caller

LIVES = int(os.environ.get("WEIR_SIMULATIONS", "40"))

workers = st.sampled_from(["a", "b"])
gateways = st.sampled_from(["g1", "g2"])
numbers = st.integers(0, 30)
few = st.lists(numbers, min_size=1, max_size=3)


policies = st.builds(
    policy,
    st.sampled_from([0, 1, 3]),
    st.sampled_from([0, 300, 2_000]),
    st.sampled_from(["REJECT", "DELAY"]),
    st.booleans(),
)
dynamic = st.builds(
    config,
    st.sampled_from([0, 0, 100]),
    st.sampled_from([(), (2, 4)]),
    priority_levels=st.sampled_from([0, 3, 3]),
    default_priority_level=st.integers(1, 3),
    default_queue_policy=st.one_of(st.none(), policies),
    priority_queue_policy=st.dictionaries(st.integers(1, 3), policies, max_size=2),
)


configs = st.one_of(st.integers(0, len(CONFIGS) - 1), dynamic)
ALONE = next(number for number, one in enumerate(CONFIGS) if one.dynamic_batching is None)


def lives(
    versions: list[int],
    wanted: list[int],
    configs: st.SearchStrategy[object] = configs,
    most: int = 8,
    lanes: Sequence[int] = (),
    callers: Sequence[Caller] = (),
) -> st.SearchStrategy[list[Event]]:
    """Lists of events for a model of these versions, of which requests ask for the wanted ones, `most` in a frame."""
    wants = st.sampled_from(wanted)
    size, shape = st.integers(1, 5), st.sampled_from(["", "", "x"])
    priorities = st.sampled_from([0, 1, 2, 3, 4, 2**63, 2**64 - 1, -1])
    demanding = st.tuples(
        wants, size, shape, priorities, st.sampled_from([0, 0, 500, 5_000]), st.sampled_from([0, 0, 1, 2, 9])
    )
    plain = st.tuples(wants, size, shape)
    if lanes:
        of_lane = st.sampled_from(lanes)
        plain = st.builds(lambda wanted, lane: (*wanted, 0, 0, 0, lane), plain, of_lane)
        demanding = st.builds(lambda wanted, lane: (*wanted, lane), demanding, of_lane)
    plains = st.lists(plain, min_size=1, max_size=most)
    requests = (
        st.one_of(plains, plains, st.lists(demanding, min_size=1, max_size=8))
        if most > 8
        else st.one_of(plains, st.lists(demanding, min_size=1, max_size=8))
    )
    version = st.sampled_from(versions)
    configure = st.tuples(st.just("configure"), version, configs)
    arrive = st.tuples(st.just("arrive"), gateways, requests)
    if callers:
        of_caller = st.tuples(st.just("arrive_for"), gateways, st.sampled_from(callers), requests)
        arrive = st.one_of(of_caller, of_caller, of_caller, arrive)
    complete = st.tuples(
        st.just("complete"), numbers, st.sampled_from([0, 0, 0, 1, 3]), st.sampled_from([0, 5, 5, 4000])
    )
    serve = st.tuples(st.just("serve"), workers, version, st.integers(0, 2))
    event = st.one_of(
        arrive,
        arrive,
        complete,
        complete,
        serve,
        configure,
        st.tuples(st.just("send_again"), numbers),
        st.tuples(
            st.just("advance"),
            st.sampled_from([1, 40, 100, 900, 4000, *([600_000, 3_000_000, 20_000_000] if lanes else [])]),
        ),
        st.tuples(st.just("wake")),
        st.tuples(st.just("release"), numbers),
        st.tuples(st.just("not_run"), numbers, st.sampled_from([reason.value for reason in NotRunReason])),
        st.tuples(st.just("complete_abandoned"), numbers),
        st.tuples(st.just("miss"), few),
        st.tuples(st.just("lose"), workers),
        st.tuples(st.just("cancel"), few),
        st.tuples(st.just("expire")),
        st.tuples(st.just("unload"), st.lists(version, max_size=2), st.lists(version, max_size=2)),
    )
    begin = st.tuples(configure, serve).map(list)
    long = st.one_of(*(st.lists(event, min_size=size, max_size=100) for size in (0, 20, 60)))
    return st.builds(list.__add__, st.one_of(begin, begin, st.just([])), long)


@pytest.fixture(scope="module")
def events_played() -> Iterator[list[int]]:
    """How many events each life had."""
    played: list[int] = []
    yield played
    print(f"\n{sum(played)} events in {len(played)} lives")


def live(events: list[Event], events_played: list[int]) -> Simulation:
    simulation = Simulation()
    simulation.replay(events)
    events_played.append(simulation.events_played)
    return simulation


@pytest.fixture(scope="module")
def depths() -> Iterator[list[int]]:
    """How many batches an instance held at most, in each life."""
    deepest: list[int] = []
    yield deepest
    print(f"\nat most {max(deepest, default=0)} batches at an instance")


thorough = settings(max_examples=LIVES, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@thorough
@given(events=lives([1], [LATEST, 1]))
def test_a_model_of_one_version(events_played: list[int], events: list[Event]):
    live(events, events_played)


@thorough
@given(events=lives([1, 2], [LATEST, LATEST, 1, 2, 7]))
def test_a_model_of_several_versions(events_played: list[int], events: list[Event]):
    live(events, events_played)


# A request that ran shows that the model is fast.
QUICK: list[Event] = [
    ("configure", 1, ALONE),
    ("serve", "a", 1, 2),
    ("arrive", "g1", [(LATEST, 1, "")]),
    ("complete", 0, 0, 5),
]


@thorough
@given(events=lives([1], [LATEST, 1], st.sampled_from([ALONE] * 9 + [0]), most=40))
def test_a_model_whose_requests_run_alone(events_played: list[int], depths: list[int], events: list[Event]):
    depths.append(live(QUICK + events, events_played).deepest)


@pytest.fixture(scope="module")
def riders_sent() -> Iterator[list[int]]:
    """How many backfill requests each run had."""
    sent: list[int] = []
    yield sent
    print(f"\n{sum(sent)} riders")


@thorough
@given(events=st.one_of(lives([1], [LATEST, 1], lanes=[0, 0, 1, 2]), lives([1], [LATEST, 1], lanes=[1, 2])))
def test_a_model_with_requests_of_all_lanes(events_played: list[int], riders_sent: list[int], events: list[Event]):
    riders_sent.append(live(events, events_played).riders_sent)


@thorough
@given(events=lives([1], [LATEST, 1], st.sampled_from([ALONE] * 9 + [0]), most=40, lanes=[0, 1, 2]))
def test_lanes_of_a_model_whose_requests_run_alone(events_played: list[int], events: list[Event]):
    live(QUICK + events, events_played)


@thorough
@given(events=lives([1, 2], [LATEST, LATEST, 1, 2, 7], lanes=[0, 1, 2]))
def test_lanes_of_a_model_of_several_versions(events_played: list[int], events: list[Event]):
    live(events, events_played)


CALLERS = [Caller("a"), Caller("a", 3), Caller("b", 5, 3), Caller("c", 2), Caller("d", 0, 2)]


@pytest.fixture(scope="module")
def refused_beyond() -> Iterator[list[int]]:
    """How many requests beyond the limits of owners were refused in each life."""
    refused: list[int] = []
    yield refused
    print(f"\n{sum(refused)} requests beyond limits")


@thorough
@given(events=lives([1], [LATEST, 1], callers=CALLERS))
def test_a_model_of_several_owners(events_played: list[int], refused_beyond: list[int], events: list[Event]):
    refused_beyond.append(live(events, events_played).refused_beyond)


@thorough
@given(events=lives([1, 2], [LATEST, 1, 2, 7], lanes=[0, 0, 1, 2], callers=CALLERS))
def test_owners_and_lanes_of_a_model_of_several_versions(events_played: list[int], events: list[Event]):
    live(events, events_played)


@thorough
@given(events=lives([1], [LATEST, 1], st.sampled_from([ALONE] * 9 + [0]), most=40, callers=CALLERS))
def test_owners_of_a_model_whose_requests_run_alone(events_played: list[int], events: list[Event]):
    live(QUICK + events, events_played)
