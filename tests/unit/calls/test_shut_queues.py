"""`ShutQueues`: what a scheduler would refuse is turned away, for as long as it was told, and nothing else is."""

import random
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.live_queues import LiveQueue
from calls.partition_choice import AnyQueue, Destination
from calls.shut_queues import MAX_SHUT, ShutQueues
from scheduler.admission import Admission
from schemas.errors import WeirError, overloaded
from schemas.lanes import Lane
from schemas.requests import SEQUENCE_END, SEQUENCE_START, InferRequest

PARTITIONS = AnyQueue("model", 2, 8, False)


def refusal(shut_us: int = 20_000) -> WeirError:
    return overloaded(wait_us=3e6, shut_us=shut_us)


def asked(**terms: Any) -> InferRequest:
    request = InferRequest("model", terms.pop("model_version", ""))
    for name, value in terms.items():
        setattr(request, name, value)
    return request


def is_turned_away(shut: ShutQueues, now_s: float, queue: Destination = "model", **terms: Any) -> bool:
    try:
        shut.check(now_s, queue, asked(**terms))
    except WeirError:
        return True
    return False


def test_others_like_it_are_turned_away_for_as_long_as_was_told() -> None:
    shut, error = ShutQueues(), refusal()
    assert not shut.known
    shut.learn(5.0, "model", asked(), error)
    assert not error.shut_us, "who asked is told of his request alone"
    assert is_turned_away(shut, 5.0)
    assert is_turned_away(shut, 5.019)
    assert not is_turned_away(shut, 5.021)
    assert not shut.known
    assert shut.turned_away == 2
    assert shut.take_untold() == {"model": 2}
    assert shut.take_untold() == {}


def test_nothing_else_is_turned_away() -> None:
    shut = ShutQueues()
    shut.learn(5.0, "model", asked(priority=2), refusal())
    assert is_turned_away(shut, 5.0, priority=2)
    assert is_turned_away(shut, 5.0, priority=2, correlation_id=4, sequence_flags=SEQUENCE_START)
    assert not is_turned_away(shut, 5.0, priority=1), "it may be taken in before what waits"
    assert not is_turned_away(shut, 5.0, priority=2, model_version="3")
    assert not is_turned_away(shut, 5.0, "other", priority=2)
    assert not is_turned_away(shut, 5.0, priority=2, lane=Lane.EVENT.value)
    assert not is_turned_away(shut, 5.0, priority=2, lane=Lane.BATCH.value)
    assert not is_turned_away(shut, 5.0, priority=2, correlation_id=4), "its sequence goes on"
    assert not is_turned_away(shut, 5.0, priority=2, correlation_id="four", sequence_flags=SEQUENCE_END)
    assert shut.turned_away == 2


def test_refusals_for_other_reasons_say_nothing() -> None:
    shut = ShutQueues()
    shut.learn(5.0, "model", asked(), refusal(0))
    assert not shut.known


def test_a_model_with_partitions_is_shut_when_all_are() -> None:
    shut = ShutQueues()
    shut.learn(5.0, LiveQueue("model", 1), asked(), refusal(30_000))
    assert not is_turned_away(shut, 5.0, PARTITIONS)
    shut.learn(5.0, LiveQueue("model", 0), asked(), refusal(10_000))
    assert is_turned_away(shut, 5.0, PARTITIONS)
    assert is_turned_away(shut, 5.02, LiveQueue("model", 1))
    assert not is_turned_away(shut, 5.02, PARTITIONS), "there may be room in the other"
    assert sum(shut.take_untold().values()) == 2


def test_what_is_known_is_bounded() -> None:
    shut = ShutQueues()
    for number in range(MAX_SHUT + 10):
        shut.learn(5.0, f"model{number}", asked(), refusal())
    assert len(shut.known) == MAX_SHUT
    shut.learn(6.0, "last", asked(), refusal())
    assert len(shut.known) == 1, "what is over makes room"


def test_an_error_that_is_raised_again_and_again_keeps_nothing() -> None:
    shut = ShutQueues()
    shut.learn(5.0, "model", asked(), refusal())
    raised = []
    for _ in range(2):
        with pytest.raises(WeirError) as told:
            shut.check(5.0, "model", asked())
        raised.append(told.value)
        assert (told.value.http_status, told.value.message) == (503, "Exceeds maximum queue size")
        assert (told.value.retry_after_s, told.value.shut_us) == (3, 0)
    assert raised[0] is not raised[1]


EVENTS = st.lists(st.tuples(st.integers(0, 50_000), st.integers(-5, 40_000), st.booleans()), max_size=50)


@settings(max_examples=200)
@given(EVENTS)
def test_never_for_longer_than_it_was_told(events: list[tuple[int, int, bool]]) -> None:
    """What was heard last counts, and is over at its time."""
    shut, now_us, until_us = ShutQueues(), 0, 0
    for passed_us, shut_us, hears in events:
        now_us += passed_us
        if hears and shut_us > 0:
            shut.learn(now_us / 1e6, "model", asked(), refusal(shut_us))
            until_us = now_us + shut_us
        elif abs(until_us - now_us) > 1:
            assert is_turned_away(shut, now_us / 1e6) == (now_us < until_us)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    instances=st.integers(1, 4),
    gateways=st.integers(1, 3),
    travel_us=st.sampled_from([100, 3_000, 20_000, 60_000]),
)
def test_nothing_of_the_capacity_is_wasted(seed: int, instances: int, gateways: int, travel_us: int) -> None:
    """At twice what the instances can do they are not idle, though each message takes its time: the queue lasts for longer
    than the word that it is shut.
    """
    chance, cost_us, max_wait_us = random.Random(seed), 10_000, 100_000
    admission, doors = Admission(max_wait_us), [ShutQueues() for _ in range(gateways)]
    free_us = [0.0] * instances  # when each instance is done with what it has
    queue: list[float] = []
    words: deque[tuple[float, int, int]] = deque()  # when it comes to whom, and what it says
    idle_us = asked_us = 0.0
    refused = 0
    while asked_us < 3_000_000:
        asked_us += chance.expovariate(2 * instances / cost_us)
        while words and words[0][0] <= asked_us:
            came_us, gateway, shut_us = words.popleft()
            doors[gateway].learn(came_us / 1e6, "model", asked(), refusal(shut_us))
        gateway = chance.randrange(gateways)
        if is_turned_away(doors[gateway], asked_us / 1e6):
            continue
        now_us = asked_us + travel_us  # at the scheduler
        while queue and min(free_us) <= now_us:
            at = free_us.index(min(free_us))
            begins_us = max(free_us[at], queue.pop(0))
            idle_us += begins_us - free_us[at]
            free_us[at] = begins_us + cost_us
        if admission.room(1, len(queue), cost_us, instances):
            queue.append(now_us)
        else:
            refused += 1
            words.append((now_us + travel_us, gateway, admission.shut_us(len(queue), cost_us, instances)))
    turned_away = sum(door.turned_away for door in doors)
    print(f"{instances=} {gateways=} {travel_us=} {idle_us=} {refused=} {turned_away=}")
    assert idle_us <= 0.03 * asked_us * instances
    assert refused
    assert turned_away > refused or gateways > 1 or travel_us > 5_000
