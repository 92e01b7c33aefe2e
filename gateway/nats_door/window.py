"""The window of a NATS request: how many of its answers may be on their way unacknowledged."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.request_headers import read_number

WINDOW = "weir-window"
"""How many answers may be on their way that the caller has not acknowledged."""

_MAX_WINDOW = 65_536


def window_of(headers: Mapping[str, str]) -> int:
    """How many unacknowledged answers the caller wants at most; 0 for no bound. Raises WeirError (INVALID_ARG)."""
    return min(read_number(headers, WINDOW), _MAX_WINDOW) if WINDOW in headers else 0
