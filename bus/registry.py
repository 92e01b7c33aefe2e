"""The registry: which workers live, and which models each of them serves.

Workers write bucket `registry` (one key a worker, one key a worker and model) and send heartbeats; gateways and
schedulers hold a `RegistryView` of all of it (`bus.kv_view`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from nats.errors import Error as NatsError
from nats.js.errors import NoKeysError, NotFoundError

from bus import subjects
from bus.connection import Bus, Message
from bus.identity import shares_memory
from bus.kv_view import KvView
from runtime.containment import call_each, contained, report
from schemas.registry import (
    Heartbeat,
    ModelRecord,
    WorkerRecord,
    pack_record,
    unpack_heartbeat,
    unpack_model_record,
    unpack_worker_record,
)
from schemas.wire import MalformedMessage

logger = logging.getLogger("weir.bus")

HEARTBEAT_INTERVAL_S = 1.0
SILENCE_LIMIT_S = 5.0
"""A worker that has not been heard for this long is taken for dead."""

_AGAIN_S = 0.2


class RegistryWriter:
    """A worker's side: writes its records, and writes them again when the broker came back without them."""

    def __init__(self, bus: Bus, worker: str) -> None:
        self._bus = bus
        self._worker = worker
        self._records: dict[str, bytes] = {}
        self._is_removed = False
        self._rewriting: asyncio.Task[None] | None = None
        bus.on_reconnect(self._write_all)

    async def start(self) -> None:
        """Watches the worker's own keys: whoever took it for dead and removed them was wrong, so they come back."""
        await self._bus.subscribe(subjects.registry_subject(f"{self._worker}"), self._on_write)
        await self._bus.subscribe(subjects.registry_subject(f"{self._worker}.*"), self._on_write)

    async def write_worker(self, record: WorkerRecord) -> None:
        """Writes what is known of the worker itself."""
        await self._write(subjects.registry_key(self._worker), record)

    async def write_model(self, record: ModelRecord) -> None:
        """Writes what is known of one model on this worker."""
        await self._write(subjects.registry_key(self._worker, record.name), record)

    async def remove_model(self, name: str) -> None:
        """Takes one model out of the registry."""
        key = subjects.registry_key(self._worker, name)
        if self._records.pop(key, None) is not None:
            bucket = await self._bus.jetstream.key_value(subjects.REGISTRY_BUCKET)
            await bucket.delete(key)

    async def remove_all(self) -> None:
        """Takes the worker and its models out of the registry."""
        keys, self._records = list(self._records), {}
        bucket = await self._bus.jetstream.key_value(subjects.REGISTRY_BUCKET)
        for key in keys:
            await bucket.delete(key)

    def beat(self, heartbeat: Heartbeat) -> None:
        """Sends a sign of life."""
        self._bus.publish(subjects.heartbeat(self._worker), pack_record(heartbeat))

    def _on_write(self, message: Message) -> None:
        key = message.subject.removeprefix(subjects.registry_subject(""))
        if message.data or key not in self._records:
            return
        # Several may remove what they know of, one key at a time, and also after it was written again.
        self._is_removed = True
        if self._rewriting is None or self._rewriting.done():
            logger.warning("taken for dead by somebody: registering again")
            self._rewriting = asyncio.get_running_loop().create_task(self._register_again())

    async def _register_again(self) -> None:
        # Who was taken for dead may be hard to reach for a while yet. Until it is registered nobody asks it for anything.
        while self._is_removed:
            self._is_removed = False
            try:
                await self._write_all()
            except (NatsError, OSError, TimeoutError) as error:
                self._is_removed = True
                logger.warning("not registered again yet: %s: %s", type(error).__name__, error)
                await asyncio.sleep(_AGAIN_S)
            except Exception as error:  # noqa: BLE001 - contained: an unregistered worker would never get a request again
                self._is_removed = True
                report("bus.registry: registering again", error)
                await asyncio.sleep(_AGAIN_S)

    async def _write(self, key: str, record: ModelRecord | WorkerRecord) -> None:
        self._records[key] = pack_record(record)
        bucket = await self._bus.jetstream.key_value(subjects.REGISTRY_BUCKET)
        await bucket.put(key, self._records[key])

    async def _write_all(self) -> None:
        bucket = await self._bus.jetstream.key_value(subjects.REGISTRY_BUCKET)
        for key in list(self._records):
            # Meanwhile models come and go.
            if key in self._records:
                await bucket.put(key, self._records[key])


class WorkerView:
    """One live worker: its own record, its models by name, and when it was heard last (monotonic seconds)."""

    def __init__(self, worker: str, now: float) -> None:
        self.record = WorkerRecord(worker, 0)
        self.models: dict[str, ModelRecord] = {}
        self.heard_s = now


