"""Backoff and budget of restarts, on a clock that is only numbers."""

from hypothesis import given
from hypothesis import strategies as st

from weir.runtime.child_processes import RestartHistory, RestartPolicy


def test_delays_double_up_to_the_longest() -> None:
    history = RestartHistory(RestartPolicy(budget=100))
    delays = [history.died(now=float(n), ready_since=None) for n in range(8)]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_delay_starts_over_after_a_healthy_life() -> None:
    history = RestartHistory(RestartPolicy())
    assert [history.died(now=0.0, ready_since=None), history.died(now=1.0, ready_since=0.5)] == [0.1, 0.2]
    assert history.died(now=31.5, ready_since=1.5) == 0.1


def test_a_life_that_never_was_ready_is_not_healthy_however_long() -> None:
    history = RestartHistory(RestartPolicy())
    history.died(now=0.0, ready_since=None)
    assert history.died(now=1000.0, ready_since=None) == 0.2


def test_tenth_death_within_a_minute_spends_the_budget() -> None:
    history = RestartHistory(RestartPolicy())
    assert None not in [history.died(now=6.0 * n, ready_since=None) for n in range(9)]
    assert history.died(now=60.0, ready_since=None) is None


def test_deaths_spread_wider_than_the_window_never_spend_the_budget() -> None:
    history = RestartHistory(RestartPolicy())
    assert None not in [history.died(now=6.8 * n, ready_since=None) for n in range(100)]


def test_the_first_restart_may_come_at_once_and_the_budget_be_without_end() -> None:
    policy = RestartPolicy(is_first_at_once=True, budget=None, first_delay_s=0.5, longest_delay_s=2.0, healthy_s=5.0)
    history = RestartHistory(policy)
    assert [history.died(now=n, ready_since=n) for n in map(float, range(6))] == [0.0, 0.5, 1.0, 2.0, 2.0, 2.0]
    assert [history.died(now=10.0 + n, ready_since=5.0) for n in range(2)] == [0.0, 0.0]


@given(
    st.lists(st.tuples(st.floats(0, 20), st.booleans()), max_size=60),
    st.builds(
        RestartPolicy,
        first_delay_s=st.floats(0.01, 1),
        longest_delay_s=st.floats(1, 30),
        healthy_s=st.floats(1, 10),
        is_first_at_once=st.booleans(),
        budget=st.none(),
    ),
)
def test_any_deaths(lives: list[tuple[float, bool]], policy: RestartPolicy) -> None:
    """Each life: how long it was, and whether it was ready meanwhile."""
    history, now, delays = RestartHistory(policy), 0.0, [-1.0]
    first = 0.0 if policy.is_first_at_once else policy.first_delay_s
    for length, was_ready in lives:
        began, now = now, now + length
        delay = history.died(now, began if was_ready else None)
        assert delay is not None, "without a budget it comes back for ever"
        if delays[-1] < 0 or (was_ready and now - began >= policy.healthy_s):
            assert delay == first
        else:
            assert delay == min(max(2 * delays[-1], policy.first_delay_s), policy.longest_delay_s)
        delays.append(delay)
        now += delay
