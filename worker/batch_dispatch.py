"""`BatchDispatcher`: takes batches from the bus to instances, and what leaves the instances back to the bus.

Runs in the event loop, except where it says otherwise; it never decodes a request. See `weir.worker.execution` for what
happens to a batch between `Batch` and `BatchUpdate`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import ValuesView
from functools import partial

from msgspec.structs import astuple

from weir.bus.links.framing import Outgoing
from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus, Message
from weir.bus.nats.thread_publisher import ThreadPublisher
from weir.bus.payloads.fetcher import PayloadFetcher
from weir.runtime.containment import call_each, contained
from weir.schemas.core.errors import Reason, unavailable
from weir.schemas.wire.batches import (
    NO_REPLY,
    BatchCompletion,
    BatchEnded,
    Batches,
    BatchLost,
    BatchMessage,
    BatchNotRun,
    BatchRefused,
    BatchReleased,
    Completions,
    NotRunReason,
    QueueOwner,
    RunningCancellation,
)
from weir.schemas.wire.calls import SlotRelease, pack_error, pack_responses
from weir.schemas.wire.codec import MalformedMessage
from weir.worker.direct_dispatch import DirectDispatcher
from weir.worker.ensembles.instance import EnsembleInstance
from weir.worker.execution.batch import Batch
from weir.worker.execution.instance import ModelInstance
from weir.worker.execution.remote_payloads import RemotePayloads
from weir.worker.execution.updates import MAX_HELD_S, BatchUpdate
from weir.worker.lifecycle.loader import LoadResult
from weir.worker.lifecycle.served_version import AnyInstance, ServedVersion
from weir.worker.sequence_reports import SequenceRoll

logger = logging.getLogger("weir.worker")

MAX_QUEUES = 65_536
"""Queues whose owners are remembered. Their names come from messages only, so the number has to be bounded."""

MAX_CALLERS = 4096
"""Callers that are remembered as having sent a request."""

MAX_STUCK_S = 0.05
"""For how long no batch of an instance may end until those that have not started are returned."""


class OwnershipFence:
    """Rejects batches of schedulers that have lost the ownership of a queue.

    A scheduler that was suspended may send batches, when it goes on, that the queue's next owner has run or runs. Each
    ownership has an epoch, announced before the first batch of the new owner. `rejected` counts rejected batches.
    """

    def __init__(self) -> None:
        self._owners: dict[tuple[str, int], tuple[int, str]] = {}
        self.rejected = 0
        self.malformed_messages = 0

    async def start(self, bus: Bus) -> None:
        """Subscribes to announcements of new owners."""
        await bus.subscribe(subjects.OWNER_ANNOUNCEMENT, self._on_announcement)

    def newer_epoch(self, batch: BatchMessage) -> int:
        """The epoch of a later owner than the batch's, or of another owner in the same epoch; 0 if there is none."""
        if not batch.epoch:
            return 0
        epoch, owner = self._owners.get((batch.model, batch.partition), (0, ""))
        if epoch < batch.epoch:
            self._note(batch.model, batch.partition, batch.epoch, batch.scheduler)
        elif epoch > batch.epoch or owner != batch.scheduler:
            self.rejected += 1
            logger.warning(
                "model %s: rejected a batch of scheduler %s: another scheduler owns the queue since epoch %d",
                batch.model,
                batch.scheduler,
                epoch,
            )
            return epoch
        return 0

    def _on_announcement(self, message: Message) -> None:
        try:
            model, partition, owner, epoch = astuple(QueueOwner.unpack(message.data))
        except MalformedMessage as error:
            self.malformed_messages += 1
            logger.warning("subject %s: %s", message.subject, error)
            return
        if owner and epoch > self._owners.get((model, partition), (0, ""))[0]:
            self._note(model, partition, epoch, owner)

    def _note(self, model: str, partition: int, epoch: int, owner: str) -> None:
        if len(self._owners) >= MAX_QUEUES and (model, partition) not in self._owners:
            del self._owners[next(iter(self._owners))]
        self._owners[model, partition] = epoch, owner


