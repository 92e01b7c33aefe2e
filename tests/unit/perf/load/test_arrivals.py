"""When requests of an open loop are due."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.perf.load.arrivals import ArrivalProcess, Arrivals

RATES = st.floats(0.01, 1e5)


def schedule(per_s: float, process: ArrivalProcess, seed: int = 1, count: int = 200) -> list[float]:
    arrivals = Arrivals(per_s, process, seed)
    return [arrivals.next_s() for _ in range(count)]


@given(RATES)
def test_constant_arrivals_are_evenly_spaced(per_s: float) -> None:
    times = schedule(per_s, ArrivalProcess.CONSTANT)
    assert times[0] == 0
    assert times[-1] == pytest.approx(199 / per_s)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert max(gaps) == pytest.approx(min(gaps), rel=1e-6)


@given(RATES, st.sampled_from(ArrivalProcess), st.integers(0, 1000))
def test_schedules_ascend_and_repeat_with_their_seed(per_s: float, process: ArrivalProcess, seed: int) -> None:
    times = schedule(per_s, process, seed)
    assert times == sorted(times)
    assert times == schedule(per_s, process, seed)


def test_poisson_arrivals_have_the_rate_and_the_spread_of_independent_clients() -> None:
    times = schedule(50.0, ArrivalProcess.POISSON, count=20_000)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(1 / 50, rel=0.03)
    assert deviation == pytest.approx(mean, rel=0.05)  # of an exponential distribution


def test_other_seeds_give_other_schedules() -> None:
    assert schedule(5.0, ArrivalProcess.POISSON, 1) != schedule(5.0, ArrivalProcess.POISSON, 2)
