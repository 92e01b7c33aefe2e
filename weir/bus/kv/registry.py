"""The registry: the live workers, and the models that each of them serves.

Workers write bucket `registry` (one key for each worker, one for each of its models) with a `RegistryWriter`, and send
heartbeats. Gateways and schedulers follow it with a `RegistryView`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from weir.bus.kv.view import KvBucket, KvView
from weir.bus.links.link import LinkEnd
from weir.bus.naming import subjects
from weir.bus.naming.identity import shares_memory
from weir.bus.nats.connection import BROKER_ERRORS, Bus, Message
from weir.runtime.containment import call_each, contained, report
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.registry import Heartbeat, ModelRecord, WorkerRecord

logger = logging.getLogger("weir.bus")

HEARTBEAT_INTERVAL_S = 1.0
SILENCE_LIMIT_S = 5.0
"""A worker without a heartbeat for this long is considered dead."""

_RETRY_S = 0.2


class RegistryWriter:
    """Writes the records of one worker, and writes them again after each reconnection and removal by others."""

    def __init__(self, bus: Bus, worker: str) -> None:
        self._bus = bus
        self._bucket = KvBucket(bus, subjects.REGISTRY_BUCKET)
        self._worker = worker
        self._records: dict[str, bytes] = {}
        self._is_removed = False
        self._rewriting: asyncio.Task[None] | None = None
        bus.on_reconnect(self._write_all)

    async def start(self) -> None:
        """Watches the worker's keys, and writes them again if another process removes them."""
        await self._bus.subscribe(subjects.registry_subject(f"{self._worker}"), self._on_write)
        await self._bus.subscribe(subjects.registry_subject(f"{self._worker}.*"), self._on_write)

    async def write_worker(self, record: WorkerRecord) -> None:
        """Writes the record of the worker."""
        await self._write(subjects.registry_key(self._worker), record)

    async def write_model(self, record: ModelRecord) -> None:
        """Writes the record of one model on this worker."""
        await self._write(subjects.registry_key(self._worker, record.name), record)

    async def remove_model(self, name: str) -> None:
        """Removes the record of one model."""
        key = subjects.registry_key(self._worker, name)
        if self._records.pop(key, None) is not None:
            await self._bucket.delete(key)

    async def remove_all(self) -> None:
        """Removes the records of the worker and of its models."""
        keys, self._records = list(self._records), {}
        for key in keys:
            await self._bucket.delete(key)

    def beat(self, heartbeat: Heartbeat) -> None:
        """Sends a heartbeat."""
        self._bus.publish(subjects.heartbeat(self._worker), heartbeat.pack())

    def _on_write(self, message: Message) -> None:
        key = message.subject.removeprefix(subjects.registry_subject(""))
        if message.data or key not in self._records:
            return
        # Several processes may remove keys, one at a time, and also after they were written again.
        self._is_removed = True
        if self._rewriting is None or self._rewriting.done():
            logger.warning(
                "another process removed this worker's registration (it received no heartbeat): registering again"
            )
            self._rewriting = asyncio.get_running_loop().create_task(self._register_again())

    async def _register_again(self) -> None:
        # The broker may not respond for a while. Until the worker is registered it gets no requests.
        while self._is_removed:
            self._is_removed = False
            try:
                await self._write_all()
            except BROKER_ERRORS as error:
                self._is_removed = True
                logger.warning("registration failed, trying again: %s: %s", type(error).__name__, error)
                await asyncio.sleep(_RETRY_S)
            except Exception as error:  # noqa: BLE001 - contained: an unregistered worker would never get a request again
                self._is_removed = True
                report("weir.bus.kv.registry: registering again", error)
                await asyncio.sleep(_RETRY_S)

    async def _write(self, key: str, record: ModelRecord | WorkerRecord) -> None:
        self._records[key] = record.pack()
        await self._bucket.put(key, self._records[key])

    async def _write_all(self) -> None:
        for key in list(self._records):
            if key in self._records:  # else the model was removed meanwhile
                await self._bucket.put(key, self._records[key])


class WorkerView:
    """One live worker: its record, its models by name, and when its last heartbeat arrived (monotonic seconds)."""

    def __init__(self, worker: str, now: float) -> None:
        self.record = WorkerRecord(worker, 0)
        self.models: dict[str, ModelRecord] = {}
        self.heard_s = now


