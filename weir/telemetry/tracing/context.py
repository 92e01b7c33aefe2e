"""W3C Trace Context: the headers that carry a trace from one program to the next.

Source: https://www.w3.org/TR/trace-context/, version 00; later versions are read as far as they are compatible.
"""

from __future__ import annotations

import json
import os
import re
from typing import NamedTuple

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
MAX_TRACESTATE = 512
"""The longest `tracestate`, in characters, that is forwarded."""


class TraceContext(NamedTuple):
    """The position in a trace from which a request comes. Both ids are positive; `tracestate` is forwarded unread."""

    trace_id: int
    span_id: int
    tracestate: str = ""


def parse_traceparent(text: str) -> TraceContext | None:
    """Parses a `traceparent` header; returns None if it is malformed."""
    match = _TRACEPARENT.fullmatch(text.strip())
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    return TraceContext(trace_id, span_id) if trace_id and span_id else None


def format_traceparent(trace_id: int, span_id: int, is_sampled: bool) -> str:
    """Returns a `traceparent` header."""
    return f"00-{trace_id:032x}-{span_id:016x}-{is_sampled:02x}"


def exported_context(traceparent: str, tracestate: str) -> str:
    """Returns a position as JSON, as Triton passes it to Python models; "" for a trace that is not exported."""
    if not traceparent.endswith("-01"):
        return ""
    context = {"traceparent": traceparent} | ({"tracestate": tracestate} if tracestate else {})
    return json.dumps(context, separators=(",", ":"))


def context_of(exported: str) -> tuple[str, str]:
    """Returns (traceparent, tracestate) from the result of `exported_context`; empty strings if it is malformed."""
    if not exported:
        return "", ""
    try:
        context = json.loads(exported)
        traceparent, tracestate = context["traceparent"], context.get("tracestate", "")
    except (ValueError, TypeError, KeyError, AttributeError):
        return "", ""
    is_whole = isinstance(traceparent, str) and isinstance(tracestate, str) and parse_traceparent(traceparent)
    return (traceparent, tracestate[:MAX_TRACESTATE]) if is_whole else ("", "")


def new_trace_id() -> int:
    """Returns a new random trace id."""
    return int.from_bytes(os.urandom(16)) or 1


def new_span_id() -> int:
    """Returns a new random span id."""
    return int.from_bytes(os.urandom(8)) or 1
