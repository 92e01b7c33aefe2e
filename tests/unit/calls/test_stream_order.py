"""A stream is passed on whole and in order, or it is broken."""

from __future__ import annotations

from calls.stream_order import Place, StreamOrder
from schemas.messages import Answer


def answer(run: str, number: int, is_final: bool = False) -> Answer:
    return Answer(1, [], None, None, is_final, None, run, number)


def test_one_run_in_order() -> None:
    stream = StreamOrder("a")
    places = [stream.place(answer("a", number, number == 2)) for number in range(3)]
    assert places == [Place.NEXT] * 3


def test_another_run_is_left_out_unless_it_ends_first() -> None:
    stream = StreamOrder("a")
    said = [answer("a", 0), answer("b", 0), answer("b", 1), answer("a", 1), answer("b", 2, True)]
    assert [stream.place(one) for one in said] == [Place.NEXT, Place.OTHER, Place.OTHER, Place.NEXT, Place.BROKEN]


def test_a_gap_is_noticed() -> None:
    stream = StreamOrder("a")
    assert stream.place(answer("a", 0)) is Place.NEXT
    assert stream.place(answer("a", 2)) is Place.BROKEN
    assert StreamOrder("a").place(answer("a", 1, True)) is Place.BROKEN
