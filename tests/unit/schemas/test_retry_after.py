"""When a refused caller may come again: bounded, and told across the bus."""

import pytest

from schemas.errors import MAX_RETRY_AFTER_S, ErrorCode, Reason, WeirError, invalid, overloaded, queue_full, unavailable
from schemas.messages import pack_answers, pack_error, unpack_answers
from schemas.wire import MalformedMessage


@pytest.mark.parametrize(("wait_us", "seconds"), [(0, 1), (1, 1), (1_000_001, 2), (5e6, 5), (1e12, MAX_RETRY_AFTER_S)])
def test_it_follows_what_waits(wait_us: float, seconds: int) -> None:
    error = overloaded(wait_us=wait_us)
    assert (error.http_status, error.message, error.retry_after_s) == (503, "Exceeds maximum queue size", seconds)


def test_it_travels_with_the_error() -> None:
    errors = [overloaded(wait_us=7e6), invalid("no"), queue_full("m", "10 wait")]
    rows = [pack_error(key, error) for key, error in enumerate(errors)] + [pack_error(3, errors[0], False)]
    told = [answer.error for answer in unpack_answers(pack_answers(0, rows))[1]]
    assert [error.retry_after_s for error in told if error] == [7, 0, 1, 7]
    assert [error.code for error in told if error][:3] == [error.code for error in errors]


@pytest.mark.parametrize(
    "detail",
    [
        ["text", -1],
        ["text", 61],
        ["text", "1"],
        ["text", 1.5],
        ["text", 1, -1],
        ["text", 1, 1_000_001],
        ["text", 1, 1, "1"],
        ["text", 1, 1, 1, 1],
        [],
        [1, 1],
    ],
)
def test_what_is_no_time_is_no_answer(detail: list[object]) -> None:
    with pytest.raises(MalformedMessage):
        unpack_answers(pack_answers(0, [(1, ErrorCode.UNAVAILABLE.number, detail)]))


def test_for_how_long_a_queue_is_shut_travels_too() -> None:
    rows = [pack_error(1, overloaded(wait_us=7e6, shut_us=20_000))]
    told = unpack_answers(pack_answers(0, rows))[1][0].error
    assert told is not None
    assert (told.retry_after_s, told.shut_us) == (7, 20_000)


def test_the_reason_travels_too() -> None:
    errors = [unavailable("", reason) for reason in Reason]
    rows = [pack_error(key, error) for key, error in enumerate(errors)]
    told = [answer.error for answer in unpack_answers(pack_answers(0, rows))[1]]
    assert [error.reason for error in told if error] == list(Reason)


def test_a_reason_of_a_newer_peer_is_none_that_is_known() -> None:
    rows = [(1, ErrorCode.UNAVAILABLE.number, ["text", 0, 0, 12345])]
    told = unpack_answers(pack_answers(0, rows))[1][0].error
    assert told is not None
    assert (told.message, told.reason) == ("text", Reason.NONE)


def test_other_errors_say_nothing_about_it() -> None:
    assert WeirError(ErrorCode.UNAVAILABLE, "the sequence is lost").retry_after_s == 0
