"""`WorkerService`: what the rest of the cluster sees of a worker: its records, heartbeats and counters.

The event loop does nothing costly: batches are decoded, run and encoded in the threads of the instances. How batches get
there is in `weir.worker.batch_dispatch`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from weir.bus.kv.registry import HEARTBEAT_INTERVAL_S, RegistryWriter
from weir.bus.naming import subjects
from weir.bus.naming.reserved_subjects import may_reply_to
from weir.bus.nats.connection import Bus, Message
from weir.bus.payloads.fetcher import PayloadFetcher, fetched_bytes
from weir.bus.payloads.server import PayloadServer
from weir.bus.streams.declarations import ensure_streams
from weir.runtime.containment import contained
from weir.runtime.loop_lag import process_health
from weir.runtime.ticks import next_tick
from weir.schemas.wire.registry import Heartbeat, ModelRecord, WorkerRecord
from weir.schemas.wire.statistics import pack_counters
from weir.telemetry.instruments import Utilization
from weir.worker.batch_dispatch import BatchDispatcher
from weir.worker.cuda.pinned import PINNED
from weir.worker.devices.metrics import DevicePoller
from weir.worker.execution.batch import Batch
from weir.worker.lifecycle.loader import LoadResult
from weir.worker.lifecycle.served_version import ServedVersion

logger = logging.getLogger("weir.worker")

_DRAIN_SETTLE_S = 0.1


class WorkerLoad:
    """How busy a worker's instances are. Ensembles do not count: their coordinators only wait for other models."""

    def __init__(self) -> None:
        self._utilization = Utilization()

    def measure(self, now_us: int, models: Mapping[str, LoadResult], held: Iterable[Batch]) -> None:
        """Updates the utilization; called about once a second."""
        versions = _versions(models)
        busy_us = sum(version.statistics.busy_ns for version in versions.values()) // 1000
        instances = sum(len(version.instances) for version in versions.values())
        self._utilization.update(now_us, busy_us, _busy(versions, held), instances)

    def to_dict(self, models: Mapping[str, LoadResult], held: Iterable[Batch]) -> dict[str, float]:
        """The fields of `WorkerLoadCounters`: instances and busy instances now, the utilization as last measured."""
        versions = _versions(models)
        return {
            "instances": sum(len(version.instances) for version in versions.values()),
            "busy": _busy(versions, held),
            "utilization": self._utilization.value,
        }


def _versions(models: Mapping[str, LoadResult]) -> dict[tuple[str, int], ServedVersion]:
    return {
        (name, number): served
        for name, result in models.items()
        if result.config is None or result.config.ensemble_scheduling is None
        for number, served in result.served.items()
    }


