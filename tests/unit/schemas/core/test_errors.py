"""The codes of errors, and their status on each protocol."""

from __future__ import annotations

import copy
import http
import importlib

import grpc
import pytest

import weir
from weir.schemas.core.errors import ErrorCode, WeirError, queue_full
from weir.schemas.wire.calls import pack_error, pack_responses, unpack_responses

TRITONS = [
    "UNKNOWN",
    "INTERNAL",
    "NOT_FOUND",
    "INVALID_ARG",
    "UNAVAILABLE",
    "UNSUPPORTED",
    "ALREADY_EXISTS",
    "CANCELLED",
]


def test_the_first_eight_codes_are_tritons() -> None:
    assert [code.name for code in ErrorCode] == [*TRITONS, "RESOURCE_EXHAUSTED", "UNAUTHENTICATED", "PERMISSION_DENIED"]
    assert [code.number for code in ErrorCode] == list(range(1, 12))
    stub = importlib.import_module("weir.worker.python_stub._weir_errors").TritonError
    doors_own = {ErrorCode.UNAUTHENTICATED, ErrorCode.PERMISSION_DENIED}  # no model decides who may send a request
    for code in set(ErrorCode) - doors_own:
        assert getattr(stub, code.name) == stub("why", code.number).code() == code.number
    assert not any(hasattr(stub, code.name) for code in doors_own)


def test_each_code_has_a_status_on_each_protocol() -> None:
    statuses = [grpc.StatusCode((code.grpc_status, name(code))) for code in ErrorCode]
    assert len(set(statuses)) == len(ErrorCode)
    assert {http.HTTPStatus(code.http_status) for code in ErrorCode}
    assert [code for code in ErrorCode if code.retryable] == [ErrorCode.UNAVAILABLE, ErrorCode.RESOURCE_EXHAUSTED]


def name(code: ErrorCode) -> str:
    words = {"INVALID_ARG": "invalid argument", "UNSUPPORTED": "unimplemented"}
    return words.get(code.name, code.name.lower().replace("_", " "))


@pytest.mark.parametrize("code", ErrorCode)
def test_codes_travel_by_their_number(code: ErrorCode) -> None:
    assert ErrorCode.from_number(code.number) is code
    _, [answer] = unpack_responses(pack_responses(0, [pack_error(1, WeirError(code, "why"))]))
    assert answer.error is not None
    assert (answer.error.code, answer.error.message) == (code, "why")


def test_a_number_of_a_newer_peer_is_unknown() -> None:
    assert ErrorCode.from_number(99) is ErrorCode.UNKNOWN


def test_a_full_queue_is_429() -> None:
    error = queue_full("m", "10 requests wait, and 10 may")
    assert (error.http_status, error.grpc_status, error.retryable) == (429, 8, True)
    assert error.message == "the queue of model 'm' is full: 10 requests wait, and 10 may"
    assert error.code.title == "Resource exhausted"


def test_programs_get_these_classes() -> None:
    """The value of a code is its gRPC status; an error may travel between a program's own processes."""
    assert (weir.WeirError, weir.ErrorCode) == (WeirError, ErrorCode)
    assert all(ErrorCode.of_grpc(code.grpc_status) is ErrorCode(code.grpc_status) is code for code in ErrorCode)
    assert ErrorCode.of_grpc(15) is ErrorCode.UNKNOWN
    error = queue_full("m", "10 requests wait, and 10 may")
    copied = copy.copy(error)
    assert (copied.message, copied.retry_after_s) == (error.message, 1)
    assert str(copied) == f"RESOURCE_EXHAUSTED: {error.message}"
    assert repr(copied) == repr(error) == f"WeirError(RESOURCE_EXHAUSTED, {error.message!r})"
