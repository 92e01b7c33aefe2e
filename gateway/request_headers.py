"""What the headers of a NATS message say of its request, besides how its body is to be read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.deadlines import DEADLINE_HEADER, read_deadline_ms
from schemas.errors import invalid
from schemas.request_errors import long_correlation_id
from schemas.request_limits import RequestLimits
from schemas.requests import SEQUENCE_END, SEQUENCE_START, InferRequest

DEADLINE = DEADLINE_HEADER.decode()

SHOWN_LENGTH = 40
"""Characters of a value that makes no sense, in its error."""

_is_number = re.compile(r"[0-9]{1,19}", re.ASCII).fullmatch


@dataclass(slots=True)
class RequestHeaders:
    """What headers say; None where they say nothing."""

    deadline_ms: int | None = None
    priority: int | None = None
    correlation_id: int | str | None = None
    sequence_start: bool | None = None
    sequence_end: bool | None = None
    traceparent: str = ""
    tracestate: str = ""

    def apply(self, request: InferRequest) -> None:
        """Has `request` be as the headers say: where its body says it too, the header holds."""
        if self.deadline_ms is not None:
            request.deadline_ms = self.deadline_ms
        if self.priority is not None:
            request.priority = self.priority
        if self.correlation_id is not None:
            request.correlation_id = self.correlation_id
        for said, flag in ((self.sequence_start, SEQUENCE_START), (self.sequence_end, SEQUENCE_END)):
            if said is not None:
                request.sequence_flags = (request.sequence_flags & ~flag) | (flag * said)
        request.traceparent = self.traceparent
        request.tracestate = self.tracestate


def read_headers(headers: Mapping[str, str], limits: RequestLimits) -> RequestHeaders:
    """What `headers` (names in lower case) say. Raises WeirError (INVALID_ARG) for a value that can't be one."""
    said = RequestHeaders(traceparent=headers.get("traceparent", ""), tracestate=headers.get("tracestate", ""))
    if DEADLINE in headers:
        said.deadline_ms = read_deadline_ms(headers[DEADLINE].encode())
    if "weir-priority" in headers:
        said.priority = read_number(headers, "weir-priority")
    if "weir-sequence-id" in headers:
        id = headers["weir-sequence-id"]
        if len(id) > limits.correlation_id_length:
            raise long_correlation_id(limits)
        said.correlation_id = int(id) if id.isascii() and id.isdigit() and int(id) < 1 << 64 else id
    if "weir-sequence-start" in headers:
        said.sequence_start = _flag(headers, "weir-sequence-start")
    if "weir-sequence-end" in headers:
        said.sequence_end = _flag(headers, "weir-sequence-end")
    return said


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
