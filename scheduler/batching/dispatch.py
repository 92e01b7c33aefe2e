"""`Dispatch`: decides which batches of a model version are sent now, from the queues of its lanes to its instances.

A *lane* is a class of requests: live requests, durable events, and items of offline jobs (the batch lane). Each has a
queue with the same rules, and its own levels, timeouts and size, so that a full lane rejects only its own requests. Most
versions only ever have live requests; the other queues are created when their first request arrives.

Live requests come first. Events run when no live request waits, and join the batches of live requests. Requests of
the batch lane take what is left: empty places of batches (backfill), and idle instances as far as `BatchLaneBudget`
expects no live request to wait for it.

An event that has waited for `AGED_US` counts as live from then on, so that live traffic beyond the capacity of the
instances does not starve it. A backlog of events is older than all live requests. So events are promoted one batch at
a time, and get at most every other batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from weir.scheduler.batching.batch import Batch
from weir.scheduler.batching.former import Former
from weir.scheduler.batching.lane_budget import BatchLaneBudget
from weir.scheduler.batching.ordered_queue import NEVER_US
from weir.scheduler.batching.request import NO_TERMS, QueuedRequest, total_rows
from weir.scheduler.batching.request_queue import Queue
from weir.scheduler.batching.retry import RetryPolicy
from weir.scheduler.batching.version import UNAVAILABLE_TIMEOUT_US, Version
from weir.scheduler.placement.instances import Instance, Instances
from weir.scheduler.placement.window import SLOTS, Window
from weir.schemas.core.requests import Lane

AGED_US = 1_000_000
"""How long an event waits before it counts as live."""

STAGES_AFTER_US = 1_000_000
"""Events may be staged behind a running batch this long after the last live request."""

LIVE, EVENT, BATCH = (lane.value for lane in Lane)


class Dispatch(Version):
    """The half of `VersionQueue` that sends batches: its lanes, the rule of its batches, its instances.

    `lanes` are the queues: one until a request of another lane has come, then three, and a `BatchLaneBudget`.
    """

    def __init__(
        self,
        version: int,
        former: Former,
        next_batch_id: Callable[[], int] | None = None,
        unavailable_timeout_us: int = UNAVAILABLE_TIMEOUT_US,
        retry: RetryPolicy | None = None,
    ) -> None:
        super().__init__(version, next_batch_id, unavailable_timeout_us, retry)
        self.former = former
        self.lanes = [Queue(former.rules)]
        self.instances = Instances()
        self._window = Window()
        self._live_us = 0  # the arrival of the last live request, 0 without any
        self._budget: BatchLaneBudget | None = None  # exists once there were requests of other lanes
        self._aged: dict[QueuedRequest, None] = {}  # promoted events that wait in the live lane
        self._may_age = True  # a batch without promoted events was sent since the last one with them

    @property
    def is_timed(self) -> bool:
        """Whether requests of any lane may have timeouts or deadlines."""
        return self.lanes[LIVE].is_timed if self._budget is None else any(lane.is_timed for lane in self.lanes)

    @property
    def instance_count(self) -> int:
        """Instances of all live workers."""
        return len(self.instances)

    @property
    def busy_instances(self) -> int:
        """Instances that hold a batch."""
        return len(self.instances) - self.instances.idle

    def workers(self) -> set[str]:
        """Returns the workers that hold an instance."""
        return self.instances.workers()

    def dispatch(self, now_us: int) -> tuple[list[Batch], int | None]:
        """Returns the batches to send now, and when to call again if nothing else happens (None: never)."""
        batches: list[Batch] = []
        lanes, instances, window, is_wide = self.lanes, self.instances, self._window, self.former.runs_singly
        instances.window = window.size(self.cost.us_each, is_wide) if is_wide or window.narrow_left else SLOTS
        opens_us = instances.open_due(now_us) if instances.closed else None
        if self._budget is None:
            ready_us = self._form(lanes[LIVE], now_us, batches)
        else:
            ready_us = self._form_by_lane(now_us, batches, self._budget)
        if opens_us is not None and self.waiting:
            ready_us = min(ready_us, opens_us)
        if lanes[LIVE].is_timed if self._budget is None else self.is_timed:
            # A request put back since `overdue` may be late already: then the next call comes at once and handles it.
            ready_us = min(ready_us, max(min(lane.next_timeout_us for lane in lanes), now_us + 1))
        return batches, None if ready_us == NEVER_US else ready_us

    def _form(self, queue: Queue, now_us: int, batches: list[Batch], lane: int = LIVE, may_stage: bool = True) -> int:
        """Appends batches of one lane while instances have room; returns when there may be more."""
        instances, former = self.instances, self.former
        may_stage = may_stage and queue.rules.may_stage
        while queue:
            instance = instances.next_slot() if may_stage else instances.next_idle()
            if instance is None:
                break
            partial_us: int | None = 0
            if instance.held and former.largest > 1:
                # A batch that could still grow is staged only if its instance will be free soon.
                partial_us = instance.stages_partial_at_us(self.cost.us_per_row)
            requests = former.next(queue, now_us, partial_us is None or now_us < partial_us)
            if requests is None:
                return NEVER_US if partial_us is None else max(partial_us, former.ready_at_us(queue))
            if instance.held and requests[0].runs_alone:
                queue.put_back(requests)
                break
            batches.append(self._send(instance, requests, now_us, lane))
        return NEVER_US

    def _send(self, instance: Instance, requests: list[QueuedRequest], now_us: int, lane: int) -> Batch:
        """Creates a batch of these requests, and of requests of later lanes that may join, and marks it as in flight."""
        budget = self._budget
        if requests[0].payload_host and not instance.held:
            instance = self.instances.idle_near(requests[0].payload_host) or instance
        # Staging does not count backfill: live requests are staged as if there were none.
        rows = 0 if budget is None else -self._add_backfill(requests, lane, budget)
        batch = Batch(self._next_batch_id(), self.version, instance, requests)
        batch.reason = self.former.reason
        if budget is None:
            batch.has_deadlines = self.lanes[LIVE].is_timed
        else:
            batch.has_deadlines = self.is_timed
            batch.has_lanes = self.former.has_steps
            if lane == BATCH:
                batch.is_batch_lane = True
                budget.run_started()
        for request in requests:
            request.place = batch.id
            rows += request.batch_size
        self.instances.occupy(instance, now_us, rows, requests[0].runs_alone)
        self._in_flight.add(batch)
        return batch

    # Several lanes

    def _form_by_lane(self, now_us: int, batches: list[Batch], budget: BatchLaneBudget) -> int:
        """Appends batches of all lanes: of a later lane only while no request of an earlier one waits."""
        live, event, jobs = self.lanes
        ready_us = NEVER_US
        if live:
            self._age(now_us, live, event)
            ready_us = self._form(live, now_us, batches)
            if live:
                return ready_us
        if event:
            # A staged event would delay the next live request.
            is_live = 0 < self._live_us > now_us - STAGES_AFTER_US
            ready_us = min(ready_us, self._form(event, now_us, batches, EVENT, may_stage=not is_live))
            if event:
                return ready_us
        if not jobs:
            return ready_us
        # A coordinator only forwards requests, and those are of the same lane.
        if self.former.has_steps or not budget.has_live_traffic(now_us):
            return min(ready_us, self._form(jobs, now_us, batches, BATCH))
        return min(ready_us, self._form_batch_lane(jobs, now_us, batches, budget))

    def _form_batch_lane(self, jobs: Queue, now_us: int, batches: list[Batch], budget: BatchLaneBudget) -> int:
        """Appends batches of the batch lane as far as no live request is expected to wait for them."""
        instances, former = self.instances, self.former
        while jobs:
            instance = instances.next_idle()
            if instance is None:
                break
            may_us = budget.may_run_at_us(now_us, len(instances))
            if may_us > now_us:
                return may_us
            requests = former.next(jobs, now_us)
            if requests is None:
                return former.ready_at_us(jobs)
            rows, most_rows = requests[0].batch_size, budget.max_run_rows
            for number, request in enumerate(requests[1:], 1):
                rows += request.batch_size
                if rows > most_rows:
                    jobs.put_back(requests[number:])
                    del requests[number:]
                    break
            batches.append(self._send(instance, requests, now_us, BATCH))
        return NEVER_US

    def _age(self, now_us: int, live: Queue, event: Queue) -> None:
        """Promotes events that have waited long enough to the live lane."""
        if self._may_age and not self._aged and event:
            aged = event.take_arrived_by(now_us - AGED_US, self.former.largest)
            for request in aged:
                terms = request.terms._replace(lane=LIVE)
                request.terms = NO_TERMS if terms == NO_TERMS else terms
            self._aged = dict.fromkeys(aged)
            live.put_back(aged)
            # An event whose timeout has passed under DELAY comes last in this queue, too.
            refused = live.overdue(now_us)
            assert not refused  # noqa: S101 - `overdue` comes before each dispatch

    def _add_backfill(self, requests: list[QueuedRequest], lane: int, budget: BatchLaneBudget) -> int:
        """Adds requests of later lanes to `requests`, a batch that was taken from the queue of `lane`.

        Returns the rows that requests of the batch lane have in it (backfill requests).
        """
        _, event, jobs = self.lanes
        join = self.former.take_joinable
        if lane == LIVE:
            self._may_age = not self._forget_aged(requests)
        if lane < EVENT and event:
            requests += join(event, requests, budget.event_rows(total_rows(requests)))
        if lane < BATCH and jobs:
            backfill = join(jobs, requests, budget.backfill_rows(total_rows(requests)))
            requests += backfill
            return total_rows(backfill)
        return 0

    def _forget_aged(self, requests: Iterable[QueuedRequest]) -> bool:
        """Removes requests from the promoted events; returns whether one of them was there."""
        if not self._aged:
            return False
        before = len(self._aged)
        for request in requests:
            self._aged.pop(request, None)
        return len(self._aged) < before

    def _by_lane(self, requests: list[QueuedRequest]) -> list[tuple[int, list[QueuedRequest]]]:
        """Groups requests by their lane, preserving their order; creates the later lanes for the first that needs one."""
        found = {request.terms.lane for request in requests}
        if self._budget is None and found - {LIVE}:
            self._budget = BatchLaneBudget(self._live_us)
            self.lanes += [Queue(self.former.rules), Queue(self.former.rules)]
        if len(found) == 1:
            return [(found.pop(), requests)]
        return [(lane, [r for r in requests if r.terms.lane == lane]) for lane in sorted(found)]
