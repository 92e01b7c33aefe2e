"""`Dispatch`: decides which batches of a model version are sent now, from the queues of its lanes to its instances.

Live requests come first. Events run when no live request waits, and join the batches of live requests. Requests of
the batch lane take what is left: empty places of batches (backfill), and idle instances as far as `BatchLaneBudget`
expects no live request to wait for it.
"""

from __future__ import annotations

from collections.abc import Callable

from weir.scheduler.batching.batch import Batch, BatchesInFlight
from weir.scheduler.batching.batcher import Batcher
from weir.scheduler.batching.lane_budget import BatchLaneBudget, BatchRun
from weir.scheduler.batching.lanes import BATCH, EVENT, LIVE, LaneQueues
from weir.scheduler.batching.request import QueuedRequest, total_rows
from weir.scheduler.batching.request_queue import NEVER_US
from weir.scheduler.batching.run_time import RunTimeEstimate
from weir.scheduler.placement.instances import Instance, Placement
from weir.scheduler.placement.window import SLOTS, Window
from weir.schemas.wire.messages import NotRunReason
from weir.schemas.wire.observation import BatchReason

STAGES_AFTER_US = 1_000_000
"""Events may be staged behind a running batch this long after the last live request."""


class Dispatch:
    """The dispatch of one version. It fills `placement` and `in_flight`; `draw_id` numbers batches. `run_time` is the
    expected time of a request. Times are microseconds.

    While all requests are live, it only connects their batcher with the placement.
    """

    def __init__(
        self,
        version: int,
        lanes: LaneQueues,
        placement: Placement,
        in_flight: BatchesInFlight,
        draw_id: Callable[[], int],
    ) -> None:
        self._version = version
        self._lanes = lanes
        self._placement = placement
        self._in_flight = in_flight
        self._draw_id = draw_id
        self.run_time = RunTimeEstimate()
        self._window = Window()
        self._budget: BatchLaneBudget | None = None  # exists once there were requests of other lanes

    def record_arrivals(self, requests: list[QueuedRequest]) -> None:
        """Records requests that are about to be enqueued."""
        if self._budget is not None and (live := sum(request.lane == LIVE for request in requests)):
            idle = self._placement.idle
            self._budget.record_live(requests[0].enqueued_us, live, len(self._placement) - idle, idle)

    @property
    def is_live_only(self) -> bool:
        """Whether no request of another lane waits or runs."""
        lanes = self._lanes
        is_running = self._budget is not None and self._budget.is_running
        return lanes.is_live_only or not (lanes.event or lanes.batch or is_running)

    def forget_cost(self) -> None:
        """Discards the measured cost of batches, which are formed by other rules from now on."""
        if self._budget is not None:
            self._budget.forget_cost()

    def batch_ended(self, batch: Batch, now_us: int, busy_us: int) -> None:
        """Frees the instance of a batch, which kept it busy for `busy_us` (0: unknown)."""
        placement = self._placement
        if self._budget is not None:
            if batch.is_batch_lane:
                self._budget.run_ended(now_us)
            if busy_us > 0:
                begun_us, rows = batch.instance.begun_us, total_rows(batch.requests)
                run = BatchRun(begun_us, rows, busy_us, batch.is_batch_lane)
                self._budget.record_run(now_us, run, len(placement))
        placement.free(batch.instance, now_us, busy_us)
        if busy_us > 0:
            self.run_time.record(len(batch.requests), busy_us)
            self._window.batch_ended(busy_us)

    def batch_returned(self, batch: Batch, now_us: int, reason: NotRunReason) -> None:
        """Frees the instance of a batch that has not started, and sends it less, or nothing, for a while."""
        instance = batch.instance
        if not batch.released:
            batch.released = True
            self.batch_ended(batch, now_us, 0)
        if reason in (NotRunReason.DOWN, NotRunReason.GONE):
            self._placement.close(instance, now_us)
            return
        self._window.narrow(1 if reason == NotRunReason.CALLING else SLOTS)
        if reason == NotRunReason.CALLING and not instance.held:
            self._placement.close(instance, now_us)  # it runs a batch that was not sent from here

    def batch_lost(self) -> None:
        """Narrows the windows for a while: a request of a batch may be what kills its instance."""
        self._window.narrow()

    def batches(self, now_us: int) -> tuple[list[Batch], int | None]:
        """Returns the batches to send now, and when to call again if nothing else happens (None: never)."""
        batches: list[Batch] = []
        lanes, placement = self._lanes, self._placement
        placement.window = self._window.size(self.run_time.us_each, lanes.live.runs_singly)
        opens_us = placement.opens_us
        if opens_us is not None:
            placement.open_due(now_us)
            opens_us = placement.opens_us
        if lanes.is_live_only:
            ready_us = self._form(lanes.live, now_us, batches)
        else:
            ready_us = self._form_by_lane(now_us, batches)
        if opens_us is not None and lanes:
            ready_us = min(ready_us, opens_us)
        if lanes.is_timed:
            # A request put back since `overdue` may be late already: then the next call comes at once and handles it.
            ready_us = min(ready_us, max(lanes.next_timeout_us, now_us + 1))
        return batches, None if ready_us == NEVER_US else ready_us

    def _form(
        self, batcher: Batcher, now_us: int, batches: list[Batch], lane: int = LIVE, may_stage: bool = True
    ) -> int:
        """Appends batches of one lane while instances have room; returns when there may be more."""
        placement = self._placement
        may_stage = may_stage and batcher.rules.may_stage
        while batcher:
            instance = placement.next_slot() if may_stage else placement.next_idle()
            if instance is None:
                break
            # A batch that could still grow is staged only if its instance will be free soon.
            partial_us = placement.stage_partial_at_us(instance) if instance.held and batcher.largest > 1 else 0
            requests = batcher.next_batch(now_us, full_only=partial_us is None or now_us < partial_us)
            if requests is None:
                return NEVER_US if partial_us is None else max(partial_us, batcher.ready_at_us())
            if instance.held and requests[0].runs_alone:
                batcher.put_back(requests)
                break
            batches.append(self._send(instance, requests, now_us, lane, batcher.reason))
        return NEVER_US

    def _send(
        self, instance: Instance, requests: list[QueuedRequest], now_us: int, lane: int, reason: BatchReason
    ) -> Batch:
        """Creates a batch of these requests, and of requests of later lanes that may join, and marks it as in flight."""
        lanes, placement = self._lanes, self._placement
        if requests[0].payload_host and not instance.held:
            instance = placement.idle_near(requests[0].payload_host) or instance
        rows = 0
        if self._budget is not None:
            # The placement does not count backfill: live requests are staged as if there were none.
            rows -= lanes.add_backfill(requests, lane, self._budget)
        batch = Batch(self._draw_id(), self._version, instance, requests)
        batch.reason = reason
        if lanes.is_live_only:
            batch.has_deadlines = lanes.live.is_timed
        else:
            batch.has_deadlines = lanes.is_timed
            batch.has_lanes = lanes.live.has_steps
            if lane == BATCH and self._budget is not None:
                batch.is_batch_lane = True
                self._budget.run_started()
        for request in requests:
            request.place = batch.id
            rows += request.batch_size
        placement.occupy(instance, now_us, rows, requests[0].runs_alone)
        self._in_flight.add(batch)
        return batch

    def _form_by_lane(self, now_us: int, batches: list[Batch]) -> int:
        """Appends batches of all lanes: of a later lane only while no request of an earlier one waits."""
        lanes = self._lanes
        if self._budget is None:
            self._budget = BatchLaneBudget(lanes.live_us)
        ready_us = NEVER_US
        if lanes.live:
            lanes.age(now_us)
            ready_us = self._form(lanes.live, now_us, batches)
            if lanes.live:
                return ready_us
        if lanes.event:
            # A staged event would delay the next live request.
            is_live = 0 < lanes.live_us > now_us - STAGES_AFTER_US
            ready_us = min(ready_us, self._form(lanes.event, now_us, batches, EVENT, may_stage=not is_live))
            if lanes.event:
                return ready_us
        if not lanes.batch:
            return ready_us
        # A coordinator only forwards requests, and those are of the same lane.
        if lanes.live.has_steps or not self._budget.has_live_traffic(now_us):
            return min(ready_us, self._form(lanes.batch, now_us, batches, BATCH))
        return min(ready_us, self._form_batch_lane(now_us, batches, self._budget))

    def _form_batch_lane(self, now_us: int, batches: list[Batch], budget: BatchLaneBudget) -> int:
        """Appends batches of the batch lane as far as no live request is expected to wait for them."""
        jobs, placement = self._lanes.batch, self._placement
        while jobs:
            instance = placement.next_idle()
            if instance is None:
                break
            may_us = budget.may_run_at_us(now_us, len(self._placement))
            if may_us > now_us:
                return may_us
            requests = jobs.next_batch(now_us)
            if requests is None:
                return jobs.ready_at_us()
            rows, most_rows = requests[0].batch_size, budget.max_run_rows
            for number, request in enumerate(requests[1:], 1):
                rows += request.batch_size
                if rows > most_rows:
                    jobs.put_back(requests[number:])
                    del requests[number:]
                    break
            batches.append(self._send(instance, requests, now_us, BATCH, jobs.reason))
        return NEVER_US
