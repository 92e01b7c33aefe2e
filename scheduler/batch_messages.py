"""What a scheduler sends: a batch to its worker, errors to those who wait for an answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import groupby

from scheduler.batch import Batch
from scheduler.owned_model import OwnedModel
from scheduler.queued_request import frame_of
from scheduler.version_scheduler import Failure
from schemas.frames import Row, pack_batch_rows
from schemas.messages import NOBODY, pack_error


def batch_message(scheduler: str, owned: OwnedModel, batch: Batch, now_us: int) -> bytes:
    """The message that hands a batch to its worker; frames that end with it are its to acknowledge. It is counted."""
    requests, rows = batch.requests, list[Row]()
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
    acks = [ack for frame, of in groupby(requests, frame_of) if (ack := frame.delegate(batch.id, len(list(of))))]
    for executed in (1,) * len(requests) if batch.is_series else (len(requests),):
        owned.counters.batch_requests.add(executed)
    return pack_batch_rows(
        scheduler,
        batch.id,
        owned.name,
        batch.version,
        batch.instance.number,
        rows,
        acks,
        batch.is_series,
        owned.epoch,
        owned.queue.partition,
    )


def answers_of(failures: Iterable[Failure]) -> dict[str, list[tuple[object, ...]]]:
    """The answers to requests that have failed, by those who wait for them; their frames know that they have ended."""
    by_gateway: dict[str, list[tuple[object, ...]]] = defaultdict(list)
    for request, error in failures:
        by_gateway[request.gateway].append(pack_error(request.key, error))
        request.frame.requests_ended(1, 0)
    return by_gateway
