"""Ramps on a fake clock: their steps, and how soon, and how rarely by mistake, they go back."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.calls.traffic.ramp import (
    MIN_REQUESTS,
    STEPS,
    AbortConditions,
    FailureTest,
    Observed,
    RampPolicy,
    Step,
    ramp_weights,
    read_conditions,
)
from weir.telemetry.instruments import DurationSketch

OVER_S = 90.0
STEP_S = OVER_S / len(STEPS)


def bins(*durations_us: float, times: int = 1) -> dict[int, int]:
    sketch = DurationSketch()
    for duration_us in durations_us:
        sketch.add(duration_us, times)
    return sketch.bins()


GOOD = Observed(MIN_REQUESTS, 0, bins(1000, times=MIN_REQUESTS))


def test_a_good_version_passes_every_step_and_reaches_the_goal() -> None:
    policy = RampPolicy(1.0, OVER_S, read_conditions("error_rate>1% or p99>1.5x"), 0.0)
    assert policy.share == STEPS[0]
    found = [step for second in range(1, 200) if (step := policy.look(float(second), GOOD, GOOD)) is not None]
    shares, last = [step.share for step in found], found[len(STEPS) - 1]
    assert shares[: len(STEPS) - 1] == list(STEPS[1:])
    assert last == Step(1.0, True)


@settings(max_examples=50, deadline=None)
@given(st.floats(0.01, 1), st.lists(st.tuples(st.floats(0, 5), st.integers(0, 50)), max_size=200))
def test_a_step_never_comes_early_nor_goes_beyond_the_goal(goal: float, looks: list[tuple[float, int]]) -> None:
    policy = RampPolicy(goal, OVER_S, AbortConditions(), 0.0)
    now_s = began_s = 0.0
    requests = 0
    for passed_s, count in looks:
        now_s += passed_s
        requests += count
        step = policy.look(now_s, Observed(count), Observed())
        if step is not None:
            assert now_s - began_s >= STEP_S
            assert requests >= MIN_REQUESTS
            assert not step.reason
            assert step.share <= goal
            if step.is_over:
                return
            began_s, requests = now_s, 0


def test_a_ramp_without_traffic_waits() -> None:
    policy = RampPolicy(1.0, OVER_S, AbortConditions(), 0.0)
    assert policy.look(10_000.0, Observed(MIN_REQUESTS - 1), GOOD) is None
    assert policy.look(10_001.0, Observed(1), GOOD) == Step(STEPS[1])


def failed_until_alarm(rate: float, limit: float, random: random.Random, most: int = 200_000) -> tuple[int, int] | None:
    """(requests, failed) when the test ends the ramp; None where it does not."""
    test = FailureTest(limit, 0.005)
    for number in range(1, most + 1):
        test.add(1, random.random() < rate)
        if test.alarm:
            return number, test.bad
    return None


def test_a_version_that_fails_2_percent_is_found_with_few_failures() -> None:
    found = [failed_until_alarm(0.02, 0.01, random.Random(seed)) for seed in range(30)]
    assert all(found)
    failed = sorted(row[1] for row in found if row)
    assert failed[len(failed) // 2] < 60
    assert failed[-1] < 200


def test_a_version_that_always_fails_is_found_at_once() -> None:
    found = failed_until_alarm(1.0, 0.01, random.Random(1))
    assert found is not None
    assert found[0] <= 4


def test_false_alarms_are_as_rare_as_promised() -> None:
    alarms = sum(failed_until_alarm(0.01, 0.01, random.Random(seed), 5_000) is not None for seed in range(200))
    assert alarms <= 4, "with probability 0.005 each, more than 4 of 200 come by chance in 0.4 % of the runs"


def test_a_version_that_is_slower_than_the_others_goes_back() -> None:
    policy = RampPolicy(1.0, OVER_S, read_conditions("p99>1.5x"), 0.0)
    others = Observed(1000, 0, bins(900, 1000, times=500))
    assert policy.look(1.0, Observed(), others) is None
    slow = Observed(100, 0, bins(1000, times=90) | bins(2000, times=10))
    step = policy.look(2.0, slow, others)
    assert step is not None
    assert (step.share, step.is_over) == (0.0, True)
    assert "1.5 times the 99th percentile" in step.reason


def test_a_version_that_is_as_slow_as_the_others_does_not_go_back() -> None:
    policy = RampPolicy(1.0, 1e9, read_conditions("p99>1.5x"), 0.0)
    durations = [random.Random(seed).lognormvariate(7, 0.5) for seed in range(1000)]
    same = Observed(1000, 0, bins(*durations))
    assert all(policy.look(float(second), same, same) is None for second in range(100))


def test_a_version_above_an_absolute_latency_goes_back() -> None:
    policy = RampPolicy(1.0, OVER_S, read_conditions("p99>200ms"), 0.0)
    step = policy.look(1.0, Observed(20, 0, bins(300_000, times=20)), Observed())
    assert step is not None
    assert step.reason == "20 of 20 requests took longer than 200 ms"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("error_rate>1%", AbortConditions(0.01)),
        ("error_rate > 0.5 % or p99 > 1.5x", AbortConditions(0.005, 1.5)),
        ("p99>200ms or error_rate>2%", AbortConditions(0.02, 0.0, 200_000.0)),
        ("p99>2s", AbortConditions(0.0, 0.0, 2_000_000.0)),
    ],
)
def test_conditions_are_read(text: str, expected: AbortConditions) -> None:
    assert read_conditions(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text",
    ["", "p99", "error_rate>0%", "error_rate>100%", "p99>0.9x", "p99>0ms", "p50>1x", "p99>1x or p99>2x", "a or b"],
)
def test_invalid_conditions_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"condition|error_rate|p99"):
        read_conditions(text)


def test_the_others_keep_their_proportions() -> None:
    assert ramp_weights({1: 30.0, 3: 10.0, 2: 5.0}, 2, 0.2) == {1: 60.0, 2: 20.0, 3: 20.0}
    assert ramp_weights({1: 1.0}, 2, 1.0) == {1: 0.0, 2: 100.0}
