"""How batches end, as numbers that tests choose from, and the completions that say so."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from weir.schemas.wire.batches import BatchCompletion, BatchEnded, BatchLost, BatchNotRun, BatchReleased, NotRunReason


class Outcome(IntEnum):
    """How a batch ends; or that it goes on, while its instance is free."""

    ANSWERED = 0
    UNANSWERED = 1
    RELEASED = 2
    NOT_RUN = 3


def completion(
    batch_id: int,
    outcome: int = Outcome.ANSWERED,
    busy_us: int = 0,
    rescheduled: Sequence[int] = (),
    reason: NotRunReason = NotRunReason.SLOW,
) -> BatchCompletion:
    """The completion of the batch."""
    if outcome == Outcome.ANSWERED:
        return BatchEnded(batch_id, busy_us, rescheduled)
    if outcome == Outcome.UNANSWERED:
        return BatchLost(batch_id, busy_us)
    return BatchReleased(batch_id, busy_us) if outcome == Outcome.RELEASED else BatchNotRun(batch_id, reason)
