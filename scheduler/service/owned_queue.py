"""`OwnedQueue`: a queue that this scheduler owns, and what is around its policy: pull, timer, counters, memory limit."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec import Struct
from nats.errors import Error as NatsError

from weir.bus.naming import durable_subjects as subjects
from weir.bus.naming.live_queues import LiveQueue
from weir.bus.nats.connection import Bus
from weir.bus.streams.consumers import leader_of_consumer, redeliver
from weir.bus.streams.declarations import AcquiredQueue, acquire_live_consumer, ensure_live_streams, live_pull_group
from weir.bus.streams.pull import StandingPull
from weir.runtime.containment import contained
from weir.runtime.log_limiter import LogLimiter
from weir.scheduler.model_scheduler import ModelScheduler
from weir.scheduler.sequences.scheduler import SequenceScheduler
from weir.scheduler.service.clock import DeadlineTimer
from weir.scheduler.service.statistics import DispatchCounters, LoadSignals, model_counters
from weir.schemas.wire.batches import NO_REPLY
from weir.schemas.wire.calls import MAX_REASON_LENGTH, LostAttempts

_limited = LogLimiter(logging.getLogger("weir.scheduler"))

MAX_BUFFERED_BYTES = 256 << 20
"""Frames of one queue held in memory. The rest stays in the stream, whose own limits reject publishers."""

MAX_TOTAL_BUFFERED_BYTES = 512 << 20
"""Frames of all queues of a scheduler held in memory."""

MIN_BUFFERED_BYTES = 4 << 20
"""Frames that each queue may always hold, so that it does not starve when others hold too much."""

DRAIN_WAITING_S = 1.0
"""How long the release of a queue waits for pulled requests to run; more may wait than can run in that time."""

DRAIN_BATCHES_S = 5.0
"""How long the release of a queue then waits for running batches."""

ACK_DELAY_S = 0.005
"""How long an acknowledgement waits for others."""

_POLL_S = 0.02


@dataclass(slots=True, eq=False)
class TotalBufferedFrames:
    """The bytes of frames that all queues of a scheduler hold in memory."""

    size_bytes: int = 0


class BufferedFrames:
    """The bytes of frames that one queue holds in memory.

    Once it is full, it stays full until half of the limit is free, so that frames are not pulled one by one.
    """

    __slots__ = ("_all", "_size_bytes", "is_full")

    def __init__(self, of_all: TotalBufferedFrames) -> None:
        self._all = of_all
        self._size_bytes = 0
        self.is_full = False

    def add(self, size_bytes: int) -> bool:
        """Adds a frame; returns True if the queue has become full."""
        self._size_bytes += size_bytes
        self._all.size_bytes += size_bytes
        was_full = self.is_full
        most = MIN_BUFFERED_BYTES if self._all.size_bytes > MAX_TOTAL_BUFFERED_BYTES else MAX_BUFFERED_BYTES
        if self._size_bytes > most:
            self.is_full = True
        return self.is_full and not was_full

    def remove(self, size_bytes: int) -> bool:
        """Removes a frame; returns True if the queue is no longer full."""
        self._size_bytes -= size_bytes
        self._all.size_bytes -= size_bytes
        if not self.is_full:
            return False
        most = MIN_BUFFERED_BYTES if self._all.size_bytes > MAX_TOTAL_BUFFERED_BYTES // 2 else MAX_BUFFERED_BYTES
        self.is_full = self._size_bytes > most // 2
        return not self.is_full

    def clear(self) -> None:
        """Removes all frames: the queue has another owner. Frames that end later have no effect."""
        self._all.size_bytes -= self._size_bytes
        self._all = TotalBufferedFrames()


class AckBundle:
    """Acknowledgements of frames, published together at most every `ACK_DELAY_S`, which costs a fraction of each alone.

    The first after a pause leaves at the end of the turn: nothing could share a later message with it if few requests
    arrive, and the timer would wake the process once more for each of them.

    If this process dies before, the frames are delivered to the next owner of their queue: their requests run again, and
    their callers drop the second response.
    """

    def __init__(self, publish: Callable[[str, bytes], None]) -> None:
        self._publish = publish
        self._loop = asyncio.get_running_loop()
        self._subjects: list[str] = []
        self._flushed_s = float("-inf")

    def add(self, ack_subject: str) -> None:
        """Acknowledges a frame within `ACK_DELAY_S`."""
        if not self._subjects:
            wait_s = self._flushed_s + ACK_DELAY_S - self._loop.time()
            if wait_s > 0:
                self._loop.call_later(wait_s, self.flush)
            else:
                self._loop.call_soon(self.flush)
        self._subjects.append(ack_subject)

    def flush(self) -> None:
        """Acknowledges all frames now."""
        subjects, self._subjects = self._subjects, []
        self._flushed_s = self._loop.time()
        for subject in subjects:
            self._publish(subject, b"+ACK")


class PulledFrame(Struct, eq=False):
    """A frame that was pulled from the stream. It is acknowledged when the last of its requests has ended."""

    _owned: OwnedQueue
    _ack_subject: str
    _size_bytes: int
    _unfinished: int

    def requests_ended(self, requests: int) -> None:
        """Acknowledges the frame after its last request."""
        self._unfinished -= requests
        if self._unfinished == 0:
            self._owned.frame_ended(self._ack_subject, self._size_bytes)


class Intake(NamedTuple):
    """The pull of a queue's frames. `unsubscribe` ends the subscription on which they arrive."""

    pull: StandingPull
    unsubscribe: Callable[[], None]


