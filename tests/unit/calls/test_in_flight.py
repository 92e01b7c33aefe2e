"""Responses of one run are delivered completely and in order, or the request fails."""

from __future__ import annotations

from weir.calls.in_flight import ResponseSequence, SequenceCheck
from weir.schemas.wire.calls import ResponseEnvelope


def answer(run: str, number: int, is_final: bool = False) -> ResponseEnvelope:
    return ResponseEnvelope(1, [], None, None, is_final, None, run, number)


def test_responses_of_one_run_are_next_in_order() -> None:
    stream = ResponseSequence("a")
    places = [stream.check(answer("a", number, number == 2)) for number in range(3)]
    assert places == [SequenceCheck.NEXT] * 3


def test_another_run_is_skipped_unless_it_ends_first() -> None:
    stream = ResponseSequence("a")
    said = [answer("a", 0), answer("b", 0), answer("b", 1), answer("a", 1), answer("b", 2, True)]
    assert [stream.check(one) for one in said] == [
        SequenceCheck.NEXT,
        SequenceCheck.OTHER,
        SequenceCheck.OTHER,
        SequenceCheck.NEXT,
        SequenceCheck.BROKEN,
    ]


def test_a_missing_response_breaks_the_sequence() -> None:
    stream = ResponseSequence("a")
    assert stream.check(answer("a", 0)) is SequenceCheck.NEXT
    assert stream.check(answer("a", 2)) is SequenceCheck.BROKEN
    assert ResponseSequence("a").check(answer("a", 1, True)) is SequenceCheck.BROKEN
