"""`BatchFeed`: reports the batches of this scheduler to processes that observe it (`weir.schemas.wire.observation`).

A batch is reported when it is sent and when it has ended. Without a live lease only the attribute `is_on` is tested.
"""

from __future__ import annotations

import time

from weir.bus.observation import Observed
from weir.scheduler.batching.batch import Batch
from weir.scheduler.batching.request import total_rows
from weir.schemas.core.requests import Lane
from weir.schemas.wire.batches import BatchCompletion, BatchEnded, BatchReleased
from weir.schemas.wire.observation import (
    MAX_REPORTED_REQUESTS,
    BatchedRequest,
    BatchEndReport,
    BatchReport,
)

MAX_OPEN_BATCHES = 4096
"""Reported batches whose ends are awaited; the end of the oldest one beyond is not reported."""

_LANES = {lane.value: lane.name.lower() for lane in Lane}


class BatchFeed:
    """The reports of one scheduler, `scheduler` by its id. `observed` has the leases."""

    def __init__(self, observed: Observed, scheduler: str) -> None:
        self._observed = observed
        self._scheduler = scheduler
        self._open: dict[int, tuple[str, ...]] = {}  # the observers of reported batches
        self.is_on = False
        observed.on_change(self._update)

    def _update(self) -> None:
        self.is_on = self._observed.is_on
        if not self.is_on:
            self._open.clear()

    def sent(self, model: str, batch: Batch, now_us: int) -> None:
        """Reports a batch of `model` that was sent at `now_us`, by the policy's clock, to its observers."""
        observers = self._observed.leases.observers_of_batch(model, time.monotonic())
        if not observers:
            return
        requests = batch.requests
        report = BatchReport(
            scheduler=self._scheduler,
            id=batch.id,
            model=model,
            version=batch.version,
            worker=batch.instance.worker,
            instance=batch.instance.number,
            sent_us=time.time_ns() // 1000,
            size=len(requests),
            rows=total_rows(requests),
            padding=len(batch.padding_rows),
            reason=batch.reason,
            requests=[
                BatchedRequest(r.gateway, r.key, _LANES.get(r.lane, ""), r.batch_size, max(0, now_us - r.enqueued_us))
                for r in requests[:MAX_REPORTED_REQUESTS]
            ],
            dropped=max(dropped for _, dropped in observers),
        )
        names = tuple(observer for observer, _ in observers)
        self._observed.publish(names, report)
        self._open[batch.id] = names
        if len(self._open) > MAX_OPEN_BATCHES:
            del self._open[next(iter(self._open))]

    def ended(self, completion: BatchCompletion) -> None:
        """Reports the end of a batch that was reported when it was sent."""
        if isinstance(completion, BatchReleased):
            return  # another completion follows
        observers = self._open.pop(completion.batch_id, None)
        if observers is not None:
            end = BatchEndReport(
                scheduler=self._scheduler,
                id=completion.batch_id,
                ended_us=time.time_ns() // 1000,
                busy_us=max(0, completion.busy_us) if isinstance(completion, BatchEnded) else 0,
                is_answered=isinstance(completion, BatchEnded),
            )
            self._observed.publish(observers, end)