def _busy(versions: Mapping[tuple[str, int], ServedVersion], held: Iterable[Batch]) -> int:
    """How many instances have at least one batch."""
    messages = [one.message for one in list(held)]
    return len(
        {(m.model, m.version, m.instance) for m in messages if (m.model, m.version) in versions},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSources:
    """Where the counters come from that a worker publishes besides those of its models and batches.

    `cache_counters` are those of response caches that models of this worker used, `custom_metrics` those that Python models
    define. Without `devices`, nothing is reported of the host and its GPUs.
    """

    payload_server: PayloadServer
    fetcher: PayloadFetcher | None = None
    devices: DevicePoller | None = None
    cache_counters: Callable[[], list[dict[str, Any]]] = list
    custom_metrics: Callable[[], list[dict[str, Any]]] = list


class WorkerService:
    """One worker process in the registry. `about` is its record there at the start."""

    def __init__(
        self,
        bus: Bus,
        dispatcher: BatchDispatcher,
        about: WorkerRecord,
        sources: CounterSources,
    ) -> None:
        self.worker_id = about.worker
        self._bus = bus
        self._dispatcher = dispatcher
        self._about = about
        self._sources = sources
        self._born_ns = time.time_ns()
        self._registry = RegistryWriter(bus, self.worker_id)
        self._load = WorkerLoad()
        self._heartbeats: asyncio.Task[None] | None = None

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Registers the worker, subscribes to batches and queries, and sends heartbeats in a task of `background`."""
        await ensure_streams(self._bus)
        await self._registry.start()
        await self._dispatcher.start()
        await self._sources.payload_server.start()
        await self._bus.subscribe(subjects.probe(self.worker_id), lambda message: None)
        await self._bus.subscribe(subjects.STATISTICS_QUERY, self._on_statistics_query)
        await self._bus.flush()
        await self.describe()
        self._heartbeats = background.create_task(self._send_heartbeats())

    async def stop(self, timeout_s: float) -> None:
        """Finishes the batches, for `timeout_s` at most, removes the worker from the registry, and unloads its models."""
        await self.describe(settled=True, draining=True)
        try:
            async with asyncio.timeout(timeout_s):
                # Schedulers may have sent batches before they saw the record: those arrive before the broker's reply.
                await self._bus.flush()
                await asyncio.sleep(_DRAIN_SETTLE_S)
                await self._dispatcher.drain()
        except TimeoutError:
            logger.warning("%d batches are still running after the exit timeout", len(self._dispatcher.held))
        if self._heartbeats is not None:
            self._heartbeats.cancel()
        # Gateways add these counters to their sums before they see the worker leave.
        self._bus.publish(subjects.LAST_COUNTERS, self._counters())
        await self._bus.flush()
        await self._registry.remove_all()
        await self._bus.flush()
        if not self._dispatcher.held:
            models = self._dispatcher.models.values()
            versions = [served for result in models for served in result.served.values()]
            await asyncio.gather(*(asyncio.to_thread(version.unload) for version in versions))

    # Records

    async def describe(self, **changes: Any) -> None:
        """Writes the worker's own record with these fields changed. Raises what the broker raises."""
        self._about = replace(self._about, written_ns=time.time_ns(), **changes)
        await self._registry.write_worker(self._about)

    async def write_model(self, record: ModelRecord) -> None:
        """Writes the record of a model. Raises what the broker raises."""
        await self._registry.write_model(record)

    async def remove_model(self, name: str) -> None:
        """Removes the record of a model. Raises what the broker raises."""
        await self._registry.remove_model(name)

    # Heartbeats and counters

    async def _send_heartbeats(self) -> None:
        while True:
            self._beat()
            await next_tick(HEARTBEAT_INTERVAL_S)

    @contained()
    def _beat(self) -> None:
        self._registry.beat(Heartbeat(self.worker_id, self._dispatcher.held_ids()))
        self._load.measure(time.monotonic_ns() // 1000, self._dispatcher.models, self._dispatcher.held)

    def _on_statistics_query(self, message: Message) -> None:
        if may_reply_to(message, subjects.counters("")):
            self._bus.publish(message.reply, self._counters())

    def _counters(self) -> bytes:
        dispatcher, sources = self._dispatcher, self._sources
        devices, payload_server = sources.devices, sources.payload_server
        return pack_counters(
            {
                "worker": self.worker_id,
                "born_ns": self._born_ns,
                "models": [*self.statistics(), *sources.cache_counters()],
                "malformed_messages": dispatcher.malformed_messages + payload_server.malformed_messages,
                "payload_bytes": fetched_bytes(sources.fetcher),
                "payload_readers_refused": payload_server.refused_readers,
                "payload_slots": dispatcher.slots_held,
                "host": None if devices is None else devices.host,
                "gpus": {} if devices is None else devices.gpus,
                "pinned_total_bytes": PINNED.total_bytes if PINNED.is_available else 0,
                "pinned_used_bytes": PINNED.used_bytes,
                "families": sources.custom_metrics(),
                "load": self._load.to_dict(dispatcher.models, dispatcher.held),
                "process": None if devices is None else devices.process,
                "health": process_health(),
            }
        )

    def statistics(self) -> list[dict[str, object]]:
        """The counters of every loaded version."""
        rows = (
            self._statistics_row(name, number, served)
            for name, result in self._dispatcher.models.items()
            for number, served in result.served.items()
        )
        return [row for row in rows if row is not None]

    @contained()
    def _statistics_row(self, name: str, number: int, served: ServedVersion) -> dict[str, object] | None:
        return {"model": name, "version": number, **served.statistics.snapshot()}
