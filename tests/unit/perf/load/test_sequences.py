"""Which request of which sequence comes next."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.perf.load.sequences import SequenceSource
from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START


@given(st.integers(1, 30), st.integers(1, 5))
def test_each_sequence_begins_once_and_ends_once(length: int, sequences: int) -> None:
    source = SequenceSource(length, 100)
    ids = []
    for _ in range(sequences):
        sequence = source.begin()
        assert not sequence.is_open
        steps = []
        while not sequence.is_over:
            steps.append(sequence.next_step())
            assert sequence.is_open == (len(steps) < length)
        assert [step.number for step in steps] == list(range(length))
        assert [bool(step.flags & SEQUENCE_START) for step in steps] == [True] + [False] * (length - 1)
        assert [bool(step.flags & SEQUENCE_END) for step in steps] == [False] * (length - 1) + [True]
        (one,) = {step.correlation_id for step in steps}
        ids.append(one)
    assert ids == list(range(100, 100 + sequences))


def test_a_sequence_may_end_early() -> None:
    sequence = SequenceSource(5, 1).begin()
    sequence.next_step()
    last = sequence.last_step()
    assert (last.correlation_id, last.number, last.flags) == (1, 1, SEQUENCE_END)
    assert sequence.is_over
    assert not sequence.is_open


@pytest.mark.parametrize(("as_text", "expected"), [(False, 7), (True, "perf-7")])
def test_ids_are_numbers_or_text(as_text: bool, expected: int | str) -> None:
    assert SequenceSource(1, 7, as_text).begin().next_step().correlation_id == expected
