"""`LeasedModel`: the durable lanes of one model in this process, which holds the model's lease or waits for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from itertools import count

from weir.bus.nats.connection import BROKER_ERRORS
from weir.bus.streams.consumers import QueueConsumers
from weir.durable.consumer.context import ConsumerContext
from weir.durable.consumer.lane_consumer import LaneConsumer
from weir.runtime.containment import contained
from weir.schemas.core.requests import Lane

logger = logging.getLogger("weir.gateway")

LEASE_GRACE_S = 15.0
"""How long requests go on after the lease was lost: after a restart of the broker, or an election of its cluster, the same
process gets it again.
"""

_FENCED_GRACE_S = 1.2  # a process whose lease went to another one has noticed it by then

LANES = {"event": Lane.EVENT, "batch": Lane.BATCH}

_numbers = count(1)


class LeasedModel:
    """Starts and stops the lane consumers of a model as its lease is acquired and lost."""

    def __init__(
        self, context: ConsumerContext, consumers: QueueConsumers, model: str, background: asyncio.TaskGroup
    ) -> None:
        self.model = model
        self.lanes: dict[str, LaneConsumer] = {}
        self.is_unknown = False
        self.has_lease = False
        self.idle_since_s = 0.0
        self._context = context
        self._consumers = consumers
        self._background = background
        self._marks: dict[
            str, str
        ] = {}  # by lane: the owner that this process wrote into the consumer it acquired last
        self._due: set[str] = set()  # lanes to be acquired
        self._fenced_since_s: dict[str, float] = {}
        self._unsubscribe: dict[str, Callable[[], None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._lost_s = 0.0
        self._is_dropped = True
        self.is_stopping = False

    def add_lane(self, lane: str) -> None:
        """Adds a lane, and acquires it if the lease is held."""
        if lane in self.lanes:
            return
        self.lanes[lane] = LaneConsumer(self._context, self.model, LANES[lane], self._background)
        if self.has_lease:
            self._acquire(lane)

    def on_acquired(self) -> None:
        """The lease was acquired."""
        self.has_lease = True
        self._is_dropped = False
        self._acquire(*self.lanes)

    def on_lost(self) -> None:
        """The lease was lost, or may be."""
        self.has_lease = False
        self._lost_s = time.monotonic()
        for consumer in self.lanes.values():
            consumer.pause()

    def reacquire(self) -> None:
        """Acquires all lanes again: the broker may have lost what was requested of it."""
        if self.has_lease:
            self._acquire(*self.lanes)

    def on_stream_lost(self) -> None:
        """The stream is lost with its messages: acknowledges none of them any more."""
        self._marks.clear()
        for consumer in self.lanes.values():
            consumer.acks.clear()
        self.reacquire()  # no matter which process recreates the stream

    @contained()
    def tick(self, now_s: float) -> None:
        """Handles what depends on time alone. Called periodically."""
        if not self.has_lease and not self._is_dropped and now_s - self._lost_s > LEASE_GRACE_S:
            self._is_dropped = True
            self._marks.clear()
            for consumer in self.lanes.values():
                consumer.drop()
            self._context.counters.forget(self.model)
        for lane, consumer in self.lanes.items():
            consumer.tick(now_s)
            if self.has_lease:
                self._context.counters.set_oldest(self.model, LANES[lane], consumer.oldest_ms)
            if not self.has_lease or not consumer.pull.consumer_lost:
                self._fenced_since_s.pop(lane, None)
            elif now_s - self._fenced_since_s.setdefault(lane, now_s) > _FENCED_GRACE_S:
                self._acquire(lane)
        if self.has_lease and self._due and self._task is None:
            self._acquire()

    def stop(self) -> None:
        """Starts nothing more."""
        self.is_stopping = True
        for consumer in self.lanes.values():
            consumer.runner.is_stopping = True
            consumer.pause()

    def close(self) -> None:
        """Releases everything: this process no longer handles the model."""
        self.has_lease = False
        for consumer in self.lanes.values():
            consumer.drop()
            consumer.acks.stop()
        for unsubscribe in self._unsubscribe.values():
            unsubscribe()

    @property
    def running(self) -> int:
        """Requests that are submitted and have no response yet."""
        return sum(len(consumer.runner) for consumer in self.lanes.values())

    def _acquire(self, *lanes: str) -> None:
        self._due.update(lanes)
        if self._task is None and not self.is_stopping:
            self._task = self._background.create_task(self._acquire_due())

    @contained()
    async def _acquire_due(self) -> None:
        try:
            while self._due and self.has_lease:
                await self._acquire_lane(next(iter(self._due)))
        except BROKER_ERRORS as error:
            logger.debug("the durable queue of %s can't be acquired yet: %s", self.model, error)
        finally:
            self._task = None  # lanes that are still due are tried again by the next tick

    async def _acquire_lane(self, lane: str) -> None:
        consumer = self.lanes[lane]
        if await self._continue_lane(lane, consumer):
            return
        number = next(_numbers)
        mark = f"{self._context.consumer_id}:{number}"
        taken = await self._consumers.acquire(lane, self.model, mark, self.is_unknown)
        is_continued = lane in self._marks and self._marks[lane] == taken.previous_owner and not self._is_dropped
        self._marks[lane] = mark
        self._due.discard(lane)
        consumer.is_unknown = self.is_unknown
        if self.has_lease and not self.is_stopping:
            self._fenced_since_s.pop(lane, None)
            # Messages of the previous consumer may still arrive, with gaps: they must be ignored.
            if lane in self._unsubscribe:
                self._unsubscribe[lane]()
            inbox = f"{consumer.inbox}.{number}"
            self._unsubscribe[lane] = await self._context.bus.subscribe(inbox, consumer.receive)
            consumer.acquire(taken.started_sequence, is_continued, inbox, taken.group)

    async def _continue_lane(self, lane: str, consumer: LaneConsumer) -> bool:
        """Continues with the consumer that this process acquired last, unless another process has acquired it since.

        Everything unacknowledged is delivered again. In a cluster a new consumer would have to elect a leader first.
        """
        mark = self._marks.get(lane)
        is_ours = mark is not None and lane in self._unsubscribe and not self._is_dropped
        if not is_ours or mark is None or consumer.is_unknown != self.is_unknown or not self._context.bus.is_clustered:
            return False
        consumer.expect_redelivery()
        if not await self._consumers.redeliver(lane, self.model, mark):
            return False
        self._due.discard(lane)
        if self.has_lease and not self.is_stopping:
            self._fenced_since_s.pop(lane, None)
            consumer.resume()
        return True
