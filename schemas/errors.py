"""The one error type of Weir, and the table that maps each code to HTTP and gRPC.

Source: Triton's eight error codes and their mapping (TRITONSERVER_Error_Code in Triton's C API; its HTTP and gRPC
front ends). RFC 9110 for the meaning of the HTTP statuses, RFC 6585 for 429. The ninth code is ours: only what Triton lacks
(queues on disk) answers with it.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from math import ceil

QUEUE_FULL = "Exceeds maximum queue size"
"""Triton's text where a queue takes no more."""

MAX_RETRY_AFTER_S = 60
"""The longest time after which a caller is told to come again."""

MAX_SHUT_US = 1_000_000
"""The longest time for which one refusal may speak for requests that have not come yet."""


class ErrorCode(Enum):
    """Triton's error codes and one more: (number on the bus, HTTP status, gRPC status, whether a retry may succeed)."""

    UNKNOWN = (1, 400, 2, False)
    INTERNAL = (2, 500, 13, False)
    NOT_FOUND = (3, 404, 5, False)
    INVALID_ARG = (4, 400, 3, False)
    UNAVAILABLE = (5, 503, 14, True)
    UNSUPPORTED = (6, 501, 12, False)
    ALREADY_EXISTS = (7, 400, 6, False)
    CANCELLED = (8, 400, 1, False)
    RESOURCE_EXHAUSTED = (9, 429, 8, True)

    def __init__(self, number: int, http_status: int, grpc_status: int, retryable: bool) -> None:
        self.number = number
        self.http_status = http_status
        self.grpc_status = grpc_status
        self.retryable = retryable

    @property
    def title(self) -> str:
        """The code as Triton writes it before a message, as in "Invalid argument: why"."""
        return "Invalid argument" if self is ErrorCode.INVALID_ARG else self.name.replace("_", " ").capitalize()

    @classmethod
    def from_number(cls, number: int) -> ErrorCode:
        """The code that travels as `number`; UNKNOWN for a number of a newer peer."""
        return _BY_NUMBER.get(number, cls.UNKNOWN)


_BY_NUMBER = {code.number: code for code in ErrorCode}


class Reason(IntEnum):
    """Why a request failed, for who decides what becomes of it: texts are for people. Travels as its number.

    Errors that models answer with have none, whatever their texts say.
    """

    NONE = 0
    QUEUE_FULL = 1
    """There is too much to do already."""
    NOT_READY = 2
    """The server, the model or its version is not ready, or the model has no version: that may change."""
    STOPPING = 3
    """The server is stopping."""
    BROKER_AWAY = 4
    BROKER_FULL = 5
    UNKNOWN_MODEL = 6
    """No worker has told of the model, or of this version of it."""
    TIMED_OUT = 7
    KILLED_WORKERS = 8
    """Its worker or process died each time that it ran."""
    SEQUENCE_LOST = 9
    """The state of its sequence is lost, or the sequence has ended."""
    NOT_REPEATABLE = 10
    """It has run, or what it was made of is gone: it can't run again."""
    GIVEN_UP = 11
    """Its caller has gone, or its content can't be read any more: nobody should hear of it."""

    @classmethod
    def from_number(cls, number: int) -> Reason:
        """The reason that travels as `number`; NONE for a number of a newer peer."""
        return _REASONS.get(number, cls.NONE)


_REASONS = {reason.value: reason for reason in Reason}


class WeirError(Exception):
    """An error that ends a request or a load, told to the caller as it stands.

    `message` is shown to clients: it never holds paths, addresses or names of internal objects. `retry_after_s` tells, in
    whole seconds, when the same request may have better luck, for there is too much to do, or nobody to do it; 0 says
    nothing about it (RFC 9110's Retry-After). `shut_us` is told to callers of models alone, not to clients: for so many
    microseconds others like it would be refused as well. `reason` is told to them, too.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        retry_after_s: int = 0,
        shut_us: int = 0,
        reason: Reason = Reason.NONE,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
        self.shut_us = shut_us
        self.reason = reason

    def __repr__(self) -> str:
        return f"WeirError({self.code.name}, {self.message!r})"

    @property
    def http_status(self) -> int:
        """The HTTP status of the answer."""
        return self.code.http_status

    @property
    def grpc_status(self) -> int:
        """The number of the gRPC status of the answer."""
        return self.code.grpc_status

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later, unchanged."""
        return self.code.retryable


def invalid(message: str) -> WeirError:
    """An INVALID_ARG error (HTTP 400)."""
    return WeirError(ErrorCode.INVALID_ARG, message)


def internal(message: str, reason: Reason = Reason.NONE) -> WeirError:
    """An INTERNAL error (HTTP 500)."""
    return WeirError(ErrorCode.INTERNAL, message, reason=reason)


def not_found(message: str, reason: Reason = Reason.NONE) -> WeirError:
    """A NOT_FOUND error (HTTP 404)."""
    return WeirError(ErrorCode.NOT_FOUND, message, reason=reason)


def unavailable(message: str, reason: Reason = Reason.NONE) -> WeirError:
    """An UNAVAILABLE error (HTTP 503), which the caller may retry."""
    return WeirError(ErrorCode.UNAVAILABLE, message, reason=reason)


def overloaded(
    message: str = QUEUE_FULL, wait_us: float = 0, shut_us: int = 0, reason: Reason = Reason.QUEUE_FULL
) -> WeirError:
    """An UNAVAILABLE error (HTTP 503) because there is too much to do, or nobody to do it.

    What waits is expected to be gone after `wait_us`; so long, at least one second and at most a minute, the caller is
    told to wait. `shut_us` is as in `WeirError`.
    """
    return WeirError(ErrorCode.UNAVAILABLE, message, retry_after_s(wait_us), shut_us, reason)


def retry_after_s(wait_us: float) -> int:
    """Whole seconds until a caller should come again, where what waits takes `wait_us`."""
    return max(1, min(MAX_RETRY_AFTER_S, ceil(wait_us / 1e6)))


def queue_full(model: str, reason: str) -> WeirError:
    """A RESOURCE_EXHAUSTED error (HTTP 429): the durable queue of `model` takes no more for now."""
    return WeirError(ErrorCode.RESOURCE_EXHAUSTED, f"the queue of model '{model}' is full: {reason}", retry_after_s=1)
