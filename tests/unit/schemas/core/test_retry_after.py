"""When a refused caller may come again: bounded, and told across the bus."""

import pytest

from weir.schemas.core.errors import (
    MAX_RETRY_AFTER_S,
    ErrorCode,
    Reason,
    WeirError,
    invalid,
    overloaded,
    queue_full,
    unavailable,
)
from weir.schemas.wire.calls import pack_error, pack_responses, unpack_responses
from weir.schemas.wire.codec import MalformedMessage


@pytest.mark.parametrize(("wait_us", "seconds"), [(0, 1), (1, 1), (1_000_001, 2), (5e6, 5), (1e12, MAX_RETRY_AFTER_S)])
def test_the_retry_after_follows_the_wait(wait_us: float, seconds: int) -> None:
    error = overloaded(wait_us=wait_us)
    assert (error.http_status, error.message, error.retry_after_s) == (503, "Exceeds maximum queue size", seconds)


def test_the_retry_after_survives_packing() -> None:
    errors = [overloaded(wait_us=7e6), invalid("no"), queue_full("m", "10 wait")]
    rows = [pack_error(key, error) for key, error in enumerate(errors)] + [pack_error(3, errors[0], False)]
    told = [answer.error for answer in unpack_responses(pack_responses(0, rows))[1]]
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
def test_malformed_retry_afters(detail: list[object]) -> None:
    with pytest.raises(MalformedMessage):
        unpack_responses(pack_responses(0, [(1, ErrorCode.UNAVAILABLE.number, detail)]))


def test_the_backoff_survives_packing() -> None:
    rows = [pack_error(1, overloaded(wait_us=7e6, backoff_us=20_000))]
    told = unpack_responses(pack_responses(0, rows))[1][0].error
    assert told is not None
    assert (told.retry_after_s, told.backoff_us) == (7, 20_000)


def test_the_reason_survives_packing() -> None:
    errors = [unavailable("", reason) for reason in Reason]
    rows = [pack_error(key, error) for key, error in enumerate(errors)]
    told = [answer.error for answer in unpack_responses(pack_responses(0, rows))[1]]
    assert [error.reason for error in told if error] == list(Reason)


def test_a_reason_of_a_newer_peer_is_none() -> None:
    rows = [(1, ErrorCode.UNAVAILABLE.number, ["text", 0, 0, 12345])]
    told = unpack_responses(pack_responses(0, rows))[1][0].error
    assert told is not None
    assert (told.message, told.reason) == ("text", Reason.NONE)


def test_other_errors_have_no_retry_after() -> None:
    assert WeirError(ErrorCode.UNAVAILABLE, "the sequence is lost").retry_after_s == 0
