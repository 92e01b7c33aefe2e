"""The rows of a batch message, which tell a worker of its requests."""

from __future__ import annotations

from scheduler.batch import Batch
from schemas.frames import Row
from schemas.messages import NOBODY


def rows_of(batch: Batch, now_us: int) -> list[Row]:
    """One for each request and for each null row, with as much as the batch has to tell of them."""
    requests = batch.requests
    rows: list[Row]
    if batch.tells_lanes:
        rows = [(r.gateway, r.key, now_us - r.enqueued_us, r.body, r.terms.deadline_ms, None, r.lane) for r in requests]
    elif batch.has_deadlines or batch.places:
        rows = [(r.gateway, r.key, now_us - r.enqueued_us, r.body, r.terms.deadline_ms) for r in requests]
    else:
        rows = [(r.gateway, r.key, now_us - r.enqueued_us, r.body) for r in requests]
    if batch.places:
        rows = [(*row, place) for row, place in zip(rows, batch.places, strict=True)]
    for row in batch.null_rows:
        rows.insert(row, (NOBODY, 0, 0, requests[0].body))
    return rows
