"""`Admission` rejects requests that would wait too long, and no others."""

from hypothesis import given, settings
from hypothesis import strategies as st

from weir.scheduler.batching.admission import REOPEN_SHARE, Admission
from weir.schemas.core.errors import MAX_BACKOFF_US

MAX_WAIT_US = 100_000


def test_requests_with_too_long_a_wait_are_rejected() -> None:
    admission = Admission(MAX_WAIT_US)
    assert admission.admitted(5, 0, 10_000, 1) == 5
    assert admission.admitted(5, 9, 10_000, 1) == 2, "one behind nine, and one that waits for just as long as it may"
    assert admission.is_closed


def test_it_reopens_only_when_the_queue_has_become_shorter() -> None:
    admission = Admission(MAX_WAIT_US)
    assert admission.admitted(1, 20, 10_000, 1) == 0
    assert admission.admitted(1, 9, 10_000, 1) == 0
    assert admission.admitted(1, 8, 10_000, 1) == 1
    assert not admission.is_closed


def test_without_an_estimate_or_instances_all_are_admitted() -> None:
    admission = Admission(MAX_WAIT_US)
    assert admission.admitted(1, 10**6, 0.0, 4) == 1
    assert admission.admitted(1, 10**6, 10_000, 0) == 1
    assert admission.admitted(1, 20, 10_000, 1) == 0
    assert admission.admitted(1, 20, 10_000, 0) == 1, "an earlier rejection does not matter then"
    assert not admission.is_closed


def test_more_instances_make_more_room() -> None:
    assert Admission(MAX_WAIT_US).admitted(100, 0, 10_000, 1) == 11
    assert Admission(MAX_WAIT_US).admitted(100, 0, 10_000, 4) == 41


def test_the_backoff_is_how_long_nothing_is_admitted() -> None:
    admission = Admission(MAX_WAIT_US)
    assert admission.backoff_us(20, 10_000, 1) == 0, "it is open"
    assert admission.admitted(3, 9, 10_000, 1) == 2
    assert admission.backoff_us(11, 10_000, 1) == 20_000, "eight may wait when it opens, and the first is about to end"
    assert admission.backoff_us(11, 10_000, 0) == 0
    assert admission.backoff_us(8, 10_000, 1) == 0
    assert admission.backoff_us(10**6, 10_000, 1) == MAX_BACKOFF_US


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(1, 40)),
        st.tuples(st.just("run"), st.integers(1, 40)),
        st.tuples(st.just("instances"), st.integers(0, 4)),
        st.tuples(st.just("cost"), st.integers(1, 200_000)),
    ),
    max_size=60,
)
tried = 0


@settings(max_examples=300)
@given(EVENTS, st.integers(1, 10_000_000))
def test_admission_keeps_its_promises_for_any_traffic(events: list[tuple[str, int]], max_wait_us: int) -> None:
    """No admitted request would wait too long; a rejected one would, or arrives while the queue shrinks."""
    global tried
    admission, waiting, instances, us_each = Admission(max_wait_us), 0, 1, 1000
    for event, number in events:
        tried += 1
        if event == "run":
            waiting = max(0, waiting - number)
        elif event == "instances":
            instances = number
        elif event == "cost":
            us_each = number
        else:
            was_closed = admission.is_closed
            taken = admission.admitted(number, waiting, us_each, instances)
            assert 0 <= taken <= number
            if not instances:
                assert taken == number
            elif taken:
                assert (waiting + taken - 1) * us_each / instances <= max_wait_us * (1 + 1e-9)
            if taken < number:
                would_wait = (waiting + taken) * us_each / instances
                assert would_wait > (REOPEN_SHARE if was_closed else 1 - 1e-9) * max_wait_us
                assert admission.is_closed
            waiting += taken


def test_the_property_test_covers_all_events() -> None:
    print(f"{tried} events")
    assert tried > 1000
