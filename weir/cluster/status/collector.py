"""`Collector`: queries every process of the cluster and JetStream, and returns their replies as `ClusterFacts`.

A collection requests a presence record from every process, counters from schedulers and workers, and the list of streams
from JetStream. It ends when every known process has replied, or after `REPLY_TIMEOUT_S`: a process without a reply by then
is reported as silent. The collector only reads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from itertools import count
from typing import Any

from nats.js.errors import NotFoundError

from weir.bus.kv.known_models import KnownModels
from weir.bus.kv.presence import MAX_PROCESSES
from weir.bus.kv.registry import RegistryView
from weir.bus.kv.view import KvBucket
from weir.bus.naming import durable_subjects, subjects
from weir.bus.nats.connection import Bus, Message
from weir.cluster.status.summary import ClusterFacts
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.registry import Heartbeat, RoleRecord
from weir.schemas.wire.statistics import SchedulerCounters, WorkerCounters, WorkerLoadCounters, unpack_counters
from weir.schemas.wire.traffic import TrafficRecord

REPLY_TIMEOUT_S = 1.0
"""Time a process has to reply. One whose event loop is blocked for longer is reported as silent."""

DISCOVERY_S = 0.25
"""Time that processes without a registration have to reply."""

SILENT_KEPT_S = 60.0
"""With `--watch`, time for which a silent process stays in the output."""

_POLL_S = 0.02


class Collector:
    """Collects the state of a cluster over `bus`. `name` is this process's id on the bus, `url` the broker's URL."""

    def __init__(self, bus: Bus, name: str, url: str) -> None:
        self._bus = bus
        self._url = url
        self._reply_subject = subjects.counters(name)
        self._registry = RegistryView(bus)
        self._known = KnownModels(bus)
        self._rounds = count(1)
        self._round = 0
        self._records: dict[str, RoleRecord] = {}
        self._replied_s: dict[str, float] = {}
        self._silent: set[str] = set()
        self._counters: dict[str, tuple[int, SchedulerCounters]] = {}
        self._loads: dict[str, tuple[int, WorkerLoadCounters | None]] = {}
        self._heartbeats: dict[str, Heartbeat] = {}
        self.malformed = 0

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Subscribe to the replies. Raises NatsError, OSError or TimeoutError if the broker is lost."""
        await self._bus.subscribe(subjects.PRESENCE, self._on_presence)
        await self._bus.subscribe(f"{self._reply_subject}.*", self._on_counters)
        self._registry.on_heartbeat(self._on_heartbeat)
        # Without the bucket no worker has registered yet.
        try:
            await self._registry.start(background)
        except NotFoundError:
            pass
        await self._known.start(is_maker=False)

    async def collect(self) -> ClusterFacts:
        """Collect once. Raises NatsError, OSError or TimeoutError if the broker does not reply."""
        started_s = time.monotonic()
        self._round = next(self._rounds)
        for id, replied_s in list(self._replied_s.items()):
            if replied_s < started_s - SILENT_KEPT_S:
                del self._records[id], self._replied_s[id]
        self._bus.publish(subjects.PRESENCE_QUERY, b"")
        self._bus.publish(subjects.STATISTICS_QUERY, b"", f"{self._reply_subject}.{self._round}")
        self._heartbeats = {id: value for id, value in self._heartbeats.items() if id in self._registry.workers}
        self._counters = {id: value for id, value in self._counters.items() if id in self._records}
        self._loads = {id: value for id, value in self._loads.items() if id in self._registry.workers}
        streams, _ = await asyncio.gather(self._streams(), self._wait_for_replies(started_s))
        self._add_silent_workers(started_s)
        # The next collection does not wait for a process that did not reply to this one.
        self._silent = {id for id, replied_s in self._replied_s.items() if replied_s < started_s}
        names = [stream["config"]["name"] for stream in streams]
        consumers = {name: await self._consumers(name) for name in names if is_queue_stream(name)}
        dead: Mapping[str, int] = {}
        if durable_subjects.DEAD_STREAM in names:
            by_subject = await self._bus.jetstream.subject_counts(
                durable_subjects.DEAD_STREAM, durable_subjects.DEAD_SUBJECTS
            )
            dead = {subjects.untoken(subject.partition(".")[2]): letters for subject, letters in by_subject.items()}
        return ClusterFacts(
            now_ms=time.time_ns() // 1_000_000,
            url=self._url,
            server=self._bus.server_info,
            replied=[record for id, record in self._records.items() if self._replied_s[id] >= started_s],
            silent=[
                record for id, record in self._records.items() if self._replied_s[id] < started_s and not record.leaving
            ],
            workers=dict(self._registry.workers),
            heartbeats=dict(self._heartbeats),
            counters={id: counters for id, (number, counters) in self._counters.items() if number == self._round},
            loads={
                id: counters for id, (number, counters) in self._loads.items() if number == self._round and counters
            },
            known=frozenset(self._known.names()),
            streams=streams,
            consumers=consumers,
            dead=dead,
            traffic=await self._traffic(),
        )

    async def _traffic(self) -> dict[str, TrafficRecord]:
        """The traffic rules that operators have set, by model."""
        found: dict[str, TrafficRecord] = {}
        for data in (await KvBucket(self._bus, subjects.TRAFFIC_BUCKET).values()).values():
            try:
                record = TrafficRecord.unpack(data)
                _ = record.rule
            except ValueError:
                self.malformed += bool(data)
                continue
            found[record.model] = record
        return found

    def _add_silent_workers(self, started_s: float) -> None:
        """Report registered workers that never replied as silent, even after their registration has been removed."""
        for worker, view in self._registry.workers.items():
            if worker not in self._records and len(self._records) < MAX_PROCESSES:
                parts = worker.rsplit("-", 2)
                host = parts[1] if len(parts) == 3 else ""
                self._records[worker] = RoleRecord(role="worker", id=worker, host=host, pid=view.record.pid, since_ms=0)
                self._replied_s[worker] = started_s - _POLL_S

    async def _wait_for_replies(self, started_s: float) -> None:
        await asyncio.sleep(DISCOVERY_S)
        while time.monotonic() < started_s + REPLY_TIMEOUT_S and not self._have_all_replied(started_s):
            await asyncio.sleep(_POLL_S)

    def _have_all_replied(self, started_s: float) -> bool:
        replied = {id for id, replied_s in self._replied_s.items() if replied_s >= started_s}
        owners = {id for id in replied if self._records[id].role == "scheduler"}
        workers = self._registry.workers.keys() & replied
        expected = {
            *self._registry.workers,
            *(id for id, record in self._records.items() if not record.leaving),
        } - self._silent
        return (
            expected <= replied
            and all(self._counters.get(id, (0,))[0] == self._round for id in owners)
            and all(self._loads.get(id, (0,))[0] == self._round for id in workers)
        )

    def _on_presence(self, message: Message) -> None:
        try:
            record = RoleRecord.unpack(message.data)
        except MalformedMessage:
            self.malformed += 1
            return
        if message.subject != subjects.presence(record.role, record.id):
            self.malformed += 1
            return
        if record.id in self._records or len(self._records) < MAX_PROCESSES:
            self._records[record.id] = record
            self._replied_s[record.id] = time.monotonic()

    def _on_counters(self, message: Message) -> None:
        number = message.subject.rpartition(".")[2]
        try:
            counters = unpack_counters(message.data)
        except MalformedMessage:
            self.malformed += 1
            return
        if not (number.isascii() and number.isdigit()):
            return
        if isinstance(counters, WorkerCounters):
            if counters.worker in self._registry.workers:
                self._loads[counters.worker] = int(number), counters.load
            return
        if not isinstance(counters, SchedulerCounters):
            return
        if counters.scheduler in self._counters or len(self._counters) < MAX_PROCESSES:
            self._counters[counters.scheduler] = int(number), counters

    def _on_heartbeat(self, heartbeat: Heartbeat) -> None:
        self._heartbeats[heartbeat.worker] = heartbeat

    async def _streams(self) -> list[dict[str, Any]]:
        return await self._bus.jetstream.list_all("STREAM.LIST", "streams")

    async def _consumers(self, stream: str) -> list[dict[str, Any]]:
        return await self._bus.jetstream.list_all(f"CONSUMER.LIST.{stream}", "consumers")


def is_queue_stream(name: str) -> bool:
    """Whether the stream holds requests: `QUEUE`, `LIVE` or a shard of `LIVE`."""
    return name == durable_subjects.QUEUE_STREAM or name.partition("_")[0] == subjects.LIVE_STREAM
