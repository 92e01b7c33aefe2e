"""`OwnedModel`: a model whose queue this scheduler owns, with what the policy itself does not know of: pull and alarm."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Protocol

from nats.errors import Error as NatsError

from bus.connection import Bus
from bus.consumer_renewal import deliver_again, leader_of_consumer
from bus.live_queues import LiveQueue
from bus.pull import FramePull
from bus.streams import TakenQueue, ensure_live_streams, live_pull_group, take_live_consumer
from runtime.containment import contained
from runtime.log_limiter import LogLimiter
from scheduler.alarm import Alarm
from scheduler.counters import DispatchCounters, model_counters
from scheduler.held_frames import HeldFrames
from scheduler.load_signals import LoadSignals
from scheduler.lost_attempts import LostAttempts
from scheduler.model_scheduler import ModelScheduler
from scheduler.sequence_scheduler import SequenceScheduler
from scheduler.version_scheduler import Ended
from schemas.messages import BatchOutcome

_limited = LogLimiter(logging.getLogger("weir.scheduler"))


class NewModel(Protocol):
    """Makes the policy of a queue, of its name and what draws batch ids.

    `is_heir`: somebody owned the queue before, whose sequences have gone with him.
    """

    def __call__(self, queue: LiveQueue, next_batch_id: Callable[[], int], /, *, is_heir: int = 0) -> ModelScheduler:
        """A new one."""


def new_policy(
    queue: LiveQueue, next_batch_id: Callable[[], int], /, *, is_heir: int = 0, **options: int
) -> ModelScheduler:
    """The policy of a queue, not recorded; with these options of `ModelScheduler`."""
    return ModelScheduler(queue.model, next_batch_id, is_heir=is_heir, **options)


class LiveFrame:
    """A frame that was pulled: acknowledged when the last of its requests has ended.

    Where one batch ends it, the worker is asked to acknowledge it together with the answers (`delegate`), which saves
    the broker and this scheduler a message of its own.
    """

    __slots__ = ("_ack_subject", "_delegated_to", "_owned", "_size_bytes", "_unanswered")

    def __init__(self, owned: OwnedModel, ack_subject: str, size_bytes: int, requests: int) -> None:
        self._owned = owned
        self._ack_subject = ack_subject
        self._size_bytes = size_bytes
        self._unanswered = requests
        self._delegated_to = 0

    def delegate(self, batch_id: int, requests: int) -> str | None:
        """The ack subject for the worker that runs `requests` requests of this frame, if no others are left."""
        if requests != self._unanswered:
            return None
        self._delegated_to = batch_id
        return self._ack_subject

    def requests_ended(self, requests: int, batch_id: int) -> None:
        """See `scheduler.queued_request.Frame`."""
        self._unanswered -= requests
        if self._unanswered == 0:
            if batch_id == 0 or batch_id != self._delegated_to:
                self._owned.pull.ack(self._ack_subject)
            self._owned.released(self._size_bytes)


class OwnedModel:
    """One queue of a model: its policy, pull and alarm (which calls `wake` with it), counters, and the frames held for it.

    `unsubscribe` ends the subscription through which the pull's frames come, `publish` sends a message. `let_go` holds
    (worker, version) of what workers were given leave to unload. It is owned from `epoch` on. While it is `stopped`
    nothing is sent to workers; `refused` are the batches that one of them did not take, for it knows of a later owner.
    """

    def __init__(
        self,
        queue: LiveQueue,
        scheduler: ModelScheduler,
        pull: FramePull,
        wake: Callable[[OwnedModel], None],
        unsubscribe: Callable[[], None],
        publish: Callable[[str, bytes], None],
        held: HeldFrames,
        counters: DispatchCounters | None = None,
        epoch: int = 0,
    ) -> None:
        self.epoch = epoch
        self.stopped = False
        self.refused: list[int] = []
        self.queue = queue
        self.name = scheduler.name
        self.scheduler = scheduler
        self.pull = pull
        self.let_go: set[tuple[str, int]] = set()
        self.alarm = Alarm(lambda: wake(self))
        self.counters = counters or DispatchCounters()
        self.signals = LoadSignals(scheduler)
        self._lost_attempts = LostAttempts(scheduler, publish)
        self._unsubscribe = unsubscribe
        self._subscriptions: list[Callable[[], None]] = []
        self._held = held
        self._closed = False
        self._retaking: asyncio.Task[None] | None = None
        self._taking = asyncio.Lock()
        self._taken: TakenQueue | None = None
        self._connections = 0
        self._group = ""

    async def take_again(self, bus: Bus, with_streams: bool = False) -> None:
        """Pulls from a consumer that is made anew: the broker has forgotten it, and perhaps its stream too.

        Raises NatsError, OSError, TimeoutError.
        """
        async with self._taking:  # two at once would take it from each other
            if with_streams:  # somebody may have deleted them
                await ensure_live_streams(bus)
            self.took_consumer(await self._take_anew(bus), bus.connections)
            if not self._closed:
                self.pull.start(live_pull_group(self.epoch), bus.live_layout.stream(self.queue))

    async def _take_anew(self, bus: Bus) -> TakenQueue:
        """The consumer with all that is not acknowledged: the one there is, where it is ours and one of a cluster."""
        taken, group = self._taken, live_pull_group(self.epoch)
        if taken is not None and taken.leader and group == self._group:
            leader = await deliver_again(bus, bus.live_layout.stream(self.queue), taken.consumer, group)
            if leader:
                return TakenQueue(taken.consumer, leader)
        return await take_live_consumer(bus, self.queue, self.epoch)

    def took_consumer(self, taken: TakenQueue, connections: int) -> None:
        """The consumer was made anew; `connections` is how often the bus had been connected by then."""
        self._taken, self._connections, self._group = taken, connections, live_pull_group(self.epoch)

    async def has_heard_all(self, bus: Bus) -> bool:
        """Whether all that was delivered since the consumer was made has come, though a server of the cluster has gone.

        That is so where it was neither the server we are connected to nor the one that leads the consumer.
        """
        taken = self._taken
        if taken is None or not taken.leader or self._connections != bus.connections or self.has_lost_consumer:
            return False
        return await leader_of_consumer(bus, bus.live_layout.stream(self.queue), taken.consumer) == taken.leader

    def also_ends(self, unsubscribe: Callable[[], None]) -> None:
        """A subscription of the queue's, which `forget` ends."""
        self._subscriptions.append(unsubscribe)

    @property
    def has_sequences(self) -> bool:
        """Whether sequences have begun here that have not ended: they end with this owner."""
        versions = self.scheduler.versions().values()
        return any(isinstance(version, SequenceScheduler) and version.open_sequences for version in versions)

    def forget(self) -> None:
        """The queue is another's: nothing of it is done here any more."""
        self.stopped = True
        self.close()
        self.alarm.close()
        self._held.forget()
        for unsubscribe in self._subscriptions:
            unsubscribe()
        self._subscriptions.clear()

    @property
    def has_lost_consumer(self) -> bool:
        """Whether the consumer is lost, or the server of a cluster that led it."""
        return self.pull.consumer_lost or self.pull.is_silent

    def look_after(self, bus: Bus, background: asyncio.TaskGroup) -> None:
        """Pulls again, in a task, where the consumer is lost. Called again and again."""
        if self.has_lost_consumer and not self._taking.locked():
            self._retaking = background.create_task(self._try_again(bus))

    @contained()
    async def _try_again(self, bus: Bus) -> None:
        try:
            await self.take_again(bus, with_streams=True)
        except (NatsError, OSError, TimeoutError) as error:
            # The broker is away: recovery, or the next second, sees to it.
            _limited.warning(
                "queue not taken", "model %s: could not take its queue: %s: %s", self.queue, type(error).__name__, error
            )

    def close(self) -> None:
        """Takes no more frames; what is held is still served."""
        if self._retaking is not None:
            self._retaking.cancel()
        self._closed = True
        self.pull.pause()
        # What was asked for before would go on coming, hundreds of frames, while other models have none any more.
        self._unsubscribe()

    def worker_lost(self, now_us: int, worker: str) -> Ended:
        """As that of the policy; what is done again is counted and told, as by the two that follow."""
        lost = self.scheduler.in_flight_on(worker)
        return self._lose(lost, f"worker {worker} was lost", partial(self.scheduler.worker_lost, now_us, worker))

    def batches_missing(self, now_us: int, batch_ids: Collection[int]) -> Ended:
        """As that of the policy."""
        lose = partial(self.scheduler.batches_missing, now_us, batch_ids)
        return self._lose(batch_ids, "its batch was lost on the way", lose)

    def complete(
        self, now_us: int, batch_id: int, outcome: int, busy_us: int, rescheduled: Sequence[int] = ()
    ) -> Ended:
        """As that of the policy; the batch may be one whose process has died."""
        complete = partial(self.scheduler.complete, now_us, batch_id, outcome, busy_us, rescheduled)
        if outcome != BatchOutcome.UNANSWERED:
            return complete()
        return self._lose((batch_id,), "its process died", complete)

    def refuse(self, batch_id: int) -> None:
        """A worker has refused the batch: nothing is sent until it is known who owns the queue."""
        self.stopped = True
        self.refused.append(batch_id)

    def _lose(self, batch_ids: Collection[int], reason: str, lose: Callable[[], Ended]) -> Ended:
        self.counters.redone_batches += len(batch_ids)
        return self._lost_attempts.told(batch_ids, reason, lose)

    def told(self, now_us: int) -> dict[str, Any]:
        """What it counts, in the form of `QueueCounters`."""
        return {**model_counters(self.scheduler, self.counters, now_us), "load": self.signals.told()}

    def took(self, size_bytes: int) -> None:
        """A frame of this size is in memory now."""
        if self._held.took(size_bytes):
            self.pull.pause()

    def released(self, size_bytes: int) -> None:
        """A frame of this size has gone."""
        if self._held.released(size_bytes) and not self._closed:
            self.pull.resume()
