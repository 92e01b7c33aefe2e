"""The statuses of calls: errors with one, unexpected exceptions, and long messages."""

from hpack import Decoder

from weir.gateway.grpc.status import CallError, Status, call_error, shutting_down
from weir.runtime.containment import failures
from weir.schemas.core.errors import not_found, overloaded

PLACE = "tests: a call"


def trailers(error: CallError) -> dict[str, str]:
    return dict(Decoder().decode(error.trailers()))


def test_errors_have_their_own_status() -> None:
    own = CallError(Status.UNIMPLEMENTED, "unknown method")
    assert call_error(own, PLACE) is own
    assert call_error(not_found("absent"), PLACE).status == 5
    assert call_error(shutting_down(), PLACE).status == Status.UNAVAILABLE
    assert PLACE not in failures()


def test_an_unexpected_exception_is_reported_and_reveals_nothing() -> None:
    before = failures().get(PLACE, 0)
    error = call_error(ValueError("secret"), PLACE)
    assert trailers(error) == {"grpc-status": "13", "grpc-message": "internal server error"}
    assert failures()[PLACE] == before + 1


def test_a_delay_is_sent_as_pushback() -> None:
    fields = trailers(CallError.of(overloaded("busy")))
    assert int(fields["grpc-retry-pushback-ms"]) == 1000 * int(fields["retry-after"]) > 0


def test_a_long_message_is_shortened_in_its_middle() -> None:
    message = trailers(CallError(Status.INTERNAL, "a" * 5000 + "ü" * 5000))["grpc-message"]
    assert len(message) < 8192
    assert message.startswith("aaa")
    assert message.endswith("%C3%BC")
