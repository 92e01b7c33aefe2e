"""Errors of asynchronous requests with HTTP statuses that Triton's error codes do not have."""

from __future__ import annotations

from weir.schemas.core.errors import ErrorCode, WeirError, invalid
from weir.schemas.core.tensors import ClientRef


class StatusError(WeirError):
    """An error with its own HTTP and gRPC status. `retry_after_s` is the delay before a retry; 0: do not retry."""

    def __init__(self, http_status: int, grpc_status: int, message: str, retry_after_s: int = 0) -> None:
        super().__init__(ErrorCode.UNAVAILABLE if retry_after_s else ErrorCode.INVALID_ARG, message, retry_after_s)
        self._http_status = http_status
        self._grpc_status = grpc_status

    @property
    def http_status(self) -> int:
        """The HTTP status of the response."""
        return self._http_status

    @property
    def grpc_status(self) -> int:
        """The number of the gRPC status of the response."""
        return self._grpc_status


def broker_unavailable() -> StatusError:
    """503, UNAVAILABLE: the request could not be stored."""
    return StatusError(503, 14, "the message broker is not available", retry_after_s=1)


def store_stalled() -> StatusError:
    """503, UNAVAILABLE: the broker stores nothing."""
    message = "the request could not be stored: the message broker stores nothing now, its disk may be full"
    return StatusError(503, 14, message, retry_after_s=5)


def idempotency_key_reused() -> StatusError:
    """422, ALREADY_EXISTS: the idempotency key belongs to another request.

    Source: the IETF's draft "The Idempotency-Key HTTP Header Field", section 2.7.
    """
    return StatusError(422, 6, "this Idempotency-Key was used before, with another request")


def recently_deleted() -> StatusError:
    """409, ABORTED: the request of an idempotency key was deleted a moment ago."""
    message = "the job of this Idempotency-Key was deleted a moment ago: use another key, or come again later"
    return StatusError(409, 10, message, retry_after_s=60)


def job_not_found(id: str) -> StatusError:
    """404, NOT_FOUND: no job has this id."""
    return StatusError(404, 5, f"there is no job '{id}'")


def job_not_done(id: str, status: str) -> StatusError:
    """409, FAILED_PRECONDITION: the request has not ended."""
    return StatusError(409, 9, f"job '{id}' has no result yet: it is {status}", retry_after_s=1)


def result_gone(message: str) -> StatusError:
    """410, NOT_FOUND: the request has no result, or the result has expired."""
    return StatusError(410, 5, message)


def reject_region(_name: str, _offset: int, _size: int) -> ClientRef:
    """A `FindRegion` that rejects: when the request runs, the client may have changed the memory, or have exited."""
    raise invalid("shared memory regions are not supported in asynchronous requests")