class QueueContext(NamedTuple):
    """What the queues of a scheduler share.

    A queue calls `wake` with itself when its timer expires, sends messages with `publish`, adds the bytes of its frames to
    `buffered`, and the acknowledgements of those that have ended to `acks`.
    """

    wake: Callable[[OwnedQueue], None]
    publish: Callable[[str, bytes], None]
    buffered: TotalBufferedFrames
    acks: AckBundle


class OwnedQueue:
    """One queue of a model: its policy, its pull, its timer, its counters and its buffered frames.

    `released_versions` holds (worker, version) pairs that workers were allowed to unload. The queue is owned from `epoch`
    on. While it is `stopped`, nothing is sent to workers; `rejected_batches` are the ones that a worker rejected because
    it knows of a later owner.
    """

    def __init__(
        self, queue: LiveQueue, epoch: int, scheduler: ModelScheduler, intake: Intake, context: QueueContext
    ) -> None:
        self.queue = queue
        self.epoch = epoch
        self.stopped = False
        self.rejected_batches: list[int] = []
        self.name = scheduler.name
        self.scheduler = scheduler
        self.pull = intake.pull
        self.released_versions: set[tuple[str, int]] = set()
        self.timer = DeadlineTimer(lambda: context.wake(self))
        self.counters = DispatchCounters()
        self.signals = LoadSignals(scheduler)
        self._publish = context.publish
        self._acks = context.acks
        self._buffered = BufferedFrames(context.buffered)
        self._unsubscribe = intake.unsubscribe
        self._subscriptions: list[Callable[[], None]] = []
        self._closed = False
        self._reacquiring: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._acquired: AcquiredQueue | None = None
        self._connections = 0
        self._group = ""

    # Its consumer

    async def reacquire(self, bus: Bus, with_streams: bool = False) -> None:
        """Recreates the consumer, which the broker has lost, and pulls from it; `with_streams`: the streams too.

        Raises NatsError, OSError, TimeoutError.
        """
        async with self._lock:  # two calls at once would take the consumer from each other
            if with_streams:
                await ensure_live_streams(bus)
            self.set_consumer(await self._recreate_consumer(bus), bus.connections)
            if not self._closed:
                self.pull.start("", live_pull_group(self.epoch), bus.live_layout.stream(self.queue))

    async def _recreate_consumer(self, bus: Bus) -> AcquiredQueue:
        """Returns a consumer that delivers everything unacknowledged: the current one of a cluster, if it is ours."""
        acquired, group = self._acquired, live_pull_group(self.epoch)
        if acquired is not None and acquired.leader and group == self._group:
            leader = await redeliver(bus, bus.live_layout.stream(self.queue), acquired.consumer, group)
            if leader:
                return AcquiredQueue(acquired.consumer, leader)
        return await acquire_live_consumer(bus, self.queue, self.epoch)

    def set_consumer(self, acquired: AcquiredQueue, connections: int) -> None:
        """Records a recreated consumer; `connections` is the bus's number of connections before that."""
        self._acquired, self._connections, self._group = acquired, connections, live_pull_group(self.epoch)

    async def has_received_all(self, bus: Bus) -> bool:
        """Whether no delivery of the consumer was lost, although a server of the NATS cluster has gone.

        That holds if it was neither the server of our connection nor the leader of the consumer.
        """
        acquired = self._acquired
        if acquired is None or not acquired.leader or self._connections != bus.connections or self.has_lost_consumer:
            return False
        return await leader_of_consumer(bus, bus.live_layout.stream(self.queue), acquired.consumer) == acquired.leader

    @property
    def has_lost_consumer(self) -> bool:
        """Whether the consumer is lost, or the server of a cluster that led it."""
        return self.pull.consumer_lost or self.pull.is_silent

    def reacquire_if_lost(self, bus: Bus, background: asyncio.TaskGroup) -> None:
        """Starts a task that reacquires a lost consumer. Called periodically."""
        if self.has_lost_consumer and not self._lock.locked():
            self._reacquiring = background.create_task(self._try_to_reacquire(bus))

    @contained()
    async def _try_to_reacquire(self, bus: Bus) -> None:
        try:
            await self.reacquire(bus, with_streams=True)
        except (NatsError, OSError, TimeoutError) as error:
            _limited.warning(
                "queue not acquired",
                "queue %s: its consumer could not be recreated and will be tried again: %s: %s",
                self.queue,
                type(error).__name__,
                error,
            )

    # Its end

    def add_subscription(self, unsubscribe: Callable[[], None]) -> None:
        """Adds a subscription that `discard` ends."""
        self._subscriptions.append(unsubscribe)

    def close(self) -> None:
        """Pulls no more frames. Requests that were pulled are still served."""
        if self._reacquiring is not None:
            self._reacquiring.cancel()
        self._closed = True
        self.pull.pause()
        # Hundreds of frames that were requested before would otherwise still arrive.
        self._unsubscribe()

    def discard(self) -> None:
        """Ends all activity: the queue has another owner."""
        self._acks.flush()
        self.stopped = True
        self.close()
        self.timer.close()
        self._buffered.clear()
        for unsubscribe in self._subscriptions:
            unsubscribe()
        self._subscriptions.clear()

    # Its requests

    @property
    def _is_stateful(self) -> bool:
        return any(isinstance(version, SequenceScheduler) for version in self.scheduler.versions().values())

    @property
    def has_sequences(self) -> bool:
        """Whether sequences are open here, which would end with this owner."""
        versions = self.scheduler.versions().values()
        return any(isinstance(version, SequenceScheduler) and version.open_sequences for version in versions)

    def frame_received(self, size_bytes: int) -> None:
        """Records a frame in memory, and pauses the pull at the limit."""
        if self._buffered.add(size_bytes):
            self.pull.pause()

    def frame_ended(self, ack_subject: str, size_bytes: int) -> None:
        """Acknowledges a frame, soon or, with sequences, at once; resumes the pull.

        A frame that is delivered again because its acknowledgement was lost would change the state of its sequence again.
        """
        if self._is_stateful:
            self.pull.ack(ack_subject)
        else:
            self._acks.add(ack_subject)
        if self._buffered.remove(size_bytes) and not self._closed:
            self.pull.resume()

    def batch_rejected(self, batch_id: int) -> None:
        """Stops the queue until its owner is known: a worker rejected the batch because of a later owner."""
        self.stopped = True
        self.rejected_batches.append(batch_id)

    def batches_lost(self, batches: int, reason: str) -> None:
        """Counts lost batches, and reports to gateways which of their durable requests the policy repeats."""
        self.counters.retried_batches += batches
        by_gateway: defaultdict[str, list[int]] = defaultdict(list)
        for request in self.scheduler.retry.take_repeated():
            if request.lane and request.gateway != NO_REPLY:
                by_gateway[request.gateway].append(request.key)
        for gateway, keys in by_gateway.items():
            self._publish(subjects.lost_attempts(gateway), LostAttempts(keys, reason[:MAX_REASON_LENGTH]).pack())

    def to_dict(self, now_us: int) -> dict[str, Any]:
        """Returns its counters and load, in the form of `weir.schemas.wire.statistics.QueueCounters`."""
        return {**model_counters(self.scheduler, self.counters, now_us), "load": self.signals.to_dict()}


async def poll_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Returns when `condition` holds or the time is over."""
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:
        await asyncio.sleep(_POLL_S)
