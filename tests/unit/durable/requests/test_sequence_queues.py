"""Requests of a sequence go one at a time, in order, and never on a state that may be wrong."""

from hypothesis import given, settings
from hypothesis import strategies as st

from weir.durable.requests.ordering import MAX_LOST, SequenceQueues


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4)), max_size=80))
def test_one_at_a_time_and_in_order(events: list[tuple[bool, int]]) -> None:
    lines: SequenceQueues[int] = SequenceQueues()
    going: dict[int, int] = {}
    waiting: dict[int, list[int]] = {}
    for number, (joins, id) in enumerate(events):
        if joins:
            if lines.join(id, number):
                assert id not in going
                going[id] = number
            else:
                waiting.setdefault(id, []).append(number)
        elif id in going:
            following = lines.leave(id, going.pop(id))
            expected = waiting[id].pop(0) if waiting.get(id) else None
            assert following == expected
            if following is not None:
                going[id] = following
    assert len(lines) == len(going)


def test_who_leaves_from_the_middle_is_passed_over() -> None:
    lines: SequenceQueues[str] = SequenceQueues()
    assert lines.join(7, "a")
    assert not lines.join(7, "b")
    assert not lines.join(7, "c")
    assert lines.leave(7, "b") is None
    assert lines.leave(7, "a") == "c"


def test_a_lost_sequence_goes_on_at_its_next_start() -> None:
    lines: SequenceQueues[str] = SequenceQueues()
    assert not lines.may_go(7, starts=False, maybe_started=True)
    assert not lines.may_go(7, starts=False)
    assert lines.may_go(8, starts=False)
    assert lines.may_go(7, starts=True)
    assert lines.may_go(7, starts=False)


def test_what_was_begun_is_run_again_behind_its_start() -> None:
    lines: SequenceQueues[str] = SequenceQueues()
    assert lines.may_go(7, starts=True, maybe_started=True)
    assert lines.may_go(7, starts=False, maybe_started=True)


def test_lost_sequences_are_bounded() -> None:
    lines: SequenceQueues[str] = SequenceQueues()
    for id in range(1, MAX_LOST + 10):
        lines.lose(id)
    assert lines.lost == MAX_LOST
