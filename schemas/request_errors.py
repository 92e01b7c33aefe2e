"""Refusals that many requests can meet, in Triton's words."""

from __future__ import annotations

from schemas.errors import ErrorCode, Reason, WeirError, invalid
from schemas.request_limits import RequestLimits


def too_large(what: str, size_bytes: int, limit_bytes: int) -> WeirError:
    """The INVALID_ARG error for input beyond `--http-max-input-size`."""
    return invalid(
        f"{what} of {size_bytes} bytes exceeds the maximum allowed input size of {limit_bytes} bytes. "
        "Use --http-max-input-size to increase the limit."
    )


def raw_too_large(size_bytes: int, limit_bytes: int) -> WeirError:
    """The INVALID_ARG error for a request whose whole body is its input, beyond `--http-max-input-size`."""
    return invalid(
        f"Raw input has a byte_size ({size_bytes} bytes) that exceeds the maximum allowed value of {limit_bytes} bytes. "
        "Use --http-max-input-size to increase the limit."
    )


def long_correlation_id(limits: RequestLimits) -> WeirError:
    """The error for a correlation id in text that is too long; UNSUPPORTED, as in Triton."""
    limit = limits.correlation_id_length
    return WeirError(ErrorCode.UNSUPPORTED, f"string correlation ID cannot be longer than {limit} characters")


def refused(request_id: str, message: str) -> WeirError:
    """An INVALID_ARG error prefixed with the request's id, `<id_unknown>` for a request without one."""
    return invalid(f"[request id: {request_id or '<id_unknown>'}] {message}")


GIVEN_UP = "the request was given up"
"""The answer to a request that is cancelled, or whose content can't be read any more: nobody should hear it."""


def given_up() -> WeirError:
    """The CANCELLED error that a worker answers such a request with."""
    return WeirError(ErrorCode.CANCELLED, GIVEN_UP, reason=Reason.GIVEN_UP)


def is_given_up(error: WeirError) -> bool:
    """Whether a worker says that nobody waits for the answer, as far as it knows."""
    return error.reason is Reason.GIVEN_UP