class RegistryView:
    """All live workers. Listeners are called in the event loop after a change has been applied."""

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
        """`listener(model)` after any worker's record of the model has changed or gone."""
        self._model_listeners.append(listener)

    def on_worker_lost(self, listener: Callable[[str], None]) -> None:
        """`listener(worker)` after a worker has left, died or fallen silent."""
        self._lost_listeners.append(listener)

    def on_heartbeat(self, listener: Callable[[Heartbeat], None]) -> None:
        """`listener(heartbeat)` for each heartbeat of a known worker."""
        self._heartbeat_listeners.append(listener)

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Listens, then reads what was written before; reads again in tasks of `background` when that is called for.

        Raises NatsError, OSError or TimeoutError where the broker goes away meanwhile; then it may be called again.
        """
        if self._background is None:
            self._background = background
            await self._view.listen()
            await self._bus.subscribe(subjects.HEARTBEATS, self._on_heartbeat)
            self._bus.on_reconnect(self._read_all)
        await self._bus.flush()
        await self._read_all()

    def model_shares_memory(self, model: str) -> bool:
        """Whether every live worker that has the model can read this process's shared memory."""
        return all(shares_memory(worker) for worker, view in self.workers.items() if model in view.models)

    def drop(self, worker: str) -> None:
        """Forgets a worker that is known to be dead."""
        view = self.workers.pop(worker, None)
        if view is None:
            return
        call_each("bus.registry: a listener for lost workers", self._lost_listeners, worker)
        for model in view.models:
            self._model_changed(model)

    async def erase(self, worker: str) -> None:
        """Removes the keys of a dead worker from the bucket, so that everybody learns of it."""
        bucket = await self._bus.jetstream.key_value(subjects.REGISTRY_BUCKET)
        for key in await self._keys():
            if key == worker or key.startswith(f"{worker}."):
                await bucket.delete(key)

    async def try_to_erase(self, worker: str) -> None:
        """As `erase`, but for a broker that is away just now: then somebody does it later, or recovery."""
        try:
            await self.erase(worker)
        except (NatsError, OSError, TimeoutError) as error:
            logger.warning("worker %s is still in the registry: %s: %s", worker, type(error).__name__, error)

    def expire(self) -> list[str]:
        """Forgets workers that have been silent for too long; returns them. Called about once a second."""
        now = self._clock()
        paused_s, self._expired_s = now - self._expired_s, now
        if paused_s > SILENCE_LIMIT_S / 2:
            # It is this process that was stopped (or starved): nobody could be heard meanwhile.
            self._hear_all()
            return []
        limit = now - SILENCE_LIMIT_S
        silent = [worker for worker, view in self.workers.items() if view.heard_s < limit]
        for worker in silent:
            logger.warning("worker %s has been silent for %.0f s: taken for dead", worker, SILENCE_LIMIT_S)
            self.drop(worker)
        return silent

    async def _keys(self) -> list[str]:
        bucket = await self._bus.jetstream.key_value(subjects.REGISTRY_BUCKET)
        try:
            return await bucket.keys()
        except (NoKeysError, NotFoundError):
            return []

    async def _read_all(self) -> None:
        # While the broker was away heartbeats could not come: nobody is to be taken for dead because of that.
        self._hear_all()
        await self._view.read()

    def _hear_all(self) -> None:
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
            record = unpack_model_record(data) if model else unpack_worker_record(data)
        except MalformedMessage as error:
            logger.warning("registry key %r: %s", key, error)
            return
        view = self.workers.get(worker)
        if view is None:
            view = self.workers[worker] = WorkerView(worker, self._clock())
        if isinstance(record, WorkerRecord):
            if record.written_ns >= view.record.written_ns:
                was_draining, view.record = view.record.draining, record
                for name in view.models if record.draining != was_draining else ():
                    self._model_changed(name)
                self._model_changed("")
            return
        known = view.models.get(record.name)
        if known is None or record.written_ns >= known.written_ns:
            view.models[record.name] = record
            self._model_changed(record.name)

    def _on_heartbeat(self, message: Message) -> None:
        try:
            heartbeat = unpack_heartbeat(message.data)
        except MalformedMessage as error:
            logger.warning("subject %s: %s", message.subject, error)
            return
        view = self.workers.get(heartbeat.worker)
        if view is None:
            self._reread()
            return
        view.heard_s = self._clock()
        call_each("bus.registry: a listener for heartbeats", self._heartbeat_listeners, heartbeat)

    def _reread(self) -> None:
        """Somebody lives whom this view does not know: it was taken for dead here, wrongly."""
        if self._background is not None and (self._rereading is None or self._rereading.done()):
            self._rereading = self._background.create_task(self._try_to_read())

    @contained()
    async def _try_to_read(self) -> None:
        try:
            await self._read_all()
        except (NatsError, OSError, TimeoutError) as error:
            logger.warning("the registry could not be read: %s", error)

    def _model_changed(self, model: str) -> None:
        call_each("bus.registry: a listener for models", self._model_listeners, model)