class RegistryView:
    """All live workers. Listeners run in the event loop after a change has been applied."""

    def __init__(self, bus: Bus, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._clock = clock
        self._view = KvView(bus, subjects.REGISTRY_BUCKET, self._apply, self._remove)
        self.workers: dict[str, WorkerView] = {}
        self._expired_s = clock()
        self._background: asyncio.TaskGroup | None = None
        self._rereading: asyncio.Task[None] | None = None
        self._model_listeners: list[Callable[[str], None]] = []
        self._lost_listeners: list[Callable[[str], None]] = []
        self._heartbeat_listeners: list[Callable[[Heartbeat], None]] = []

    def on_model_change(self, listener: Callable[[str], None]) -> None:
        """`listener(model)` after any worker's record of the model was changed or removed."""
        self._model_listeners.append(listener)

    def on_worker_lost(self, listener: Callable[[str], None]) -> None:
        """`listener(worker)` after a worker has left, died or fallen silent."""
        self._lost_listeners.append(listener)

    def on_heartbeat(self, listener: Callable[[Heartbeat], None]) -> None:
        """`listener(heartbeat)` for each heartbeat of a known worker."""
        self._heartbeat_listeners.append(listener)

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Reads the registry, and follows it from now on. Reads it again in tasks of `background` if records are missing.

        Raises NatsError, OSError or TimeoutError if the broker is lost meanwhile; then it may be called again.
        """
        if self._background is None:
            self._background = background
            self._bus.links.on_lost(self._on_link_lost)
            await self._bus.subscribe(subjects.HEARTBEATS, self._on_heartbeat)
            self._bus.on_reconnect(self._read_all)
        self._restart_timeouts()
        await self._view.start(as_sent=True)

    def model_shares_memory(self, model: str) -> bool:
        """Whether every live worker that has the model can read this process's shared memory."""
        return all(shares_memory(worker) for worker, view in self.workers.items() if model in view.models)

    def drop(self, worker: str) -> None:
        """Removes a worker that is known to be dead from this view."""
        view = self.workers.pop(worker, None)
        if view is None:
            return
        call_each("weir.bus.kv.registry: a listener for lost workers", self._lost_listeners, worker)
        for model in view.models:
            self._model_changed(model)

    @contained()
    async def erase(self, worker: str) -> None:
        """Removes the keys of a dead worker from the bucket, and so from all views.

        After an error of the broker, which is logged, the next `expire` of any scheduler does so.
        """
        try:
            for key in await self._view.bucket.keys():
                if key == worker or key.startswith(f"{worker}."):
                    await self._view.bucket.delete(key)
        except BROKER_ERRORS as error:
            logger.warning(
                "the registration of dead worker %s could not be removed: %s: %s", worker, type(error).__name__, error
            )

    def expire(self) -> list[str]:
        """Removes workers without a recent heartbeat; returns them. Called about once a second."""
        now = self._clock()
        paused_s, self._expired_s = now - self._expired_s, now
        if paused_s > SILENCE_LIMIT_S / 2:
            # This process itself was paused: no heartbeat could arrive meanwhile.
            self._restart_timeouts()
            return []
        limit = now - SILENCE_LIMIT_S
        silent = [worker for worker, view in self.workers.items() if view.heard_s < limit]
        for worker in silent:
            logger.warning("no heartbeat from worker %s for %.0f s: treating it as dead", worker, SILENCE_LIMIT_S)
            self.drop(worker)
        return silent

    async def _read_all(self) -> None:
        # No heartbeat could arrive while the broker was away, so no worker counts as dead because of that.
        self._restart_timeouts()
        await self._view.read()

    def _restart_timeouts(self) -> None:
        for view in self.workers.values():
            view.heard_s = self._clock()

    def _remove(self, key: str) -> None:
        worker, _, model = key.partition(".")
        if not model:
            self.drop(worker)
        elif (view := self.workers.get(worker)) and view.models.pop(subjects.untoken(model), None):
            self._model_changed(subjects.untoken(model))

    def _apply(self, key: str, data: bytes) -> None:
        worker, _, model = key.partition(".")
        try:
            record = ModelRecord.unpack(data) if model else WorkerRecord.unpack(data)
        except MalformedMessage as error:
            logger.warning("ignored a malformed record: registry key %r: %s", key, error)
            return
        view = self.workers.get(worker)
        if view is None:
            view = self.workers[worker] = WorkerView(worker, self._clock())
        if isinstance(record, WorkerRecord):
            if record.written_ns >= view.record.written_ns:
                was_draining, view.record = view.record.draining, record
                self._connect(record)
                for name in view.models if record.draining != was_draining else ():
                    self._model_changed(name)
                self._model_changed("")
            return
        known = view.models.get(record.name)
        if known is None or record.written_ns >= known.written_ns:
            view.models[record.name] = record
            self._model_changed(record.name)

    def _connect(self, record: WorkerRecord) -> None:
        """Opens a link to a worker of this host, before any message to it."""
        if record.link and shares_memory(record.worker):
            worker = record.worker
            taken = subjects.work(worker), subjects.cancelled(worker), subjects.release(worker)
            self._bus.links.connect(worker, record.link, taken)

    def _on_link_lost(self, worker: str, end: LinkEnd) -> None:
        view = self.workers.get(worker)
        if view is not None and end is LinkEnd.BROKEN_OFF:
            self._connect(view.record)

    def _on_heartbeat(self, message: Message) -> None:
        try:
            heartbeat = Heartbeat.unpack(message.data)
        except MalformedMessage as error:
            logger.warning("subject %s: %s", message.subject, error)
            return
        view = self.workers.get(heartbeat.worker)
        if view is None:
            self._reread()
            return
        view.heard_s = self._clock()
        call_each("weir.bus.kv.registry: a listener for heartbeats", self._heartbeat_listeners, heartbeat)

    def _reread(self) -> None:
        """Reads the registry again after a heartbeat of an unknown worker, which this view has removed wrongly."""
        if self._background is not None and (self._rereading is None or self._rereading.done()):
            self._rereading = self._background.create_task(self._try_to_read())

    @contained()
    async def _try_to_read(self) -> None:
        try:
            await self._read_all()
        except BROKER_ERRORS as error:
            logger.warning("the registry could not be read again: %s", error)

    def _model_changed(self, model: str) -> None:
        call_each("weir.bus.kv.registry: a listener for models", self._model_listeners, model)
