"""How busy instances are told to be, whatever they did."""

from hypothesis import given
from hypothesis import strategies as st

from telemetry.utilization import Utilization

S = 1_000_000


def test_it_comes_near_what_was_busy_within_seconds() -> None:
    utilization = Utilization()
    for second in range(1, 11):
        utilization.look(second * S, second * S, 1, 2)
    assert abs(utilization.value - 0.5) < 0.02


def test_what_is_not_over_yet_counts_by_what_is_busy_now() -> None:
    utilization = Utilization()
    for second in range(1, 11):
        utilization.look(second * S, 0, 3, 4)
    assert abs(utilization.value - 0.75) < 0.03
    utilization.look(11 * S, 0, 0, 0)
    assert utilization.value == 0


@given(st.lists(st.tuples(st.integers(0, 5 * S), st.integers(-S, 9 * S), st.integers(0, 9), st.integers(0, 9))))
def test_it_is_a_share(looks: list[tuple[int, int, int, int]]) -> None:
    utilization, now_us, busy_us = Utilization(), 0, 0
    for elapsed_us, spent_us, busy, instances in looks:
        now_us, busy_us = now_us + elapsed_us, busy_us + spent_us
        utilization.look(now_us, busy_us, min(busy, instances), instances)
        assert 0 <= utilization.value <= 1
