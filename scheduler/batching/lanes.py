"""`LaneQueues`: the queues of one model version, one for each `Lane`.

A *lane* is a class of requests: live requests, durable events, and items of offline jobs (the batch lane). Each lane
has a batcher with the same rules, and its own levels, timeouts and size, so that a full lane rejects only its own
requests. Most versions only ever have live requests; the other queues are created when their first request arrives.

An event that has waited for `AGED_US` counts as live from then on, so that live traffic beyond the capacity of the
instances does not starve it. A backlog of events is older than all live requests. So events are promoted one batch at
a time, and get at most every other batch.
"""

from __future__ import annotations

from collections.abc import Iterable

from weir.scheduler.batching.batcher import Batcher
from weir.scheduler.batching.lane_budget import BatchLaneBudget
from weir.scheduler.batching.request import NO_TERMS, QueuedRequest, total_rows
from weir.schemas.core.requests import Lane

AGED_US = 1_000_000
"""How long an event waits before it counts as live."""

LIVE, EVENT, BATCH = (lane.value for lane in Lane)


class LaneQueues:
    """The lanes of one version; `live` is the batcher of live requests. Times are microseconds of the policy clock.

    `live_us` is the arrival of the last live request, 0 without any. `is_live_only`: no other request has ever
    arrived.
    """

    def __init__(self, live: Batcher) -> None:
        self.live = live
        self.is_live_only = True
        self._lanes: list[Batcher] = [live]
        self._aged: dict[QueuedRequest, None] = {}  # promoted events that wait in the live lane
        self._may_age = True  # a batch without promoted events was sent since the last one with them
        self.live_us = 0

    def __len__(self) -> int:
        """Requests waiting, in all lanes."""
        return len(self.live) if self.is_live_only else sum(map(len, self._lanes))

    @property
    def forming(self) -> int:
        """Requests that were taken off the queues of all lanes for the next batches. They still wait."""
        return sum(lane.forming for lane in self._lanes)

    @property
    def event(self) -> Batcher:
        """The batcher of events; it exists unless `is_live_only`."""
        return self._lanes[EVENT]

    @property
    def batch(self) -> Batcher:
        """The batcher of the batch lane; it exists unless `is_live_only`."""
        return self._lanes[BATCH]

    @property
    def is_timed(self) -> bool:
        """Whether requests of any lane may have timeouts or deadlines."""
        return self.live.is_timed if self.is_live_only else any(lane.is_timed for lane in self._lanes)

    def waiting_in(self, lane: int) -> int:
        """Returns the number of requests waiting in one lane."""
        return len(self._lanes[lane]) if lane < len(self._lanes) else 0

    def use(self, live: Batcher) -> None:
        """Forms batches by the rules of `live` from now on, which takes over the live queue."""
        waiting = self.drain()
        self.live = live
        self._lanes = [live]
        self.is_live_only = True
        self.put_back(waiting)

    def enqueue(self, requests: list[QueuedRequest]) -> list[QueuedRequest]:
        """Adds requests as long as their lanes have room; returns those without room."""
        for request in requests:
            if request.terms is not NO_TERMS and request.terms.lane:
                break
        else:
            self.live_us = requests[0].enqueued_us
            return self.live.enqueue(requests)
        refused: list[QueuedRequest] = []
        for batcher, of_lane in self._by_lane(requests):
            if batcher is self.live:
                self.live_us = of_lane[0].enqueued_us
            refused += batcher.enqueue(of_lane)
        return refused

    def put_back(self, requests: Iterable[QueuedRequest]) -> None:
        """Adds requests that were in a queue before, each at its original position in its lane."""
        for batcher, of_lane in self._by_lane(list(requests)):
            batcher.put_back(of_lane)

    def drop_cancelled(self, requests: Iterable[QueuedRequest]) -> None:
        """Removes these waiting requests, which were cancelled."""
        requests = list(requests)
        self._forget_aged(requests)
        for batcher, of_lane in self._by_lane(requests):
            batcher.drop_cancelled(of_lane)

    def drain(self) -> list[QueuedRequest]:
        """Empties the queues and returns all requests, lane by lane."""
        self._aged.clear()
        return [request for lane in self._lanes for request in lane.drain()]

    def take_arrived_by(self, arrived_by_us: int) -> list[QueuedRequest]:
        """Takes out all requests that arrived by `arrived_by_us`."""
        if arrived_by_us < 0:
            return []
        taken = [request for lane in self._lanes for request in lane.take_arrived_by(arrived_by_us)]
        self._forget_aged(taken)
        return taken

    def overdue(self, now_us: int) -> list[QueuedRequest]:
        """Takes out the requests whose timeout or deadline has passed."""
        overdue = [request for lane in self._lanes for request in lane.overdue(now_us)]
        self._forget_aged(overdue)
        return overdue

    @property
    def next_timeout_us(self) -> int:
        """When `overdue` will have work if nothing else happens."""
        return min(lane.next_timeout_us for lane in self._lanes)

    def age(self, now_us: int) -> None:
        """Promotes events that have waited long enough to the live lane. Call `overdue` first."""
        if self._may_age and not self._aged and self.event and self.live:
            aged = self.event.take_aged(now_us - AGED_US, self.live.largest)
            for request in aged:
                terms = request.terms._replace(lane=LIVE)
                request.terms = NO_TERMS if terms == NO_TERMS else terms
            self._aged = dict.fromkeys(aged)
            self.live.put_back(aged)
            # An event whose timeout has passed under DELAY comes last in this queue, too.
            refused = self.live.overdue(now_us)
            assert not refused  # noqa: S101 - `overdue` comes before each dispatch

    def add_backfill(self, requests: list[QueuedRequest], lane: int, budget: BatchLaneBudget) -> int:
        """Adds requests of later lanes to `requests`, a batch that was taken from the queue of `lane`.

        Returns the rows that requests of the batch lane have in it (backfill requests).
        """
        if lane == LIVE:
            self._may_age = not self._forget_aged(requests)
        if lane < EVENT and self.waiting_in(EVENT):
            requests += self.event.take_joinable(requests, budget.event_rows(total_rows(requests)))
        if lane < BATCH and self.waiting_in(BATCH):
            backfill = self.batch.take_joinable(requests, budget.backfill_rows(total_rows(requests)))
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

    def _by_lane(self, requests: list[QueuedRequest]) -> Iterable[tuple[Batcher, list[QueuedRequest]]]:
        """Groups requests by the batcher of their lane, preserving their order."""
        lanes = {request.terms.lane for request in requests}
        if self.is_live_only and lanes - {LIVE}:
            self.is_live_only = False
            self._lanes += [self.live.another(), self.live.another()]
        if len(lanes) == 1:
            return [(self._lanes[lanes.pop()], requests)]
        return [(self._lanes[lane], [r for r in requests if r.terms.lane == lane]) for lane in sorted(lanes)]
