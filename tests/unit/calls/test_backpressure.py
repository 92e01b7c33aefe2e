"""`BackpressureCache`: what a scheduler would refuse is turned away, for as long as it was told, and nothing else is."""

import random
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.bus.naming.live_queues import LiveQueue
from weir.calls.queues import MAX_BACKOFFS, BackpressureCache, Destination, PartitionedQueue
from weir.scheduler.batching.admission import Admission
from weir.schemas.core.errors import WeirError, overloaded
from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START, InferRequest, Lane

PARTITIONS = PartitionedQueue("model", 2, 8, False)


def refusal(backoff_us: int = 20_000) -> WeirError:
    return overloaded(wait_us=3e6, backoff_us=backoff_us)


def asked(**terms: Any) -> InferRequest:
    request = InferRequest("model", terms.pop("model_version", ""))
    for name, value in terms.items():
        setattr(request, name, value)
    return request


def is_turned_away(shut: BackpressureCache, now_s: float, queue: Destination = "model", **terms: Any) -> bool:
    try:
        shut.check(now_s, queue, asked(**terms))
    except WeirError:
        return True
    return False


def test_requests_of_the_same_kind_are_rejected_during_the_backoff() -> None:
    shut, error = BackpressureCache(), refusal()
    assert not shut.active
    shut.note(5.0, "model", asked(), error)
    assert not error.backoff_us, "who asked is told of his request alone"
    assert is_turned_away(shut, 5.0)
    assert is_turned_away(shut, 5.019)
    assert not is_turned_away(shut, 5.021)
    assert not shut.active
    assert shut.rejected == 2
    assert shut.take_rejections() == {"model": 2}
    assert shut.take_rejections() == {}


def test_other_owners_pass() -> None:
    shut = BackpressureCache()
    shut.note(5.0, "model", asked(), refusal(), "key busy")
    shut.check(5.0, "model", asked(), "key quiet")
    shut.check_live(5.0, "model", "", owner="key quiet")
    assert not is_turned_away(shut, 5.0)
    with pytest.raises(WeirError):
        shut.check(5.0, "model", asked(), "key busy")
    with pytest.raises(WeirError):
        shut.check_live(5.0, "model", "", owner="key busy")


def test_other_requests_pass() -> None:
    shut = BackpressureCache()
    shut.note(5.0, "model", asked(priority=2), refusal())
    assert is_turned_away(shut, 5.0, priority=2)
    assert is_turned_away(shut, 5.0, priority=2, correlation_id=4, sequence_flags=SEQUENCE_START)
    assert not is_turned_away(shut, 5.0, priority=1), "it may be taken in before what waits"
    assert not is_turned_away(shut, 5.0, priority=2, model_version="3")
    assert not is_turned_away(shut, 5.0, "other", priority=2)
    assert not is_turned_away(shut, 5.0, priority=2, lane=Lane.EVENT.value)
    assert not is_turned_away(shut, 5.0, priority=2, lane=Lane.BATCH.value)
    assert not is_turned_away(shut, 5.0, priority=2, correlation_id=4), "its sequence goes on"
    assert not is_turned_away(shut, 5.0, priority=2, correlation_id="four", sequence_flags=SEQUENCE_END)
    assert shut.rejected == 2


def test_rejections_without_a_backoff_have_no_effect() -> None:
    shut = BackpressureCache()
    shut.note(5.0, "model", asked(), refusal(0))
    assert not shut.active


def test_a_partitioned_model_rejects_when_all_partitions_back_off() -> None:
    shut = BackpressureCache()
    shut.note(5.0, LiveQueue("model", 1), asked(), refusal(30_000))
    assert not is_turned_away(shut, 5.0, PARTITIONS)
    shut.note(5.0, LiveQueue("model", 0), asked(), refusal(10_000))
    assert is_turned_away(shut, 5.0, PARTITIONS)
    assert is_turned_away(shut, 5.02, LiveQueue("model", 1))
    assert not is_turned_away(shut, 5.02, PARTITIONS), "there may be room in the other"
    assert sum(shut.take_rejections().values()) == 2


