"""`WeirError`, the error of requests and loads, and the mapping of its codes to HTTP and gRPC.

Source: Triton's eight error codes and their mapping (TRITONSERVER_Error_Code in Triton's C API; its HTTP and gRPC
frontends). RFC 9110 for the meaning of the HTTP statuses, RFC 6585 for 429. The last three codes are Weir's own: they are
used only by features that Triton lacks (queues on disk, an access policy).
"""

from __future__ import annotations

from enum import Enum, IntEnum
from math import ceil

QUEUE_FULL = "Exceeds maximum queue size"
"""Triton's text for a full queue."""

MAX_RETRY_AFTER_S = 60
"""The longest `Retry-After` that a caller gets."""

MAX_BACKOFF_US = 1_000_000
"""The longest back-off that a scheduler may report with a rejection."""


class ErrorCode(Enum):
    """Triton's error codes and three more. The value is the number of the gRPC status.

    `number` is the code's number on the bus, `retryable` whether the same request may succeed later.
    """

    UNKNOWN = (2, 1, 400, False)
    INTERNAL = (13, 2, 500, False)
    NOT_FOUND = (5, 3, 404, False)
    INVALID_ARG = (3, 4, 400, False)
    UNAVAILABLE = (14, 5, 503, True)
    UNSUPPORTED = (12, 6, 501, False)
    ALREADY_EXISTS = (6, 7, 400, False)
    CANCELLED = (1, 8, 400, False)
    RESOURCE_EXHAUSTED = (8, 9, 429, True)
    UNAUTHENTICATED = (16, 10, 401, False)
    PERMISSION_DENIED = (7, 11, 403, False)

    grpc_status: int
    number: int
    http_status: int
    retryable: bool

    def __new__(cls, grpc_status: int, number: int, http_status: int, retryable: bool) -> ErrorCode:
        """A code whose value is its gRPC status alone."""
        code = object.__new__(cls)
        code._value_ = code.grpc_status = grpc_status
        code.number = number
        code.http_status = http_status
        code.retryable = retryable
        return code

    @property
    def title(self) -> str:
        """The code as Triton writes it before a message, as in "Invalid argument: why"."""
        return "Invalid argument" if self is ErrorCode.INVALID_ARG else self.name.replace("_", " ").capitalize()

    @classmethod
    def from_number(cls, number: int) -> ErrorCode:
        """The code that travels as `number`; UNKNOWN for a number of a newer peer."""
        return _BY_NUMBER.get(number, cls.UNKNOWN)

    @classmethod
    def of_grpc(cls, number: int) -> ErrorCode:
        """The code for gRPC status `number`; UNKNOWN for a status that servers do not send."""
        return next((code for code in cls if code.value == number), cls.UNKNOWN)


_BY_NUMBER = {code.number: code for code in ErrorCode}


class Reason(IntEnum):
    """Why a request failed, for code that handles the error: texts are for people. It travels as its number.

    Errors of models have no reason, whatever their texts.
    """

    NONE = 0
    QUEUE_FULL = 1
    """Too much load."""
    NOT_READY = 2
    """The server, the model or its version is not ready yet, or the model has no version."""
    STOPPING = 3
    """The server is stopping."""
    BROKER_AWAY = 4
    """The broker is not connected."""
    BROKER_FULL = 5
    """The broker has no room for the request."""
    UNKNOWN_MODEL = 6
    """No worker has registered the model, or this version of it."""
    TIMED_OUT = 7
    """The deadline of the request or of its queue has passed."""
    KILLED_WORKERS = 8
    """Its worker or process died each time the request ran."""
    SEQUENCE_LOST = 9
    """The state of its sequence is lost, or the sequence has ended."""
    NOT_REPEATABLE = 10
    """It has run, or its content is gone, so that it cannot run again."""
    CANCELLED = 11
    """Its caller has cancelled it, or its content cannot be read any more: the error is not delivered."""

    @classmethod
    def from_number(cls, number: int) -> Reason:
        """The reason that travels as `number`; NONE for a number of a newer peer."""
        return _REASONS.get(number, cls.NONE)


_REASONS = {reason.value: reason for reason in Reason}


class WeirError(Exception):
    """An error that ends a request or a load; the client receives it unchanged.

    `message` never contains paths, addresses or names of internal objects. `retry_after_s` is the number of whole
    seconds after which the same request may succeed, since there is too much load or no worker; 0 if unknown (RFC
    9110's Retry-After). Gateways and workers also receive `backoff_us`, for how many microseconds similar requests
    would be rejected, and `reason`; clients do not. `headers` are further ones of the response over HTTP and NATS.
    """

    headers: tuple[tuple[str, str], ...] = ()

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        retry_after_s: int = 0,
        backoff_us: int = 0,
        reason: Reason = Reason.NONE,
    ) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
        self.backoff_us = backoff_us
        self.reason = reason

    def __str__(self) -> str:
        # As a program's traceback shows it. What is sent or logged by Weir is the `message`.
        return f"{self.code.name}: {self.message}"

    def __repr__(self) -> str:
        return f"WeirError({self.code.name}, {self.message!r})"

    @property
    def http_status(self) -> int:
        """The HTTP status of the response."""
        return self.code.http_status

    @property
    def grpc_status(self) -> int:
        """The number of the gRPC status of the response."""
        return self.code.grpc_status

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later, unchanged."""
        return self.code.retryable


# Tracebacks show the names under which programs import these classes.
ErrorCode.__module__ = WeirError.__module__ = "weir"


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
    message: str = QUEUE_FULL, wait_us: float = 0, backoff_us: int = 0, reason: Reason = Reason.QUEUE_FULL
) -> WeirError:
    """An UNAVAILABLE error (HTTP 503) because of too much load, or because no worker is there.

    The waiting requests are expected to have run after `wait_us`, which becomes the `Retry-After`: at least one second, at
    most a minute. `backoff_us` is as in `WeirError`.
    """
    return WeirError(ErrorCode.UNAVAILABLE, message, retry_after_s(wait_us), backoff_us, reason)


def retry_after_s(wait_us: float) -> int:
    """The `Retry-After` in whole seconds, for requests that wait `wait_us`."""
    return max(1, min(MAX_RETRY_AFTER_S, ceil(wait_us / 1e6)))


def queue_full(model: str, reason: str) -> WeirError:
    """A RESOURCE_EXHAUSTED error (HTTP 429): the durable queue of `model` is full."""
    return WeirError(ErrorCode.RESOURCE_EXHAUSTED, f"the queue of model '{model}' is full: {reason}", retry_after_s=1)


def unknown_model(name: str) -> WeirError:
    """Triton's error for a model that there is not, or that the caller may not know of (NOT_FOUND)."""
    return not_found(f"Request for unknown model: '{name}' is not found", Reason.UNKNOWN_MODEL)
