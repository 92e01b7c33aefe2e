"""The worker's shell: takes batches from the bus to instances and their answers back, and tells the registry the truth.

The event loop does nothing heavy: batches are decoded, run and encoded in the instances' threads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from bus import subjects
from bus.connection import Bus, Message
from bus.payload_fetcher import PayloadFetcher, fetched_bytes
from bus.payload_server import PayloadServer
from bus.registry import HEARTBEAT_INTERVAL_S, RegistryWriter
from bus.reserved_subjects import may_answer
from bus.streams import ensure_streams
from bus.thread_publisher import Outgoing, ThreadPublisher
from runtime.containment import contained
from runtime.health import process_health
from schemas.abandoned import unpack_abandoned
from schemas.errors import Reason, unavailable
from schemas.messages import (
    NOBODY,
    BatchMessage,
    BatchOutcome,
    Done,
    pack_answers,
    pack_done,
    pack_error,
    unpack_batch,
    unpack_release,
)
from schemas.placement import Amounts
from schemas.registry import Heartbeat, ModelRecord, WorkerRecord, pack_record
from schemas.statistics import pack_counters
from schemas.wire import MalformedMessage
from worker.batch_execution import FinishedBatch
from worker.cuda.pinned import PINNED
from worker.device_metrics import DevicePoller
from worker.ensembles.instance import EnsembleInstance
from worker.model_instance import ModelInstance
from worker.model_loader import LoadedResult
from worker.queue_epochs import QueueEpochs
from worker.remote_payloads import RemotePayloads
from worker.running_batch import RunningBatch
from worker.series import MAX_HELD_S, Series
from worker.served_version import AnyInstance, ServedVersion
from worker.worker_load import WorkerLoad

logger = logging.getLogger("weir.worker")

_ACK = b"+ACK"
_DRAIN_SETTLE_S = 0.1


class WorkerService:
    """One worker process: holds models and runs the batches that schedulers send it. It is ModelControl's `Host`.

    `devices` is what it tells of its host, None for nothing; `gpus` are those that clients' memory may lie on.
    `cache_counters` tells what models asked of others and had from a cache, `model_metrics` what they count themselves.
    `capacity` is what it has for models that declare what they need. `fetcher` brings payloads of other hosts; without it
    they are lost. `payload_server` gives readers there those of this process. `control_mode` is its model control mode,
    which it tells all.
    """

    def __init__(
        self,
        bus: Bus,
        publisher: ThreadPublisher,
        worker_id: str,
        devices: DevicePoller | None = None,
        gpus: Sequence[str] = (),
        cache_counters: Callable[[], list[dict[str, Any]]] = list,
        model_metrics: Callable[[], list[dict[str, Any]]] = list,
        capacity: Amounts | None = None,
        fetcher: PayloadFetcher | None = None,
        payload_server: PayloadServer | None = None,
        control_mode: str = "none",
    ) -> None:
        self._model_metrics = model_metrics
        self._cache_counters = cache_counters
        self._devices = devices
        self._born_ns = time.time_ns()
        self._bus = bus
        self.worker_id = worker_id
        room = capacity or Amounts()
        self._about = WorkerRecord(
            worker_id, os.getpid(), gpus=list(gpus), capacity=room, model_control_mode=control_mode
        )
        self._registry = RegistryWriter(bus, worker_id)
        self._loop = asyncio.get_running_loop()
        self.models: dict[str, LoadedResult] = {}
        self._arenas: dict[str, AnyInstance] = {}
        # (scheduler, batch id) of what instances have been given: put in by the loop, taken out by their threads.
        self._held: dict[tuple[str, int], RunningBatch | Series] = {}
        self._series: dict[int, Series] = {}  # by the ids of their parts that have not ended
        self._part_ids = count(-1, -1)
        self._epochs = QueueEpochs()
        self._publisher = publisher
        self._remote = None if fetcher is None else RemotePayloads(fetcher)
        self._fetcher = fetcher
        self._payload_server = payload_server or PayloadServer(bus, worker_id)
        self._load = WorkerLoad()
        self._draining = False
        self._beats: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self.malformed_messages = 0

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Listens for batches, registers, and sends heartbeats in a task of `background`; models are loaded after that."""
        await ensure_streams(self._bus)
        await self._registry.start()
        await self._epochs.start(self._bus)
        await self._bus.subscribe(subjects.work(self.worker_id), self._on_batch)
        await self._bus.subscribe(subjects.abandoned(self.worker_id), self._on_abandoned)
        await self._bus.subscribe(subjects.release(self.worker_id), self._on_release)
        await self._payload_server.start()
        await self._bus.subscribe(subjects.probe(self.worker_id), lambda message: None)
        await self._bus.subscribe(subjects.STATISTICS_QUERY, self._on_statistics_query)
        await self._bus.flush()
        await self.describe()
        self._beats = background.create_task(self._beat())

    async def describe(self, **changes: Any) -> None:
        """Tells the registry of the worker itself; `changes` are fields of `WorkerRecord` that are so from now on."""
        self._about = replace(self._about, written_ns=time.time_ns(), **changes)
        await self._registry.write_worker(self._about)

    async def settle(self) -> None:
        """Tells that every model that should be there at the start is there, or has failed."""
        await self.describe(settled=True)

    def install(self, result: LoadedResult) -> None:
        """See Host."""
        self.models[result.name] = result
        for served in result.served.values():
            for instance in served.instances:
                self._arenas[instance.arena_name] = instance

    def uninstall(self, name: str) -> None:
        """See Host."""
        self.models.pop(name, None)

    def let_go(self, served: ServedVersion) -> None:
        """See Host."""
        arenas = [instance.arena_name for instance in served.instances]
        try:
            served.unload(wait_for_readers=True)
        finally:
            for name in arenas:
                self._arenas.pop(name, None)

    async def write_model(self, record: ModelRecord) -> None:
        """See Host."""
        await self._registry.write_model(record)

    async def remove_model(self, name: str) -> None:
        """See Host."""
        await self._registry.remove_model(name)

    async def stop(self, timeout_s: float) -> None:
        """Takes no new batches, finishes those it has, leaves the registry, and unloads."""
        await self.describe(settled=True, draining=True)
        try:
            async with asyncio.timeout(timeout_s):
                # Batches sent before the schedulers saw the record are on their way: the broker's echo comes after them.
                await self._bus.flush()
                await asyncio.sleep(_DRAIN_SETTLE_S)
                self._draining = True
                self._hand_back()
                if self._held:
                    await self._idle.wait()
        except TimeoutError:
            logger.warning("%d batches are still running at the end of the exit timeout", len(self._held))
        if self._beats is not None:
            self._beats.cancel()
        # What it has counted stays in the sums of those who hear this, before they see it leave.
        self._bus.publish(subjects.LAST_COUNTERS, self._counters())
        await self._bus.flush()
        await self._registry.remove_all()
        await self._bus.flush()
        if not self._held:
            served = [served for result in self.models.values() for served in result.served.values()]
            await asyncio.gather(*(asyncio.to_thread(self._unload, version) for version in served))

    @contained()
    def _unload(self, version: ServedVersion) -> None:
        version.unload()

    def _hand_back(self) -> None:
        """Ensembles can't go on where no batches come any more: their steps may need this worker's own models."""
        for instance in list(self._arenas.values()):
            if isinstance(instance, EnsembleInstance):
                instance.hand_back()

    def finished(self, batch: FinishedBatch) -> None:
        """An instance has ended a batch, or something of it is to leave at once; called in any thread."""
        self._publish(batch)

    @contained(on_error="_publishing_failed")
    def _publish(self, batch: FinishedBatch) -> None:
        if batch.done is not None and batch.done.batch_id < 0:
            is_released = batch.done.outcome == BatchOutcome.RELEASED
            ids, part = self._series, batch.done.batch_id
            (ids[part] if is_released else ids.pop(part)).ended(batch)
            return
        self._publisher.publish(self._messages_of(batch), partial(self._left, batch))

    def _messages_of(self, batch: FinishedBatch) -> list[Outgoing]:
        """The answers come before the end of the batch: a scheduler that hears of the end forgets the requests. And both
        come before the batch leaves the heartbeats: a scheduler takes one that is in neither for lost.
        """
        messages = [*batch.first]
        messages += [(subjects.reply(gateway), answers) for gateway, answers in batch.answers if gateway != NOBODY]
        if batch.done is not None:
            messages.append((subjects.done(batch.scheduler), pack_done(self.worker_id, [batch.done])))
            messages += [(ack, _ACK) for ack in batch.acks]
        return messages

    def _publishing_failed(self, _error: Exception, batch: FinishedBatch) -> None:
        """The scheduler has the batch run again, and answers with an error in the end. What goes on is tried once more."""
        if batch.done is None or batch.done.outcome == BatchOutcome.RELEASED:
            self._publisher.publish(self._messages_of(batch), partial(self._left, batch))
            return
        done = Done(batch.done.batch_id, BatchOutcome.UNANSWERED, batch.done.busy_us)
        if done.batch_id < 0:
            series = self._series.pop(done.batch_id, None)
            if series is not None:
                series.ended(FinishedBatch(batch.scheduler, done, []))
        else:
            message = subjects.done(batch.scheduler), pack_done(self.worker_id, [done])
            self._publisher.publish([message], partial(self._left, batch))

    def _left(self, batch: FinishedBatch) -> None:
        """What there was to say of the batch has been sent."""
        if batch.done is None or batch.done.outcome in (BatchOutcome.RELEASED, BatchOutcome.HANDED_BACK):
            return
        self._held.pop((batch.scheduler, batch.done.batch_id), None)
        if self._draining and not self._held:
            self._loop.call_soon_threadsafe(self._idle.set)

    def device_lost(self, reason: str, batch: FinishedBatch | None) -> None:
        """Nothing runs on this process's GPUs any more, which is about to end; `batch` is the one lost. For any thread.

        What was to be said is on its way when this returns.
        """
        logger.error("this worker ends, for another to take its place: %s", reason)
        # Schedulers see that nothing is to be sent here before they hear of the batch, which would come back otherwise.
        record = replace(self._about, settled=True, draining=True, written_ns=time.time_ns())
        self._publisher.publish([(subjects.registry_subject(self.worker_id), pack_record(record))])
        if batch is not None:
            self.finished(batch)

    def _on_batch(self, message: Message) -> None:
        try:
            batch = unpack_batch(message.data)
        except MalformedMessage as error:
            self.malformed_messages += 1
            logger.warning("dropped a message that is no batch: %s", error)
            return
        self._accept(batch)

    @contained(on_error="_running_failed")
    def _accept(self, batch: BatchMessage) -> None:
        if self._remote is None or not self._remote.hold_up(batch):
            self._run(batch)
            return
        running = self._held[batch.scheduler, batch.batch_id] = RunningBatch(batch)
        result = self.models.get(batch.model)
        # A coordinator passes on what its request refers to, for whoever runs a step to fetch.
        config = None if result is None else result.config
        with_tensors = config is None or config.ensemble_scheduling is None
        self._remote.bring(running, with_tensors, partial(self._run, batch, running))

    @contained(on_error="_running_failed")
    def _run(self, batch: BatchMessage, brought: RunningBatch | None = None) -> None:
        """Hands the batch to its instance; `brought` is it, with what it needs from other hosts, where it has waited."""
        later = self._epochs.later_than(batch)
        if later:
            self.finished(FinishedBatch(batch.scheduler, Done(batch.batch_id, BatchOutcome.REFUSED, later), []))
            return
        # The scheduler's picture may be older than the registry.
        result = self.models.get(batch.model)
        served = None if result is None else result.served.get(batch.version)
        if served is None or not served.instances:
            self._refuse(batch)
            return
        instance = served.instance(batch.instance)
        if instance is None:
            self.finished(FinishedBatch(batch.scheduler, Done(batch.batch_id, BatchOutcome.UNANSWERED, 0), []))
            return
        # What was sent while the model had another configuration runs by the one it has.
        if len(batch.entries) > 1 and (batch.is_series or served.runs_alone) and isinstance(instance, ModelInstance):
            self._submit_series(batch, instance, served.model.config.is_decoupled, brought)
            return
        running = self._held[batch.scheduler, batch.batch_id] = brought or RunningBatch(batch)
        instance.submit(running)

    def _running_failed(self, _error: Exception, batch: BatchMessage, _brought: RunningBatch | None = None) -> None:
        """The batch can't be handed to its instance: its scheduler has it run again, for a limited number of times."""
        self.finished(FinishedBatch(batch.scheduler, Done(batch.batch_id, BatchOutcome.UNANSWERED, 0), []))

    def _submit_series(
        self, batch: BatchMessage, instance: ModelInstance, is_decoupled: bool, brought: RunningBatch | None
    ) -> None:
        if is_decoupled:
            # Streams are told apart by their batches, which parts have none of: its scheduler sends them one by one.
            self.finished(FinishedBatch(batch.scheduler, Done(batch.batch_id, BatchOutcome.NOT_RUN, 0), []))
            return
        series = Series(batch, instance, self._part_ids, self.finished, brought)
        self._held[batch.scheduler, batch.batch_id] = series
        for part in series.parts:
            self._series[part.message.batch_id] = series
        series.submit()
        self._loop.call_later(MAX_HELD_S, self._look_after, series)

    def _look_after(self, series: Series) -> None:
        if series.is_over:
            return
        if series.is_stuck:
            self._make_haste(series)
        else:
            self._flush(series)
            self._loop.call_later(MAX_HELD_S, self._look_after, series)

    @contained()
    def _flush(self, series: Series) -> None:
        series.flush()

    @contained()
    def _make_haste(self, series: Series) -> None:
        for part in series.make_haste():
            del self._series[part]

    def asks(self, key: str) -> None:
        """The process of the instance of this key waits for other models. In the event loop."""
        for held in list(self._held.values()):
            if isinstance(held, Series) and held.instance.key == key:
                self._make_haste(held)

    def _refuse(self, batch: BatchMessage) -> None:
        by_gateway: dict[str, list[tuple[object, ...]]] = defaultdict(list)
        error = unavailable(
            f"Request for unknown model: '{batch.model}' version {batch.version} is not at ready state",
            Reason.NOT_READY,
        )
        for entry in batch.entries:
            if entry.gateway != NOBODY:
                by_gateway[entry.gateway].append(pack_error(entry.key, error))
        answers = [(gateway, pack_answers(0, rows)) for gateway, rows in by_gateway.items()]
        self.finished(
            FinishedBatch(batch.scheduler, Done(batch.batch_id, BatchOutcome.ANSWERED, 0), answers, batch.acks)
        )

    def _on_abandoned(self, message: Message) -> None:
        try:
            scheduler, batches = unpack_abandoned(message.data)
        except MalformedMessage as error:
            self.malformed_messages += 1
            logger.warning("dropped a message that abandons nothing: %s", error)
            return
        for batch_id, gateway, keys in batches:
            running = self._held.get((scheduler, batch_id))
            if running is not None:
                self._cancel(running, gateway, keys)

    @contained()
    def _cancel(self, running: RunningBatch | Series, gateway: str, keys: Iterable[int]) -> None:
        running.cancel(gateway, keys)

    def _on_release(self, message: Message) -> None:
        try:
            for segment, slot, generation in unpack_release(message.data):
                self._release(segment, slot, generation)
        except MalformedMessage as error:
            self.malformed_messages += 1
            logger.warning("dropped a message that releases nothing: %s", error)

    @contained()
    def _release(self, segment: str, slot: int, generation: int) -> None:
        arena = segment.removeprefix("weir-").rpartition(".")[0]
        instance = self._arenas.get(arena)
        if instance is not None:
            instance.release(segment, slot, generation)

    @contained()
    def _on_statistics_query(self, message: Message) -> None:
        if may_answer(message, subjects.counters("")):
            self._bus.publish(message.reply, self._counters())

    def _counters(self) -> bytes:
        devices = self._devices
        return pack_counters(
            {
                "worker": self.worker_id,
                "born_ns": self._born_ns,
                "models": [*self.statistics(), *self._cache_counters()],
                "malformed_messages": self.malformed_messages
                + self._epochs.malformed_messages
                + self._payload_server.malformed_messages,
                "payload_bytes": fetched_bytes(self._fetcher),
                "payload_readers_refused": self._payload_server.refused_readers,
                "payload_slots": sum(instance.slots_held for instance in list(self._arenas.values())),
                "host": None if devices is None else devices.host,
                "gpus": {} if devices is None else devices.gpus,
                "pinned_total_bytes": PINNED.total_bytes if PINNED.is_available else 0,
                "pinned_used_bytes": PINNED.used_bytes,
                "families": self._model_metrics(),
                "load": self._load.told(self.models, self._held.values()),
                "process": None if devices is None else devices.process,
                "health": process_health(),
            }
        )

    def statistics(self) -> list[dict[str, object]]:
        """Counters of every loaded version."""
        counted = (
            self._counted(name, number, served)
            for name, result in self.models.items()
            for number, served in result.served.items()
        )
        return [counters for counters in counted if counters is not None]

    @contained()
    def _counted(self, name: str, number: int, served: ServedVersion) -> dict[str, object] | None:
        return {"model": name, "version": number, **served.statistics.snapshot()}

    async def _beat(self) -> None:
        while True:
            self._send_heartbeat()
            self._measure_load()
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    @contained()
    def _send_heartbeat(self) -> None:
        batches: dict[str, list[int]] = defaultdict(list)
        for scheduler, batch_id in list(self._held):
            batches[scheduler].append(batch_id)
        self._registry.beat(Heartbeat(self.worker_id, dict(batches)))

    @contained()
    def _measure_load(self) -> None:
        self._load.look(time.monotonic_ns() // 1000, self.models, self._held.values())
