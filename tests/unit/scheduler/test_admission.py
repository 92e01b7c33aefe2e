"""`Admission`: what would wait for too long is refused, and nothing else."""

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.admission import REOPENS_BELOW, Admission, Pace
from schemas.errors import MAX_SHUT_US

MAX_WAIT_US = 100_000


def test_what_would_wait_for_too_long_is_refused() -> None:
    admission = Admission(MAX_WAIT_US)
    assert admission.room(5, 0, 10_000, 1) == 5
    assert admission.room(5, 9, 10_000, 1) == 2, "one behind nine, and one that waits for just as long as it may"
    assert admission.is_closed


def test_it_reopens_only_when_the_queue_has_become_shorter() -> None:
    admission = Admission(MAX_WAIT_US)
    assert admission.room(1, 20, 10_000, 1) == 0
    assert admission.room(1, 9, 10_000, 1) == 0
    assert admission.room(1, 8, 10_000, 1) == 1
    assert not admission.is_closed


def test_it_refuses_nothing_while_nobody_knows_or_nobody_is_there() -> None:
    admission = Admission(MAX_WAIT_US)
    assert admission.room(1, 10**6, 0.0, 4) == 1
    assert admission.room(1, 10**6, 10_000, 0) == 1
    assert admission.room(1, 20, 10_000, 1) == 0
    assert admission.room(1, 20, 10_000, 0) == 1, "who comes after that is not refused for what was before"
    assert not admission.is_closed


def test_more_instances_make_more_room() -> None:
    assert Admission(MAX_WAIT_US).room(100, 0, 10_000, 1) == 11
    assert Admission(MAX_WAIT_US).room(100, 0, 10_000, 4) == 41


def test_it_tells_for_how_long_it_will_take_nothing() -> None:
    admission = Admission(MAX_WAIT_US)
    assert admission.shut_us(20, 10_000, 1) == 0, "it is open"
    assert admission.room(3, 9, 10_000, 1) == 2
    assert admission.shut_us(11, 10_000, 1) == 20_000, "eight may wait when it opens, and the first is about to end"
    assert admission.shut_us(11, 10_000, 0) == 0
    assert admission.shut_us(8, 10_000, 1) == 0
    assert admission.shut_us(10**6, 10_000, 1) == MAX_SHUT_US


def test_pace_follows_what_has_run() -> None:
    pace = Pace()
    assert pace.look(0, 0) == 0
    assert pace.look(4, 40_000) == 10_000, "a first batch tells something"
    assert pace.look(5, 140_000) == 10_000, "a single one doesn't"
    assert pace.look(24, 440_000) == 15_000
    assert pace.look(24, 440_000) == 15_000


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
def test_whatever_comes(events: list[tuple[str, int]], max_wait_us: int) -> None:
    """Nothing is taken that would wait for too long; what is refused would, or comes while the queue becomes shorter."""
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
            taken = admission.room(number, waiting, us_each, instances)
            assert 0 <= taken <= number
            if not instances:
                assert taken == number
            elif taken:
                assert (waiting + taken - 1) * us_each / instances <= max_wait_us * (1 + 1e-9)
            if taken < number:
                would_wait = (waiting + taken) * us_each / instances
                assert would_wait > (REOPENS_BELOW if was_closed else 1 - 1e-9) * max_wait_us
                assert admission.is_closed
            waiting += taken


def test_events_were_tried() -> None:
    print(f"{tried} events")
    assert tried > 1000
