"""`StatusError`: refusals that Triton's error codes have no HTTP status for."""

from __future__ import annotations

from schemas.errors import ErrorCode, WeirError


class StatusError(WeirError):
    """An error with an HTTP status of its own. `retry_after_s` tells when to come again; 0 is never."""

    def __init__(self, http_status: int, grpc_status: int, message: str, retry_after_s: int = 0) -> None:
        super().__init__(ErrorCode.UNAVAILABLE if retry_after_s else ErrorCode.INVALID_ARG, message, retry_after_s)
        self._http_status = http_status
        self._grpc_status = grpc_status

    @property
    def http_status(self) -> int:
        """The HTTP status of the answer."""
        return self._http_status

    @property
    def grpc_status(self) -> int:
        """The number of the gRPC status of the answer."""
        return self._grpc_status


def no_broker() -> StatusError:
    """503, UNAVAILABLE: the request could not be stored."""
    return StatusError(503, 14, "the message broker is not available", retry_after_s=1)


def other_request() -> StatusError:
    """422, ALREADY_EXISTS: an idempotency key came with another request before.

    Source: the IETF's draft "The Idempotency-Key HTTP Header Field", section 2.7.
    """
    return StatusError(422, 6, "this Idempotency-Key was used before, with another request")


def just_deleted() -> StatusError:
    """409, ABORTED: the job of an idempotency key was deleted a moment ago."""
    message = "the job of this Idempotency-Key was deleted a moment ago: use another key, or come again later"
    return StatusError(409, 10, message, retry_after_s=60)


def no_job(id: str) -> StatusError:
    """404, NOT_FOUND."""
    return StatusError(404, 5, f"there is no job '{id}'")


def not_done(id: str, status: str) -> StatusError:
    """409, FAILED_PRECONDITION: there is no result yet."""
    return StatusError(409, 9, f"job '{id}' has no result yet: it is {status}", retry_after_s=1)


def gone(message: str) -> StatusError:
    """410, NOT_FOUND: there was or could have been a result, and there is none any more."""
    return StatusError(410, 5, message)
