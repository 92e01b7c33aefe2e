"""Which requests are traced."""

from hypothesis import given
from hypothesis import strategies as st

from telemetry.trace_sampler import TraceSampler


def test_every_so_many_th_request_is_taken() -> None:
    sampler = TraceSampler(3, -1)
    assert [sampler.sample() for _ in range(7)] == [False, False, True, False, False, True, False]
    assert sampler.remaining == -1


def test_rate_0_takes_what_a_caller_traces_and_nothing_else() -> None:
    sampler = TraceSampler(0, 5)
    assert [sampler.sample(propagated) for propagated in (False, True, False, True)] == [False, True, False, True]
    assert sampler.remaining == 5


def test_as_triton_counted_ten_requests_of_which_five_were_propagated() -> None:
    sampler = TraceSampler(2, 7)
    assert sum(sampler.sample() for _ in range(5)) == 2
    assert sum(sampler.sample(True) for _ in range(5)) == 5
    assert sampler.remaining == 2


@given(st.integers(1, 9), st.integers(0, 20), st.lists(st.booleans(), max_size=200))
def test_the_count_bounds_what_is_taken_and_callers_always_are(rate: int, count: int, callers: list[bool]) -> None:
    sampler = TraceSampler(rate, count)
    taken = [sampler.sample(propagated) for propagated in callers]
    own = sum(was and not propagated for was, propagated in zip(taken, callers, strict=True))
    assert own <= count - sampler.remaining <= count
    assert all(was for was, propagated in zip(taken, callers, strict=True) if propagated)
    if not any(callers):
        assert own == min(count, len(callers) // rate)
