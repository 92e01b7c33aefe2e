"""`classify_error`: what an error response means for a caller that may submit the same request again.

| error | class |
|---|---|
| CANCELLED | CANCELLED |
| each worker that ran the request died (the scheduler has retried it) | POISON |
| a full queue or gateway; no ready version; a stopping server; an unavailable or full broker | SERVER |
| unknown model or version | UNKNOWN_MODEL |
| a lost or ended sequence; content in a client's memory that is gone; an error that is not retryable | FINAL |
| TIMED_OUT, where the request itself has a timeout | LATE |
| any other UNAVAILABLE or RESOURCE_EXHAUSTED, which a model may return too | TRANSIENT |

The class follows from the error's `Reason`. Errors of models have no reason, whatever their message is.
"""

from __future__ import annotations

from enum import Enum

from weir.schemas.core.errors import ErrorCode, Reason, WeirError


class ErrorClass(Enum):
    """The classes of the table in the module's description."""

    LATE = "late"
    CANCELLED = "cancelled"
    SERVER = "server"
    UNKNOWN_MODEL = "unknown model"
    POISON = "poison"
    TRANSIENT = "transient"
    FINAL = "final"


SERVER_REASONS = frozenset(
    {Reason.QUEUE_FULL, Reason.NOT_READY, Reason.STOPPING, Reason.BROKER_AWAY, Reason.BROKER_FULL}
)
"""Reasons that are independent of the request: any other request would have failed too."""

FINAL_REASONS = frozenset({Reason.SEQUENCE_LOST, Reason.NOT_REPEATABLE})
"""Reasons for which the same request would fail again."""


def classify_error(error: WeirError, has_timeout: bool) -> ErrorClass:
    """The class of `error`, the response to a request; `has_timeout`: the request has KServe's parameter `timeout`."""
    if error.code is ErrorCode.CANCELLED:
        return ErrorClass.CANCELLED
    if error.reason is Reason.KILLED_WORKERS:
        return ErrorClass.POISON
    if error.reason in SERVER_REASONS:
        return ErrorClass.SERVER
    if error.reason is Reason.UNKNOWN_MODEL:
        return ErrorClass.UNKNOWN_MODEL
    if not error.retryable or error.reason in FINAL_REASONS:
        return ErrorClass.FINAL
    if error.reason is Reason.TIMED_OUT and has_timeout:
        return ErrorClass.LATE
    return ErrorClass.TRANSIENT
