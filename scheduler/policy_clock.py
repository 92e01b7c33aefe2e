"""The clock of the policies: monotonic microseconds, which unix time is converted to at the door."""

from __future__ import annotations

import time

_FAR_AWAY_US = 10 * 365 * 24 * 3600 * 1_000_000


def now_us() -> int:
    """The time."""
    return time.monotonic_ns() // 1000


def at_unix_ms(unix_ms: int) -> int:
    """When unix milliseconds are on this clock; 1 at the least, and nothing is further away than ten years."""
    return max(1, now_us() + min(unix_ms * 1000 - time.time_ns() // 1000, _FAR_AWAY_US))
