"""The messages of a scheduler: batches and cancellations for workers, errors for the callers of requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from weir.scheduler.batching.batch import Batch
from weir.scheduler.batching.former import MAX_BATCH_BYTES
from weir.scheduler.batching.outcome import Failure
from weir.scheduler.sequences.scheduler import SequenceBatch
from weir.scheduler.service.owned_queue import OwnedQueue
from weir.schemas.wire.batches import (
    NO_REPLY,
    BatchMessage,
    CancelledRequests,
    CheckpointName,
    DirectGrant,
    RunningCancellation,
)
from weir.schemas.wire.calls import pack_error

GRANT_MS = 200
"""For how long a worker may run requests of its own itself after a batch with one of them."""


def by_message(batches: Sequence[Batch]) -> Iterable[Sequence[Batch]]:
    """Returns the batches in groups that are sent to one worker in one message, each group in its order."""
    if len(batches) < 2:
        return (batches,) if batches else ()
    groups: list[list[Batch]] = []
    current: dict[str, tuple[list[Batch], int]] = {}  # by worker, with the bytes of its bodies
    for batch in batches:
        worker, size_bytes = batch.instance.worker, sum([len(request.body) for request in batch.requests])
        together, before_bytes = current.get(worker, ([], 0))
        if not together or before_bytes + size_bytes > MAX_BATCH_BYTES:
            together, before_bytes = [], 0
            groups.append(together)
        together.append(batch)
        current[worker] = together, before_bytes + size_bytes
    return groups


def batch_message(scheduler: str, owned: OwnedQueue, batch: Batch, now_us: int, sent_ns: int = 0) -> BatchMessage:
    """Returns a batch as it is sent to its worker; counts the batch. `sent_ns` is the unix time, for traces."""
    requests, rows = batch.requests, batch_rows(batch, now_us)
    owned.counters.batch_requests.add(len(requests))
    # The first request is from the worker itself: it runs the step of an ensemble, or a call of a model.
    is_own = requests[0].gateway == batch.instance.worker
    request_us = owned.scheduler.direct_request_us(batch) if is_own else 0
    return BatchMessage(
        scheduler,
        batch.id,
        owned.name,
        batch.version,
        batch.instance.number,
        rows,  # type: ignore[arg-type]  # entries without the last fields, where those have their defaults
        owned.epoch,
        owned.queue.partition,
        DirectGrant(GRANT_MS, request_us) if request_us else None,
        checkpoint_names(scheduler, batch) if isinstance(batch, SequenceBatch) else [],
        sent_ns,
    )


def checkpoint_names(scheduler: str, batch: SequenceBatch) -> list[CheckpointName]:
    """Returns the names of the checkpoints of a batch's sequences, of those that have any."""
    progresses = ((sequence.progress, sequence.id) for sequence in batch.sequences)
    return [
        CheckpointName(progress.run, *(progress.origin or (scheduler, progress.run)), id)
        for progress, id in progresses
        if progress.is_checkpointed
    ]


def error_responses(failures: Iterable[Failure]) -> dict[str, list[tuple[object, ...]]]:
    """Returns the error responses to failed requests by gateway, and notifies their frames."""
    by_gateway: dict[str, list[tuple[object, ...]]] = defaultdict(list)
    for request, error in failures:
        by_gateway[request.gateway].append(pack_error(request.key, error))
        request.frame.requests_ended(1)
    return by_gateway


def cancellation_messages(
    scheduler: str, owned: OwnedQueue, gateway: str, keys: Sequence[int]
) -> Iterator[tuple[str, bytes]]:
    """Returns (worker, message) for each worker that runs cancelled requests of `gateway` among `keys`."""
    cancelled: dict[str, list[CancelledRequests]] = defaultdict(list)
    for batch, keys_of_batch in owned.scheduler.cancelled_in_flight(gateway, keys):
        cancelled[batch.instance.worker].append(CancelledRequests(batch.id, gateway, keys_of_batch))
    for worker, batches in cancelled.items():
        yield worker, RunningCancellation(scheduler, batches).pack()


def batch_rows(batch: Batch, now_us: int) -> list[tuple[Any, ...]]:
    """Returns a row for each request and each padding row, with only the fields that the batch needs."""
    requests = batch.requests
    rows: list[tuple[Any, ...]]
    if batch.has_lanes:
        rows = [(r.gateway, r.key, now_us - r.enqueued_us, r.body, r.terms.deadline_ms, None, r.lane) for r in requests]
    elif batch.has_deadlines or batch.places:
        rows = [(r.gateway, r.key, now_us - r.enqueued_us, r.body, r.terms.deadline_ms) for r in requests]
    else:
        rows = [(r.gateway, r.key, now_us - r.enqueued_us, r.body) for r in requests]
    if batch.places:
        rows = [(*row, place) for row, place in zip(rows, batch.places, strict=True)]
    for row in batch.padding_rows:
        rows.insert(row, (NO_REPLY, 0, 0, requests[0].body))
    return rows