class BatchDispatcher:
    """The batches of one worker. It is the `ModelHost` of the model life cycle: `models` are the loaded models by identity.

    `fetcher` fetches payloads from other hosts; without one, requests that refer to such payloads fail.
    """

    def __init__(
        self,
        bus: Bus,
        publisher: ThreadPublisher,
        worker_id: str,
        fetcher: PayloadFetcher | None = None,
        direct: DirectDispatcher | None = None,
    ) -> None:
        self.models: dict[str, LoadResult] = {}
        self._bus = bus
        self._worker_id = worker_id
        self._loop = asyncio.get_running_loop()
        self._publisher = publisher
        self._remote = None if fetcher is None else RemotePayloads(fetcher)
        self._fence = OwnershipFence()
        self.sequences = SequenceRoll()
        self._direct = direct or DirectDispatcher(bus, worker_id)
        self._direct.serve(self.models)
        self._arenas: dict[str, AnyInstance] = {}
        # By (scheduler, batch id): added by the event loop, removed by the publishing threads.
        self._held: dict[tuple[str, int], Batch] = {}
        self._watched: set[ModelInstance] = set()  # instances with batches that wait
        self._is_draining = False
        self._idle = asyncio.Event()
        self._malformed_messages = 0
        self._callers: set[str] = set()

    async def start(self) -> None:
        """Subscribes to batches, cancellations and releases of payload slots."""
        await self._fence.start(self._bus)
        await self._bus.subscribe_with_links(subjects.work(self._worker_id), self._on_batches)
        await self._bus.subscribe_with_links(subjects.cancelled(self._worker_id), self._on_cancelled)
        await self._bus.subscribe_with_links(subjects.release(self._worker_id), self._on_release)

    @property
    def malformed_messages(self) -> int:
        """Messages that could not be decoded."""
        return self._malformed_messages + self._fence.malformed_messages

    @property
    def slots_held(self) -> int:
        """Payload slots with outputs that no gateway has released yet."""
        return sum(instance.slots_held for instance in list(self._arenas.values()))

    @property
    def held(self) -> ValuesView[Batch]:
        """The batches that have not ended."""
        return self._held.values()

    def held_ids(self) -> dict[str, list[int]]:
        """The ids of the batches that have not ended, by scheduler."""
        batches: dict[str, list[int]] = defaultdict(list)
        for scheduler, batch_id in list(self._held):
            batches[scheduler].append(batch_id)
        return dict(batches)

    # Models

    def install(self, result: LoadResult) -> None:
        """Implements `ModelHost.install`."""
        self.models[result.name] = result
        self._direct.forget(result.name)
        for served in result.served.values():
            for instance in served.instances:
                self._arenas[instance.arena_name] = instance

    def uninstall(self, name: str) -> None:
        """Implements `ModelHost.uninstall`."""
        self.models.pop(name, None)
        self.sequences.forget(name)
        self._direct.forget(name)

    def unload_version(self, served: ServedVersion) -> bool:
        """Implements `ModelHost.unload_version`."""
        arenas = [instance.arena_name for instance in served.instances]
        is_unloaded = served.unload(wait_for_readers=True)
        for name in arenas:
            self._arenas.pop(name, None)
        return is_unloaded

    # From instances to the bus

    @contained(on_error="_publishing_failed")
    def publish(self, update: BatchUpdate) -> None:
        """Publishes responses and completions of batches; called in any thread."""
        if update.scheduler == self._worker_id:
            self._direct.update(update)
        else:
            self._send(update)

    def _send(self, update: BatchUpdate) -> None:
        """Sends the responses, then the completions: a scheduler forgets the requests when it receives the completion. The
        batches leave the heartbeats after both: a scheduler takes a batch that is in neither for lost.
        """
        responses = [(subjects.reply(gateway), data) for gateway, data in update.responses if gateway != NO_REPLY]
        ends: list[Outgoing] = []
        if update.completions:
            message = Completions(self._worker_id, update.completions)
            ends.append((subjects.done(update.scheduler), message.pack()))
        on_sent = partial(self._on_sent, update)
        if update.first:
            # The broker stores checkpoints in order with the responses, which must not leave before.
            self._publisher.publish([*update.first, *responses, *ends], on_sent)
        else:
            self._publisher.send(responses, ends, on_sent)

    def _publishing_failed(self, _error: Exception, update: BatchUpdate) -> None:
        """Reports the batches as lost, so that the scheduler runs them again. Without any, it tries once more."""
        lost = BatchUpdate(
            update.scheduler,
            [
                each if isinstance(each, BatchReleased) else BatchLost(each.batch_id, getattr(each, "busy_us", 0))
                for each in update.completions
            ],
        )
        if update.scheduler == self._worker_id:
            self._direct.update(lost)
        elif all(isinstance(each, BatchReleased) for each in update.completions):
            self._send(update)
        else:
            self._send(lost)

    def _on_sent(self, update: BatchUpdate) -> None:
        for completion in update.completions:
            if isinstance(completion, BatchReleased):
                continue
            key = update.scheduler, completion.batch_id
            ended = self._held.get(key)
            if ended is not None and ended.sequence_ids:
                self.sequences.ended(ended)  # ahead of its removal, which reports wait for
            self._held.pop(key, None)
        if self._is_draining and not self._held:
            self._loop.call_soon_threadsafe(self._idle.set)

    # From the bus to instances

    def _on_batches(self, message: Message) -> None:
        try:
            batches = Batches.unpack(message.data).batches
        except MalformedMessage as error:
            self._malformed_messages += 1
            logger.warning("dropped a malformed message with batches: %s", error)
            return
        callers = self._callers
        for batch in batches:
            for entry in batch.entries:
                if entry.gateway not in callers:
                    self._note_caller(entry.gateway)
        if len(batches) == 1:
            self._accept(batches[0])
            return
        for batch in batches:
            self._accept(batch, True)
        for instance in dict.fromkeys(map(self._instance_of, batches)):
            if instance is not None:
                instance.flush()

    def _note_caller(self, gateway: str) -> None:
        # It may have opened a link since: all of its responses leave through that, in order.
        self._bus.links.accept_waiting()
        if len(self._callers) >= MAX_CALLERS:
            self._callers.clear()
        self._callers.add(gateway)

    def _instance_of(self, batch: BatchMessage) -> ModelInstance | None:
        result = self.models.get(batch.model)
        served = None if result is None else result.served.get(batch.version)
        instance = None if served is None else served.instance(batch.instance)
        return instance if isinstance(instance, ModelInstance) else None

    @contained(on_error="_dispatch_failed")
    def _accept(self, batch: BatchMessage, more_follow: bool = False, fetched: Batch | None = None) -> None:
        """Submits the batch to its instance. `fetched` is the batch with its remote payloads, if it waited for them."""
        if fetched is None and self._remote is not None and self._remote.needs_fetch(batch):
            self._fetch(self._remote, batch)
            return
        newer_epoch = self._fence.newer_epoch(batch)
        if newer_epoch:
            self._complete(batch.scheduler, BatchRefused(batch.batch_id, newer_epoch))
            return
        if batch.grant is not None:
            self._direct.granted(batch, batch.grant)
        # The scheduler's view of the registry may be older than this worker's state.
        result = self.models.get(batch.model)
        served = None if result is None else result.served.get(batch.version)
        if served is None or not served.instances:
            self._reject(batch)
            return
        instance = served.instance(batch.instance)
        if instance is None and served.is_numbered:
            self._complete(batch.scheduler, BatchLost(batch.batch_id))
            return
        # The model may have been reloaded since the batch was sent: its present configuration counts.
        if instance is None or (len(batch.entries) > 1 and served.runs_alone):
            self._complete(batch.scheduler, BatchNotRun(batch.batch_id, NotRunReason.GONE))
            return
        if isinstance(instance, EnsembleInstance):
            running = self._held[batch.scheduler, batch.batch_id] = fetched or Batch(batch, self._worker_id)
            instance.submit(running)
            return
        reason = served.obstacle(instance)
        if reason is not None:
            self._complete(batch.scheduler, BatchNotRun(batch.batch_id, reason))
            return
        running = self._held[batch.scheduler, batch.batch_id] = fetched or Batch(batch, self._worker_id)
        instance.submit(running, more_follow)
        if instance not in self._watched and instance.needs_watch:
            self._watched.add(instance)
            self._loop.call_later(MAX_HELD_S, self._watch, instance)

    def _fetch(self, remote: RemotePayloads, batch: BatchMessage) -> None:
        """Fetches what lies on other hosts, and then accepts the batch."""
        running = self._held[batch.scheduler, batch.batch_id] = Batch(batch, self._worker_id)
        result = self.models.get(batch.model)
        # An ensemble passes the references of its request on; the workers of its steps fetch the tensors.
        config = None if result is None else result.config
        with_tensors = config is None or config.ensemble_scheduling is None
        remote.fetch(running, with_tensors, partial(self._accept, batch, False, running))

    def _dispatch_failed(self, _error: Exception, batch: BatchMessage, *_: object) -> None:
        """Reports the batch as lost: its scheduler runs it again a limited number of times."""
        self._complete(batch.scheduler, BatchLost(batch.batch_id))

    def _complete(self, scheduler: str, *completions: BatchCompletion) -> None:
        self.publish(BatchUpdate(scheduler, completions))

    def _reject(self, batch: BatchMessage) -> None:
        """Responds to all requests with UNAVAILABLE: the version is not loaded here."""
        error = unavailable(
            f"Request for unknown model: '{batch.model}' version {batch.version} is not at ready state",
            Reason.NOT_READY,
        )
        by_gateway: dict[str, list[tuple[object, ...]]] = defaultdict(list)
        for entry in batch.entries:
            if entry.gateway != NO_REPLY:
                by_gateway[entry.gateway].append(pack_error(entry.key, error))
        responses = [(gateway, pack_responses(0, rows)) for gateway, rows in by_gateway.items()]
        self.publish(BatchUpdate(batch.scheduler, (BatchEnded(batch.batch_id),), responses))

    @contained()
    def _watch(self, instance: ModelInstance) -> None:
        """Publishes what an instance holds, and returns what waits behind a slow batch."""
        self._watched.discard(instance)
        instance.flush_held()
        if instance.stuck_s >= MAX_STUCK_S:
            self._return_waiting(instance, NotRunReason.SLOW)
        if instance.needs_watch:
            self._watched.add(instance)
            self._loop.call_later(MAX_HELD_S, self._watch, instance)

    def model_calls(self, key: str) -> None:
        """Returns what the instance of this key has not started: its process waits for a response of another model."""
        for instance in self._arenas.values():
            if isinstance(instance, ModelInstance) and instance.key == key:
                self._return_waiting(instance, NotRunReason.CALLING)

    def _return_waiting(self, instance: ModelInstance, reason: NotRunReason) -> None:
        """Returns the batches that have not started, if there are more than the one that is staged in any case."""
        if instance.unstarted > 1:
            returned: dict[str, list[BatchCompletion]] = defaultdict(list)
            for running in instance.withdraw():
                returned[running.message.scheduler].append(BatchNotRun(running.message.batch_id, reason))
            for scheduler, completions in returned.items():
                self._complete(scheduler, *completions)

    def _on_cancelled(self, message: Message) -> None:
        try:
            cancelled = RunningCancellation.unpack(message.data)
        except MalformedMessage as error:
            self._malformed_messages += 1
            logger.warning("dropped a malformed cancellation: %s", error)
            return
        held = (
            (self._held.get((cancelled.scheduler, batch_id)), gateway, keys)
            for batch_id, gateway, keys in cancelled.batches
        )
        call_each(
            "weir.worker.batch_dispatch: cancelling requests of a batch",
            [partial(running.cancel, gateway, keys) for running, gateway, keys in held if running is not None],
        )

    def _on_release(self, message: Message) -> None:
        try:
            slots = SlotRelease.unpack(message.data).slots
        except MalformedMessage as error:
            self._malformed_messages += 1
            logger.warning("dropped a malformed release of payload slots: %s", error)
            return
        call_each(
            "weir.worker.batch_dispatch: releasing a payload slot", [partial(self._release, *slot) for slot in slots]
        )

    def _release(self, segment: str, slot: int, generation: int) -> None:
        arena = segment.removeprefix("weir-").rpartition(".")[0]
        instance = self._arenas.get(arena)
        if instance is not None:
            instance.release(segment, slot, generation)

    # Shutdown

    async def drain(self) -> None:
        """Returns when all batches have ended. Batches that arrive in the meantime are run as well."""
        self._is_draining = True
        for instance in list(self._arenas.values()):
            if isinstance(instance, EnsembleInstance):
                # Its steps may need models of this worker, which gets no more batches.
                instance.requeue()
        if self._held:
            await self._idle.wait()
