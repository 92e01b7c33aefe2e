"""`LaneQueues`: the queues of one model version, one for each lane (`schemas.lanes.Lane`).

Each lane has a batcher by the same rules: its own levels, timeouts and largest size, so that a lane that is full refuses
nobody of another. Most versions only ever have live requests; the other queues are made when the first one comes that is
not live.

An event that has waited for `AGED_US` counts as live from then on, in all respects, so that live traffic beyond what
instances can carry does not starve it. A backlog of events is old as a whole, and older than all live requests: so those
that count as live come to one batch at a time, and at most every other batch is theirs.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.batcher import Batcher
from scheduler.leeway import Leeway
from scheduler.queued_request import NO_TERMS, QueuedRequest, rows_of
from scheduler.series import SeriesBatcher
from schemas.lanes import Lane

AGED_US = 1_000_000
"""How long an event waits before it counts as live."""

LIVE, EVENT, BATCH = (lane.value for lane in Lane)


class LaneQueues:
    """See the module; `live` is the batcher of live requests. Times are microseconds of the policy clock.

    `live_us` is when a live request came last, 0 if none has. `is_live_only`: no other has ever come.
    """

    def __init__(self, live: Batcher) -> None:
        self.live = live
        self.is_live_only = True
        self._lanes: list[Batcher] = [live]
        self._aged: dict[QueuedRequest, None] = {}  # events that count as live, and wait
        self._is_their_turn = True  # a batch of others has gone since the last of those did
        self.live_us = 0

    def __len__(self) -> int:
        """Requests waiting, in all lanes."""
        return len(self.live) if self.is_live_only else sum(map(len, self._lanes))

    @property
    def event(self) -> Batcher:
        """Of events; there is none while `is_live_only`."""
        return self._lanes[EVENT]

    @property
    def batch(self) -> Batcher:
        """Of offline jobs; there is none while `is_live_only`."""
        return self._lanes[BATCH]

    @property
    def is_timed(self) -> bool:
        """See `Batcher`: of any lane."""
        return self.live.is_timed if self.is_live_only else any(lane.is_timed for lane in self._lanes)

    def waiting_in(self, lane: int) -> int:
        """Requests waiting in one lane."""
        return len(self._lanes[lane]) if lane < len(self._lanes) else 0

    def use(self, live: Batcher) -> None:
        """From now on batches are formed by the rules of `live`, which takes over the live queue."""
        waiting = self.drain()
        self.live = live
        self._lanes = [live]
        self.is_live_only = True
        self.put_back(waiting)

    def enqueue(self, requests: list[QueuedRequest]) -> list[QueuedRequest]:
        """Takes requests in, as many as there is room for in their lanes; returns the others."""
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
        """Takes requests in again that were in a queue before, each at the place it had in its lane."""
        for batcher, of_lane in self._by_lane(list(requests)):
            batcher.put_back(of_lane)

    def drop_cancelled(self, requests: Iterable[QueuedRequest]) -> None:
        """Forgets these requests, which wait here and were cancelled."""
        requests = list(requests)
        self._are_young(requests)
        for batcher, of_lane in self._by_lane(requests):
            batcher.drop_cancelled(of_lane)

    def drain(self) -> list[QueuedRequest]:
        """Empties the queues: all requests, lane by lane."""
        self._aged.clear()
        return [request for lane in self._lanes for request in lane.drain()]

    def came_by(self, came_by_us: int) -> list[QueuedRequest]:
        """Takes out all requests that came by then."""
        if came_by_us < 0:
            return []
        taken = [request for lane in self._lanes for request in lane.came_by(came_by_us)]
        self._are_young(taken)
        return taken

    def overdue(self, now_us: int) -> list[QueuedRequest]:
        """Takes out the requests that have waited for longer than they may, or than anybody waits for them."""
        overdue = [request for lane in self._lanes for request in lane.overdue(now_us)]
        self._are_young(overdue)
        return overdue

    @property
    def next_timeout_us(self) -> int:
        """When `overdue` will have something to do, if nothing else happens."""
        return min(lane.next_timeout_us for lane in self._lanes)

    def age(self, now_us: int) -> None:
        """Events that have waited for long enough, and come up behind live requests, count as live from now on.

        What is `overdue` by now was taken out before.
        """
        if self._is_their_turn and not self._aged and self.event and self.live:
            aged = self.event.long_waiting(now_us - AGED_US, self.live.largest)
            for request in aged:
                terms = request.terms._replace(lane=LIVE)
                request.terms = NO_TERMS if terms == NO_TERMS else terms
            self._aged = dict.fromkeys(aged)
            self.live.put_back(aged)
            # One whose timeout has passed under DELAY stands behind the others here, too.
            refused = self.live.overdue(now_us)
            assert not refused  # noqa: S101 - `overdue` comes before each dispatch

    def join(self, requests: list[QueuedRequest], lane: int, leeway: Leeway) -> int:
        """What waits in later lanes joins a batch of these, which was taken from the queue of this one.

        Returns the rows that a job has in it then, as a rider.
        """
        if lane == LIVE:
            self._is_their_turn = not self._are_young(requests)
        if lane < EVENT and self.waiting_in(EVENT):
            requests += self.event.companions(requests, leeway.events(rows_of(requests)))
        if lane < BATCH and self.waiting_in(BATCH):
            riders = self.batch.companions(requests, leeway.riders(rows_of(requests)))
            requests += riders
            return rows_of(riders)
        return 0

    def has_run(self, requests: int, busy_us: int) -> None:
        """See `SeriesBatcher`: what one lane tells of the model is true for all."""
        for lane in self._lanes:
            if isinstance(lane, SeriesBatcher):
                lane.has_run(requests, busy_us)

    def doubt(self) -> None:
        """See `SeriesBatcher`."""
        for lane in self._lanes:
            if isinstance(lane, SeriesBatcher):
                lane.doubt()

    def _are_young(self, requests: Iterable[QueuedRequest]) -> bool:
        """These wait no more; whether one of them was an event."""
        if not self._aged:
            return False
        known = len(self._aged)
        for request in requests:
            self._aged.pop(request, None)
        return len(self._aged) < known

    def _by_lane(self, requests: list[QueuedRequest]) -> Iterable[tuple[Batcher, list[QueuedRequest]]]:
        """Requests, in the order they are in, with the batcher of their lane."""
        lanes = {request.terms.lane for request in requests}
        if self.is_live_only and lanes - {LIVE}:
            self.is_live_only = False
            self._lanes += [self.live.another(), self.live.another()]
        if len(lanes) == 1:
            return [(self._lanes[lanes.pop()], requests)]
        return [(self._lanes[lane], [r for r in requests if r.terms.lane == lane]) for lane in sorted(lanes)]
