"""`RequestLimits`, the bounds of one request, and the errors of requests that exceed them, in Triton's words."""

from __future__ import annotations

from typing import NamedTuple

from weir.schemas.core.errors import ErrorCode, Reason, WeirError, invalid

CANCELLED_MESSAGE = "the request was cancelled"
"""The message of the error that answers a cancelled request, or one whose content cannot be read any more."""


class RequestLimits(NamedTuple):
    """The bounds of one request, the same for all frontends.

    `input_size` is in bytes and bounds the JSON, each tensor given as JSON, and a raw body; `json_values` bounds the
    elements and members of the whole document; `id_length` and `correlation_id_length` (Triton's) are in characters.
    """

    input_size: int = 64 << 20
    json_values: int = 32_000_000
    tensors: int = 256
    dims: int = 16
    parameters: int = 64
    id_length: int = 4096
    correlation_id_length: int = 128


DEFAULT_LIMITS = RequestLimits()


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


_UNKNOWN_ID = "<id_unknown>"


def invalid_request(request_id: str, message: str) -> WeirError:
    """An INVALID_ARG error prefixed with the request's id, `<id_unknown>` for a request without one."""
    return invalid(f"[request id: {request_id or _UNKNOWN_ID}] {message}")


def error_with_id(error: WeirError, request_id: str) -> WeirError:
    """`error`, about a request whose body has no id, with the id that it is known by where its text begins with one."""
    unknown = f"[request id: {_UNKNOWN_ID}]"
    if not error.message.startswith(unknown):
        return error
    return WeirError(
        error.code, f"[request id: {request_id}]{error.message.removeprefix(unknown)}", reason=error.reason
    )


def cancelled_error() -> WeirError:
    """The CANCELLED error with which a worker answers a request that was cancelled or whose content it cannot read."""
    return WeirError(ErrorCode.CANCELLED, CANCELLED_MESSAGE, reason=Reason.CANCELLED)


def is_cancelled_error(error: WeirError) -> bool:
    """Whether `error` is a worker's report that it stopped a request which, to its knowledge, is no longer wanted."""
    return error.reason is Reason.CANCELLED
