"""What is refused by the head of a request alone, so that its body is not even kept."""

from __future__ import annotations

import time

from calls.catalog import ServedModel
from gateway.doors import Doors
from schemas.errors import WeirError


def refusal_at_head(doors: Doors, model: str, version: str) -> WeirError | None:
    """The error with which the queue would refuse whatever request for this model, as far as is known.

    None where it may be another error, or depends on the body.
    """
    try:
        served = doors.catalog.resolve(model, version)
        if not _may_depend_on_body(doors, served):
            doors.inference.shut.check_any(time.monotonic(), served.queue, version)
    except WeirError as error:
        return error if error.retry_after_s else None
    return None


def _may_depend_on_body(doors: Doors, served: ServedModel) -> bool:
    """The cache may know the answer; other priorities may be taken in; a request may go on with a sequence of steps."""
    batching = served.config.dynamic_batching
    has_priorities = batching is not None and batching.priority_levels > 0
    return has_priorities or served.config.ensemble_scheduling is not None or doors.inference.caches(served)
