"""What a scheduler sends: a batch to its worker, errors to those who wait for an answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from scheduler.batch import Batch
from scheduler.batch_rows import rows_of
from scheduler.owned_model import OwnedModel
from scheduler.queued_request import by_frame
from scheduler.version_scheduler import Failure
from schemas.abandoned import AbandonedRequests, pack_abandoned
from schemas.frames import pack_batch_rows
from schemas.messages import pack_error


def batch_message(scheduler: str, owned: OwnedModel, batch: Batch, now_us: int) -> bytes:
    """The message that hands a batch to its worker; frames that end with it are its to acknowledge. It is counted."""
    requests, rows = batch.requests, rows_of(batch, now_us)
    acks = [ack for frame, number in by_frame(requests) if (ack := frame.delegate(batch.id, number))]
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


def abandoned_of(scheduler: str, owned: OwnedModel, gateway: str, keys: Sequence[int]) -> Iterator[tuple[str, bytes]]:
    """For each worker that runs some of these requests, which nobody waits for any more, the message that tells it so."""
    abandoned: dict[str, list[AbandonedRequests]] = defaultdict(list)
    for batch, of_batch in owned.scheduler.cancelled_in_flight(gateway, keys):
        abandoned[batch.instance.worker].append(AbandonedRequests(batch.id, gateway, of_batch))
    for worker, batches in abandoned.items():
        yield worker, pack_abandoned(scheduler, batches)
