"""`BatchDispatcher`: takes batches from the bus to instances, and what leaves the instances back to the bus.

Runs in the event loop, except where it says otherwise; it never decodes a request. See `weir.worker.execution` for what
happens to a batch between `RunningBatch` and `BatchUpdate`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, ValuesView
from functools import partial
from itertools import count

from msgspec.structs import astuple, replace

from weir.bus.links.framing import Outgoing
from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus, Message
from weir.bus.nats.thread_publisher import ThreadPublisher
from weir.bus.payloads.fetcher import PayloadFetcher
from weir.runtime.containment import contained
from weir.schemas.core.errors import Reason, unavailable
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.messages import (
    NO_REPLY,
    BatchCompletion,
    BatchMessage,
    BatchOutcome,
    Completions,
    QueueOwner,
    RunningCancellation,
    SlotRelease,
    pack_error,
    pack_responses,
)
from weir.worker.direct_dispatch import DirectDispatcher
from weir.worker.ensembles.instance import EnsembleInstance
from weir.worker.execution.batch_execution import MAX_HELD_S, MAX_STUCK_S, BatchUpdate
from weir.worker.execution.instance import ModelInstance
from weir.worker.execution.microbatch import Microbatch
from weir.worker.execution.remote_payloads import RemotePayloads
from weir.worker.execution.running_batch import RunningBatch
from weir.worker.lifecycle.loader import LoadResult
from weir.worker.lifecycle.served_version import AnyInstance, ServedVersion
from weir.worker.sequence_reports import SequenceRoll

logger = logging.getLogger("weir.worker")

MAX_QUEUES = 65_536
"""Queues whose owners are remembered. Their names come from messages only, so the number has to be bounded."""


MAX_CALLERS = 4096
"""Callers that are remembered as having sent a request."""


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
        self._held: dict[tuple[str, int], RunningBatch | Microbatch] = {}
        self._microbatches: dict[int, Microbatch] = {}  # by the ids of their open parts
        self._part_ids = count(-1, -1)
        self._is_draining = False
        self._idle = asyncio.Event()
        self._malformed_messages = 0
        self._callers: set[str] = set()

    async def start(self) -> None:
        """Subscribes to batches, cancellations and releases of payload slots."""
        await self._fence.start(self._bus)
        await self._bus.subscribe_with_links(subjects.work(self._worker_id), self._on_batch)
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
    def held(self) -> ValuesView[RunningBatch | Microbatch]:
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

    def unload_version(self, served: ServedVersion) -> None:
        """Implements `ModelHost.unload_version`."""
        arenas = [instance.arena_name for instance in served.instances]
        try:
            served.unload(wait_for_readers=True)
        finally:
            for name in arenas:
                self._arenas.pop(name, None)

    # From instances to the bus

    def publish(self, update: BatchUpdate) -> None:
        """Publishes responses and the completion of a batch; called in any thread."""
        self._publish(update)

    @contained(on_error="_publishing_failed")
    def _publish(self, update: BatchUpdate) -> None:
        completion = update.completion
        if update.scheduler == self._worker_id:
            self._direct.update(update)
            return
        if completion is not None and completion.batch_id < 0:
            is_released = completion.outcome == BatchOutcome.RELEASED
            parts, part = self._microbatches, completion.batch_id
            (parts[part] if is_released else parts.pop(part)).part_updated(update)
            return
        self._send(update)

    def _send(self, update: BatchUpdate) -> None:
        """Sends the responses, then the completions: a scheduler forgets the requests when it receives the completion. The
        batch leaves the heartbeats after both: a scheduler takes a batch that is in neither for lost.
        """
        checkpoints: list[Outgoing] = []
        responses: list[Outgoing] = []
        completions: dict[str, list[BatchCompletion]] = {}
        for each in (update, *update.others):
            checkpoints += each.first
            responses += [(subjects.reply(gateway), data) for gateway, data in each.responses if gateway != NO_REPLY]
            if each.completion is not None:
                completions.setdefault(each.scheduler, []).append(each.completion)
        ends = [(subjects.done(id), Completions(self._worker_id, of).pack()) for id, of in completions.items()]
        on_sent = partial(self._on_sent, update)
        if checkpoints:
            # The broker stores them in order with the responses, which must not leave before.
            self._publisher.publish([*checkpoints, *responses, *ends], on_sent)
        else:
            self._publisher.send(responses, ends, on_sent)

    def _publishing_failed(self, _error: Exception, update: BatchUpdate) -> None:
        """Reports the batch as lost, so that the scheduler runs it again. An update of an open batch is tried once more."""
        if update.others:
            for each in (update._replace(others=()), *update.others):
                self._publish(each)
            return
        completion = update.completion
        if update.scheduler == self._worker_id:
            if completion is not None:
                lost = completion._replace(outcome=BatchOutcome.UNANSWERED)
                self._direct.update(BatchUpdate(update.scheduler, lost))
            return
        if completion is None or completion.outcome == BatchOutcome.RELEASED:
            self._send(update)
            return
        lost = BatchCompletion(completion.batch_id, BatchOutcome.UNANSWERED, completion.busy_us)
        if lost.batch_id < 0:
            microbatch = self._microbatches.pop(lost.batch_id, None)
            if microbatch is not None:
                microbatch.part_updated(BatchUpdate(update.scheduler, lost))
        else:
            message = subjects.done(update.scheduler), Completions(self._worker_id, [lost]).pack()
            self._publisher.send((), (message,), partial(self._on_sent, update))

    def _on_sent(self, update: BatchUpdate) -> None:
        for other in update.others:
            self._on_sent(other)
        completion = update.completion
        if completion is None or completion.outcome in (BatchOutcome.RELEASED, BatchOutcome.HANDED_BACK):
            return
        key = update.scheduler, completion.batch_id
        ended = self._held.get(key)
        if isinstance(ended, RunningBatch) and ended.sequence_ids:
            self.sequences.ended(ended)  # ahead of its removal, which reports wait for
        self._held.pop(key, None)
        if self._is_draining and not self._held:
            self._loop.call_soon_threadsafe(self._idle.set)

    def _complete(self, batch: BatchMessage, outcome: BatchOutcome, epoch: int = 0) -> None:
        self.publish(BatchUpdate(batch.scheduler, BatchCompletion(batch.batch_id, outcome, 0, (), epoch)))

    # From the bus to instances

    def _on_batch(self, message: Message) -> None:
        try:
            batch = BatchMessage.unpack(message.data)
        except MalformedMessage as error:
            self._malformed_messages += 1
            logger.warning("dropped a malformed batch message: %s", error)
            return
        for gateway in {entry.gateway for entry in batch.entries} - self._callers:
            # It may have opened a link since: all of its responses leave through that, in order.
            self._bus.links.accept_waiting()
            if len(self._callers) >= MAX_CALLERS:
                self._callers.clear()
            self._callers.add(gateway)
        self._accept(batch)

    @contained(on_error="_dispatch_failed")
    def _accept(self, batch: BatchMessage) -> None:
        if self._remote is None or not self._remote.needs_fetch(batch):
            self._dispatch(batch)
            return
        running = self._held[batch.scheduler, batch.batch_id] = RunningBatch(batch, self._worker_id)
        result = self.models.get(batch.model)
        # An ensemble passes the references of its request on; the workers of its steps fetch the tensors.
        config = None if result is None else result.config
        with_tensors = config is None or config.ensemble_scheduling is None
        self._remote.fetch(running, with_tensors, partial(self._dispatch, batch, running))

    @contained(on_error="_dispatch_failed")
    def _dispatch(self, batch: BatchMessage, fetched: RunningBatch | None = None) -> None:
        """Submits the batch to its instance. `fetched` is the batch with its remote payloads, if it waited for them."""
        newer_epoch = self._fence.newer_epoch(batch)
        if newer_epoch:
            self._complete(batch, BatchOutcome.REFUSED, newer_epoch)
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
        if instance is None:
            self._complete(batch, BatchOutcome.UNANSWERED)
            return
        # The model may have been reloaded since the batch was sent: its present configuration counts.
        if len(batch.entries) > 1 and (batch.is_series or served.runs_alone) and isinstance(instance, ModelInstance):
            if served.model.config.is_decoupled:
                # Streams are identified by scheduler and batch, which parts of a microbatch do not have.
                self._complete(batch, BatchOutcome.NOT_RUN)
            elif instance.runs_microbatches:
                self._submit_whole(batch, instance, fetched)
            else:
                self._submit_microbatch(batch, instance, fetched)
            return
        running = self._held[batch.scheduler, batch.batch_id] = fetched or RunningBatch(batch, self._worker_id)
        instance.submit(running)

    def _dispatch_failed(self, _error: Exception, batch: BatchMessage, _fetched: RunningBatch | None = None) -> None:
        """Reports the batch as lost: its scheduler runs it again a limited number of times."""
        self._complete(batch, BatchOutcome.UNANSWERED)

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
        completion = BatchCompletion(batch.batch_id, BatchOutcome.ANSWERED, 0)
        self.publish(BatchUpdate(batch.scheduler, completion, responses))

    def _submit_microbatch(self, batch: BatchMessage, instance: ModelInstance, fetched: RunningBatch | None) -> None:
        microbatch = Microbatch(batch, instance, self._part_ids, self.publish, fetched, self._worker_id)
        self._held[batch.scheduler, batch.batch_id] = microbatch
        for part in microbatch.parts:
            self._microbatches[part.message.batch_id] = microbatch
        microbatch.submit()
        self._loop.call_later(MAX_HELD_S, self._check_microbatch, microbatch)

    def _submit_whole(self, batch: BatchMessage, instance: ModelInstance, fetched: RunningBatch | None) -> None:
        """Submits a microbatch to an instance that runs its requests from one message."""
        running = fetched or RunningBatch(batch, self._worker_id)
        if not batch.is_series:
            running.message = replace(batch, is_series=True)
        self._held[batch.scheduler, batch.batch_id] = running
        instance.submit(running)
        self._loop.call_later(MAX_STUCK_S, self._requeue_unstarted, running, instance)

    @contained()
    def _requeue_unstarted(self, running: RunningBatch, instance: ModelInstance) -> None:
        """Requeues a microbatch that waits behind a slow batch."""
        batch = running.message
        if (batch.scheduler, batch.batch_id) in self._held and instance.withdraw([running]):
            completion = BatchCompletion(batch.batch_id, BatchOutcome.ANSWERED, 0, list(range(len(batch.entries))))
            self.publish(BatchUpdate(batch.scheduler, completion))

    def _check_microbatch(self, microbatch: Microbatch) -> None:
        if microbatch.is_complete:
            return
        if microbatch.is_stuck:
            self._requeue(microbatch)
        else:
            self._flush(microbatch)
            self._loop.call_later(MAX_HELD_S, self._check_microbatch, microbatch)

    @contained()
    def _flush(self, microbatch: Microbatch) -> None:
        microbatch.flush()

    @contained()
    def _requeue(self, microbatch: Microbatch) -> None:
        for part in microbatch.requeue():
            del self._microbatches[part]

    def requeue_waiting(self, key: str) -> None:
        """Requeues what the instance of this key has not started: its process waits for a response of another model."""
        for held in list(self._held.values()):
            if isinstance(held, Microbatch):
                if held.instance.key == key:
                    self._requeue(held)
            elif held.message.is_series:
                self._requeue_whole(held, key)

    @contained()
    def _requeue_whole(self, running: RunningBatch, key: str) -> None:
        batch = running.message
        served = self.models[batch.model].served.get(batch.version) if batch.model in self.models else None
        instance = None if served is None else served.instance(batch.instance)
        if not isinstance(instance, ModelInstance) or instance.key != key:
            return
        if running.requeue is not None:
            running.requeue()
        else:
            self._requeue_unstarted(running, instance)

    def _on_cancelled(self, message: Message) -> None:
        try:
            cancelled = RunningCancellation.unpack(message.data)
        except MalformedMessage as error:
            self._malformed_messages += 1
            logger.warning("dropped a malformed cancellation: %s", error)
            return
        for batch_id, gateway, keys in cancelled.batches:
            running = self._held.get((cancelled.scheduler, batch_id))
            if running is not None:
                self._cancel(running, gateway, keys)

    @contained()
    def _cancel(self, running: RunningBatch | Microbatch, gateway: str, keys: Iterable[int]) -> None:
        running.cancel(gateway, keys)

    def _on_release(self, message: Message) -> None:
        try:
            for segment, slot, generation in SlotRelease.unpack(message.data).slots:
                self._release(segment, slot, generation)
        except MalformedMessage as error:
            self._malformed_messages += 1
            logger.warning("dropped a malformed release of payload slots: %s", error)

    @contained()
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