def test_the_number_of_backoffs_is_bounded() -> None:
    shut = BackpressureCache()
    for number in range(MAX_BACKOFFS + 10):
        shut.note(5.0, f"model{number}", asked(), refusal())
    assert len(shut.active) == MAX_BACKOFFS
    shut.note(6.0, "last", asked(), refusal())
    assert len(shut.active) == 1, "what is over makes room"


def test_each_rejection_raises_a_new_error() -> None:
    shut = BackpressureCache()
    shut.note(5.0, "model", asked(), refusal())
    raised = []
    for _ in range(2):
        with pytest.raises(WeirError) as told:
            shut.check(5.0, "model", asked())
        raised.append(told.value)
        assert (told.value.http_status, told.value.message) == (503, "Exceeds maximum queue size")
        assert (told.value.retry_after_s, told.value.backoff_us) == (3, 0)
    assert raised[0] is not raised[1]


EVENTS = st.lists(st.tuples(st.integers(0, 50_000), st.integers(-5, 40_000), st.booleans()), max_size=50)


@settings(max_examples=200)
@given(EVENTS)
def test_no_backoff_exceeds_its_time(events: list[tuple[int, int, bool]]) -> None:
    """What was heard last counts, and is over at its time."""
    shut, now_us, until_us = BackpressureCache(), 0, 0
    for passed_us, backoff_us, hears in events:
        now_us += passed_us
        if hears and backoff_us > 0:
            shut.note(now_us / 1e6, "model", asked(), refusal(backoff_us))
            until_us = now_us + backoff_us
        elif abs(until_us - now_us) > 1:
            assert is_turned_away(shut, now_us / 1e6) == (now_us < until_us)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    instances=st.integers(1, 4),
    gateways=st.integers(1, 3),
    travel_us=st.sampled_from([100, 3_000, 20_000, 60_000]),
)
def test_backoffs_leave_no_instance_idle(seed: int, instances: int, gateways: int, travel_us: int) -> None:
    """At twice what the instances can do they are not idle, though each message takes its time: the queue lasts for longer
    than the word that it is shut.
    """
    chance, cost_us, max_wait_us = random.Random(seed), 10_000, 100_000
    admission, doors = Admission(max_wait_us), [BackpressureCache() for _ in range(gateways)]
    free_us = [0.0] * instances  # when each instance is done with what it has
    queue: list[float] = []
    words: deque[tuple[float, int, int]] = deque()  # when it comes to whom, and what it says
    idle_us = asked_us = 0.0
    refused = 0
    while asked_us < 3_000_000:
        asked_us += chance.expovariate(2 * instances / cost_us)
        while words and words[0][0] <= asked_us:
            came_us, gateway, backoff_us = words.popleft()
            doors[gateway].note(came_us / 1e6, "model", asked(), refusal(backoff_us))
        gateway = chance.randrange(gateways)
        if is_turned_away(doors[gateway], asked_us / 1e6):
            continue
        now_us = asked_us + travel_us  # at the scheduler
        while queue and min(free_us) <= now_us:
            at = free_us.index(min(free_us))
            begins_us = max(free_us[at], queue.pop(0))
            idle_us += begins_us - free_us[at]
            free_us[at] = begins_us + cost_us
        if admission.admitted(1, len(queue), cost_us, instances):
            queue.append(now_us)
        else:
            refused += 1
            words.append((now_us + travel_us, gateway, admission.backoff_us(len(queue), cost_us, instances)))
    rejected = sum(door.rejected for door in doors)
    print(f"{instances=} {gateways=} {travel_us=} {idle_us=} {refused=} {rejected=}")
    assert idle_us <= 0.03 * asked_us * instances
    assert refused
    assert rejected > refused or gateways > 1 or travel_us > 5_000
