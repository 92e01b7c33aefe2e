"""What the headers of a NATS message say of its request, besides how its body is to be read."""

from __future__ import annotations

import re

from gateway.deadlines import DEADLINE_HEADER, read_deadline_ms
from schemas.errors import invalid
from schemas.request_errors import long_correlation_id
from schemas.request_limits import RequestLimits
from schemas.requests import SEQUENCE_END, SEQUENCE_START, InferRequest

WINDOW = "weir-window"
"""How many answers may be on their way that the caller has not acknowledged."""

DEADLINE = DEADLINE_HEADER.decode()

_MAX_WINDOW = 65_536
_SHOWN = 40  # characters of a value that makes no sense

_is_number = re.compile(r"[0-9]{1,19}", re.ASCII).fullmatch


def read_headers(request: InferRequest, headers: dict[str, str], limits: RequestLimits) -> None:
    """Takes over what is said in `headers` (names in lower case); where the body says it too, the header holds.

    Raises WeirError (INVALID_ARG) for a value that can't be one.
    """
    if DEADLINE in headers:
        request.deadline_ms = read_deadline_ms(headers[DEADLINE].encode())
    if "weir-priority" in headers:
        request.priority = _number(headers, "weir-priority")
    if "weir-sequence-id" in headers:
        id = headers["weir-sequence-id"]
        if len(id) > limits.correlation_id_length:
            raise long_correlation_id(limits)
        request.correlation_id = int(id) if id.isascii() and id.isdigit() and int(id) < 1 << 64 else id
    for name, flag in (("weir-sequence-start", SEQUENCE_START), ("weir-sequence-end", SEQUENCE_END)):
        if name in headers:
            request.sequence_flags = (request.sequence_flags & ~flag) | (flag * _flag(headers, name))
    request.traceparent = headers.get("traceparent", "")
    request.tracestate = headers.get("tracestate", "")


def window_of(headers: dict[str, str]) -> int:
    """How many unacknowledged answers the caller wants at most; 0 for no bound. Raises WeirError (INVALID_ARG)."""
    return min(_number(headers, WINDOW), _MAX_WINDOW) if WINDOW in headers else 0


def _number(headers: dict[str, str], name: str) -> int:
    value = headers[name]
    if not _is_number(value) or int(value) >= 1 << 63:
        raise invalid(f"Unable to parse header '{name}', got: {value[:_SHOWN]}")
    return int(value)


def _flag(headers: dict[str, str], name: str) -> bool:
    value = headers[name].lower()
    if value not in ("true", "false", "1", "0"):
        raise invalid(f"Unable to parse header '{name}', got: {headers[name][:_SHOWN]}")
    return value in ("true", "1")
