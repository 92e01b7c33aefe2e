"""`Ended`: the requests that an event of a policy has ended, and `Failure`: one that ended with an error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from weir.scheduler.batching.request import QueuedRequest
from weir.schemas.core.errors import WeirError

TIMEOUT_EXPIRED = "Request timeout expired"


class Failure(NamedTuple):
    """A request that has ended with an error, which the caller of the policy sends."""

    request: QueuedRequest
    error: WeirError


Ended = tuple[Sequence[QueuedRequest], Sequence[Failure]]
"""Requests that have ended: with a response or a caller that left, and with an error still to be sent."""

NOTHING_ENDED: Ended = ((), ())


def concatenate(parts: Iterable[Ended]) -> Ended:
    """Returns everything that has ended in `parts`."""
    parts = list(parts)
    return (
        [request for completed, _ in parts for request in completed],
        [failure for _, failures in parts for failure in failures],
    )
