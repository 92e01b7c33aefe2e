"""`Dispatch`: which batches of a model version are sent now, from the queues of its lanes to its instances.

Live requests come first. Events run when none of those waits, and join their batches. Offline jobs take what both leave:
empty places of batches, and idle instances, as far as `scheduler.leeway` finds that no live request waits for it.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler.batch import Batch, BatchesInFlight
from scheduler.batcher import Batcher
from scheduler.lanes import BATCH, EVENT, LIVE, LaneQueues
from scheduler.leeway import Leeway
from scheduler.ordered_queue import NEVER_US
from scheduler.placement import Instance, Placement
from scheduler.queued_request import QueuedRequest, rows_of
from scheduler.series import SeriesBatcher

STAGES_AFTER_US = 1_000_000
"""So long after the last live request, events may wait at an instance behind a batch."""


class Dispatch:
    """See the module; times are microseconds. It fills `placement` and adds to `in_flight`; `draw_id` numbers batches.

    As long as all requests are live it does no more than join their batcher and the placement.
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
        self._leeway: Leeway | None = None  # from when on there are others than live requests

    def come(self, requests: list[QueuedRequest]) -> None:
        """These are about to be taken into the queues."""
        if self._leeway is not None and (live := sum(request.lane == LIVE for request in requests)):
            idle = self._placement.idle
            self._leeway.live_came(requests[0].enqueued_us, live, len(self._placement) - idle, idle)

    def forget_cost(self) -> None:
        """Batches are formed otherwise from now on."""
        if self._leeway is not None:
            self._leeway.forget_cost()

    def released(self, batch: Batch, now_us: int, busy_us: int) -> None:
        """The instance is done with the batch, which took it `busy_us` (0: not known)."""
        placement = self._placement
        if self._leeway is not None:
            if batch.is_alone:
                self._leeway.alone_ended(now_us)
            if busy_us > 0:
                begun_us, rows = batch.instance.begun_us, rows_of(batch.requests)
                self._leeway.has_run(now_us, begun_us, rows, busy_us, batch.is_alone, len(placement))
        placement.free(batch.instance, now_us, busy_us)
        if batch.requests[0].runs_alone:
            placement.free(batch.instance, now_us, 0)
        if busy_us > 0 and isinstance(self._lanes.live, SeriesBatcher):
            self._lanes.has_run(len(batch.requests), busy_us)

    def batches(self, now_us: int) -> tuple[list[Batch], int | None]:
        """All batches that are to be sent now, and when to come back if nothing else happens (None: never)."""
        batches: list[Batch] = []
        lanes = self._lanes
        if lanes.is_live_only:
            ready_us = self._form(lanes.live, now_us, batches)
        else:
            ready_us = self._form_by_lane(now_us, batches)
        if lanes.is_timed:
            # What was put back since `overdue` may be late already: that is seen to next time, which is then at once.
            ready_us = min(ready_us, max(lanes.next_timeout_us, now_us + 1))
        return batches, None if ready_us == NEVER_US else ready_us

    def _form(
        self, batcher: Batcher, now_us: int, batches: list[Batch], lane: int = LIVE, may_stage: bool = True
    ) -> int:
        """Adds batches of one lane, as long as there is room at instances; returns when there may be more."""
        placement = self._placement
        may_stage = may_stage and batcher.rules.may_stage
        series = batcher if isinstance(batcher, SeriesBatcher) and len(batcher) > placement.free_places else None
        while batcher:
            instance = placement.next_slot() if may_stage else placement.next_idle()
            if instance is None:
                break
            # A batch that could still grow is staged only when its instance will be free soon.
            partial_us = placement.stage_partial_at_us(instance) if instance.held else 0
            requests = batcher.next_batch(now_us, full_only=partial_us is None or now_us < partial_us)
            if requests is None:
                return NEVER_US if partial_us is None else max(partial_us, batcher.ready_at_us())
            if requests[0].runs_alone and instance.held:
                batcher.put_back(requests)
                break
            is_series = False
            if series is not None and (more := series.more(requests[0], placement.free_places)):
                requests += more
                is_series = True
            batches.append(self._send(instance, requests, now_us, lane, is_series))
        return NEVER_US

    def _send(
        self, instance: Instance, requests: list[QueuedRequest], now_us: int, lane: int, is_series: bool
    ) -> Batch:
        """The batch of these, which is under way from now on; with what waits in later lanes and may join it."""
        lanes, placement = self._lanes, self._placement
        if requests[0].payload_host and not instance.held:
            instance = placement.idle_near(requests[0].payload_host) or instance
        rows = 0
        if self._leeway is not None:
            # The placement does not see riders: live requests are staged as if there were none.
            rows -= lanes.join(requests, lane, self._leeway)
        batch = Batch(self._draw_id(), self._version, instance, requests)
        batch.has_deadlines = lanes.is_timed
        batch.is_series = is_series
        batch.tells_lanes = lanes.live.has_steps and not lanes.is_live_only
        if lane == BATCH and self._leeway is not None:
            batch.is_alone = True
            self._leeway.alone_began()
        for request in requests:
            request.place = batch.id
            rows += request.batch_size
        placement.occupy(instance, now_us, rows)
        if requests[0].runs_alone:
            placement.occupy(instance, now_us)  # the slot behind it too: who waits there would be lost with it
        self._in_flight.add(batch)
        return batch

    def _form_by_lane(self, now_us: int, batches: list[Batch]) -> int:
        """Adds batches of all lanes: of a later one only what can run while nobody of the ones before it waits."""
        lanes = self._lanes
        if self._leeway is None:
            self._leeway = Leeway(lanes.live_us)
        ready_us = NEVER_US
        if lanes.live:
            lanes.age(now_us)
            ready_us = self._form(lanes.live, now_us, batches)
            if lanes.live:
                return ready_us
        if lanes.event:
            # What is staged would be in the way of a live request that comes next.
            is_live = 0 < lanes.live_us > now_us - STAGES_AFTER_US
            ready_us = min(ready_us, self._form(lanes.event, now_us, batches, EVENT, may_stage=not is_live))
            if lanes.event:
                return ready_us
        if not lanes.batch:
            return ready_us
        # A coordinator only passes on, and what it asks for is of the same lane.
        if lanes.live.has_steps or not self._leeway.is_watched(now_us):
            return min(ready_us, self._form(lanes.batch, now_us, batches, BATCH))
        return min(ready_us, self._form_alone(now_us, batches, self._leeway))

    def _form_alone(self, now_us: int, batches: list[Batch], leeway: Leeway) -> int:
        """Adds batches of jobs as far as no live request need wait for them."""
        jobs, placement = self._lanes.batch, self._placement
        while jobs:
            instance = placement.next_idle()
            if instance is None:
                break
            may_us = leeway.may_run_alone_us(now_us, len(self._placement))
            if may_us > now_us:
                return may_us
            requests = jobs.next_batch(now_us)
            if requests is None:
                return jobs.ready_at_us()
            rows, most_rows = requests[0].batch_size, leeway.alone_rows
            for number, request in enumerate(requests[1:], 1):
                rows += request.batch_size
                if rows > most_rows:
                    jobs.put_back(requests[number:])
                    del requests[number:]
                    break
            batches.append(self._send(instance, requests, now_us, BATCH, is_series=False))
        return NEVER_US
