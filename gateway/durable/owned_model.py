"""`OwnedModel`: the durable lanes of one model at this gateway, which has the model's lease or waits for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from itertools import count

from nats.errors import Error as NatsError

from bus.queue_consumers import QueueConsumers
from gateway.durable.intake_parts import IntakeParts
from gateway.durable.lane_intake import LaneIntake
from runtime.containment import contained
from schemas.lanes import Lane

logger = logging.getLogger("weir.gateway")

RETAKE_PATIENCE_S = 5.0
"""So long what is under way goes on for who has lost the lease: after a restart of the broker he is the next one too."""

_FENCED_PATIENCE_S = 1.2  # a lease that has gone to another is known to be lost by then

LANES = {"event": Lane.EVENT, "batch": Lane.BATCH}

_numbers = count(1)


class OwnedModel:
    """See the module."""

    def __init__(
        self, parts: IntakeParts, consumers: QueueConsumers, model: str, background: asyncio.TaskGroup
    ) -> None:
        self.model = model
        self.lanes: dict[str, LaneIntake] = {}
        self.is_unknown = False
        self.has_lease = False
        self.idle_since_s = 0.0
        self._parts = parts
        self._consumers = consumers
        self._background = background
        self._marks: dict[str, str] = {}  # by lane: what we wrote on the consumer that we took last
        self._due: set[str] = set()  # lanes that are to be taken
        self._fenced_since_s: dict[str, float] = {}
        self._unsubscribe: dict[str, Callable[[], None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._lost_s = 0.0
        self._is_dropped = True
        self.is_stopping = False

    def add_lane(self, lane: str) -> None:
        """Takes care of a lane from now on."""
        if lane in self.lanes:
            return
        self.lanes[lane] = LaneIntake(self._parts, self.model, LANES[lane], self._background)
        if self.has_lease:
            self._take(lane)

    def on_taken(self) -> None:
        """The lease is ours."""
        self.has_lease = True
        self._is_dropped = False
        self._take(*self.lanes)

    def on_lost(self) -> None:
        """The lease is not ours any more, for all that can be known."""
        self.has_lease = False
        self._lost_s = time.monotonic()
        for intake in self.lanes.values():
            intake.pause()

    def take_again(self) -> None:
        """What was asked of the broker may be lost."""
        if self.has_lease:
            self._take(*self.lanes)

    def forget_stream(self) -> None:
        """The stream is gone, and its messages: it is told of none of them any more."""
        self._marks.clear()
        for intake in self.lanes.values():
            intake.acks.clear()
        self.take_again()  # whoever makes the stream anew

    @contained()
    def tick(self, now_s: float) -> None:
        """Looks after what time alone brings."""
        if not self.has_lease and not self._is_dropped and now_s - self._lost_s > RETAKE_PATIENCE_S:
            self._is_dropped = True
            self._marks.clear()
            for intake in self.lanes.values():
                intake.drop()
            self._parts.counters.forget(self.model)
        for lane, intake in self.lanes.items():
            self._tick_lane(lane, intake, now_s)
        if self.has_lease and self._due and self._task is None:
            self._take()

    @contained()
    def _tick_lane(self, lane: str, intake: LaneIntake, now_s: float) -> None:
        intake.tick(now_s)
        if self.has_lease:
            self._parts.counters.set_oldest(self.model, LANES[lane], intake.oldest_ms)
        if self.has_lease and intake.pull.consumer_lost:
            if now_s - self._fenced_since_s.setdefault(lane, now_s) > _FENCED_PATIENCE_S:
                self._take(lane)
        else:
            self._fenced_since_s.pop(lane, None)

    def stop(self) -> None:
        """Nothing more is begun."""
        self.is_stopping = True
        for intake in self.lanes.values():
            intake.runner.is_stopping = True
            intake.pause()

    def close(self) -> None:
        """The model is none of this gateway's any more."""
        self.has_lease = False
        for intake in self.lanes.values():
            intake.drop()
            intake.acks.stop()
        for unsubscribe in self._unsubscribe.values():
            unsubscribe()

    @property
    def running(self) -> int:
        """Requests that are submitted and have no answer."""
        return sum(len(intake.runner) for intake in self.lanes.values())

    def _take(self, *lanes: str) -> None:
        self._due.update(lanes)
        if self._task is None and not self.is_stopping:
            self._task = self._background.create_task(self._take_due())

    async def _take_due(self) -> None:
        try:
            await self._take_all_due()
        except (NatsError, OSError, TimeoutError) as error:
            logger.debug("the durable queue of %s is not taken yet: %s", self.model, error)
        finally:
            self._task = None  # what is still due is tried again at the next tick

    @contained(passes=(NatsError, OSError, TimeoutError))
    async def _take_all_due(self) -> None:
        while self._due and self.has_lease:
            await self._take_lane(next(iter(self._due)))

    async def _take_lane(self, lane: str) -> None:
        intake = self.lanes[lane]
        number = next(_numbers)
        mark = f"{self._parts.gateway_id}:{number}"
        taken = await self._consumers.take(lane, self.model, mark, self.is_unknown)
        is_ours_still = lane in self._marks and self._marks[lane] == taken.previous_owner and not self._is_dropped
        self._marks[lane] = mark
        self._due.discard(lane)
        intake.is_unknown = self.is_unknown
        if self.has_lease and not self.is_stopping:
            self._fenced_since_s.pop(lane, None)
            # What the consumer before has sent may still be on its way, with gaps: it must not be heard.
            if lane in self._unsubscribe:
                self._unsubscribe[lane]()
            inbox = f"{intake.inbox}.{number}"
            self._unsubscribe[lane] = await self._parts.bus.subscribe(inbox, intake.receive)
            intake.begin(taken.begun_sequence, is_ours_still, inbox, taken.group)
