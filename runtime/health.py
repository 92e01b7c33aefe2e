"""`process_health`: what a role reports about its own condition."""

from __future__ import annotations

from typing import Any

from runtime import loop_lag
from runtime.containment import failures


def process_health() -> dict[str, Any]:
    """The event loop's lag and the contained failures, in the form of `schemas.statistics.HealthCounters`."""
    return {"loop_lag_s": loop_lag.ROLE.max_s(), "contained_failures": failures()}
