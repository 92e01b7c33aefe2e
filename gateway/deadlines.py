"""Deadlines of requests, as callers give them: until when the answer is of use, in unix milliseconds.

They travel with their requests: a request whose deadline has passed is refused by whoever has it then, before it runs.
"""

from __future__ import annotations

import re
import time

from schemas.errors import invalid

DEADLINE_HEADER = b"weir-deadline-ms"
"""The HTTP header that gives a deadline. (gRPC has `grpc-timeout`.)"""

_read = re.compile(rb"\s*([0-9]{1,15})\s*", re.ASCII).fullmatch


def read_deadline_ms(value: bytes) -> int:
    """The deadline that a header gives. Raises WeirError (INVALID_ARG) for anything but a positive integer."""
    found = _read(value)
    deadline_ms = 0 if found is None else int(found[1])
    if deadline_ms < 1:
        shown = value[:40].decode("latin-1")
        raise invalid(f"Unable to parse Weir-Deadline-Ms, expected unix time in milliseconds, got: {shown}")
    return deadline_ms


def deadline_ms_in(timeout_s: float) -> int:
    """The deadline of a call that has so long from now."""
    # Rounded up: the door tells its caller first, and in gRPC's own words.
    return int((time.time() + timeout_s) * 1000) + 1
