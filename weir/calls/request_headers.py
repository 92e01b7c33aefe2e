"""`RequestHeaders`: the fields of a request in the headers of a NATS message, except the format of its body; deadlines.

A deadline is a unix time in milliseconds after which the response is of no use. It travels with the request: each role
rejects a request whose deadline has passed instead of running it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from weir.schemas.core.errors import invalid
from weir.schemas.core.request_limits import RequestLimits, long_correlation_id
from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START, InferRequest

DEADLINE_HEADER = b"weir-deadline-ms"
"""The HTTP header that gives a deadline. (gRPC has `grpc-timeout`.)"""

_read_deadline = re.compile(rb"\s*([0-9]{1,15})\s*", re.ASCII).fullmatch

DEADLINE = DEADLINE_HEADER.decode()

SHOWN_LENGTH = 40
"""Characters of an invalid value that its error repeats."""

_is_number = re.compile(r"[0-9]{1,19}", re.ASCII).fullmatch


@dataclass(slots=True)
class RequestHeaders:
    """The values of headers; None for a missing header."""

    deadline_ms: int | None = None
    priority: int | None = None
    correlation_id: int | str | None = None
    sequence_start: bool | None = None
    sequence_end: bool | None = None
    traceparent: str = ""
    tracestate: str = ""

    def apply(self, request: InferRequest) -> None:
        """Applies the headers to `request`. A header takes precedence over the same field in the body."""
        if self.deadline_ms is not None:
            request.deadline_ms = self.deadline_ms
        if self.priority is not None:
            request.priority = self.priority
        if self.correlation_id is not None:
            request.correlation_id = self.correlation_id
        for value, flag in ((self.sequence_start, SEQUENCE_START), (self.sequence_end, SEQUENCE_END)):
            if value is not None:
                request.sequence_flags = (request.sequence_flags & ~flag) | (flag * value)
        request.traceparent = self.traceparent
        request.tracestate = self.tracestate


def read_headers(headers: Mapping[str, str], limits: RequestLimits) -> RequestHeaders:
    """The values in `headers` (names in lower case). Raises WeirError (INVALID_ARG) for an invalid value."""
    values = RequestHeaders(traceparent=headers.get("traceparent", ""), tracestate=headers.get("tracestate", ""))
    if DEADLINE in headers:
        values.deadline_ms = read_deadline_ms(headers[DEADLINE].encode())
    if "weir-priority" in headers:
        values.priority = read_number(headers, "weir-priority")
    if "weir-sequence-id" in headers:
        id = headers["weir-sequence-id"]
        if len(id) > limits.correlation_id_length:
            raise long_correlation_id(limits)
        values.correlation_id = int(id) if id.isascii() and id.isdigit() and int(id) < 1 << 64 else id
    if "weir-sequence-start" in headers:
        values.sequence_start = _flag(headers, "weir-sequence-start")
    if "weir-sequence-end" in headers:
        values.sequence_end = _flag(headers, "weir-sequence-end")
    return values


def read_number(headers: Mapping[str, str], name: str) -> int:
    """The whole number in a header, below 2^63. Raises WeirError (INVALID_ARG)."""
    value = headers[name]
    if not _is_number(value) or int(value) >= 1 << 63:
        raise invalid(f"Unable to parse header '{name}', got: {value[:SHOWN_LENGTH]}")
    return int(value)


def _flag(headers: Mapping[str, str], name: str) -> bool:
    value = headers[name].lower()
    if value not in ("true", "false", "1", "0"):
        raise invalid(f"Unable to parse header '{name}', got: {headers[name][:SHOWN_LENGTH]}")
    return value in ("true", "1")


def read_deadline_ms(value: bytes) -> int:
    """The deadline that a header gives. Raises WeirError (INVALID_ARG) for anything but a positive integer."""
    found = _read_deadline(value)
    deadline_ms = 0 if found is None else int(found[1])
    if deadline_ms < 1:
        shown = value[:40].decode("latin-1")
        raise invalid(f"Unable to parse Weir-Deadline-Ms, expected unix time in milliseconds, got: {shown}")
    return deadline_ms


def deadline_ms_in(timeout_s: float) -> int:
    """The deadline of a call whose timeout starts now."""
    # Rounded up, so that the frontend reports the timeout first, with gRPC's own status message.
    return int((time.time() + timeout_s) * 1000) + 1
