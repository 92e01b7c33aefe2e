"""`Collector`: asks everybody in the cluster at once, and waits as long as it takes those who are there to answer.

A look asks all processes to tell of themselves and all schedulers for their counters, and JetStream for its streams. It is
over when everybody that is known has answered, or after `PATIENCE_S`: who has not answered by then is silent. It only
reads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from itertools import count
from typing import Any

from nats.js.errors import NotFoundError

from bus import durable_subjects, subjects
from bus.connection import Bus, Message
from bus.jetstream_api import JetStreamApi
from bus.known_models import KnownModels
from bus.presence import MAX_PROCESSES
from bus.registry import RegistryView
from schemas.presence import RoleRecord, unpack_role
from schemas.registry import Heartbeat
from schemas.statistics import SchedulerCounters, WorkerCounters, WorkerLoadCounters, unpack_counters
from schemas.wire import MalformedMessage
from weir.status.facts import Facts

PATIENCE_S = 1.0
"""How long a process has to answer; one whose event loop is held up for longer is as good as silent."""

SETTLE_S = 0.25
"""Whom nobody knows of has this long to answer."""

MISSED_S = 60.0
"""How long a process that has fallen silent is told of by one who goes on looking."""

_POLL_S = 0.02
_MAX_PAGES = 400


class Collector:
    """See the module. `name` is its own on the bus, `url` what it was told to connect to."""

    def __init__(self, bus: Bus, name: str, url: str) -> None:
        self._bus = bus
        self._url = url
        self._answers = subjects.counters(name)
        self._api = JetStreamApi(bus, durable_subjects.found(name))
        self._registry = RegistryView(bus)
        self._known = KnownModels(bus)
        self._rounds = count(1)
        self._round = 0
        self._heard: dict[str, RoleRecord] = {}
        self._heard_s: dict[str, float] = {}
        self._missed: set[str] = set()
        self._counters: dict[str, tuple[int, SchedulerCounters]] = {}
        self._loads: dict[str, tuple[int, WorkerLoadCounters | None]] = {}
        self._heartbeats: dict[str, Heartbeat] = {}
        self.malformed = 0

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Listens from now on. Raises NatsError, OSError or TimeoutError where the broker goes away."""
        await self._api.start()
        await self._bus.subscribe(subjects.PRESENCE, self._on_presence)
        await self._bus.subscribe(f"{self._answers}.*", self._on_counters)
        self._registry.on_heartbeat(self._on_heartbeat)
        # Without the bucket no role was ever there.
        try:
            await self._registry.start(background)
        except NotFoundError:
            pass
        await self._known.start(background)

    async def look(self) -> Facts:
        """One look. Raises NatsError, OSError or TimeoutError where the broker does not answer."""
        began_s = time.monotonic()
        self._round = next(self._rounds)
        for id, heard_s in list(self._heard_s.items()):
            if heard_s < began_s - MISSED_S:
                del self._heard[id], self._heard_s[id]
        self._bus.publish(subjects.PRESENCE_QUERY, b"")
        self._bus.publish(subjects.STATISTICS_QUERY, b"", f"{self._answers}.{self._round}")
        self._heartbeats = {id: told for id, told in self._heartbeats.items() if id in self._registry.workers}
        self._counters = {id: told for id, told in self._counters.items() if id in self._heard}
        self._loads = {id: told for id, told in self._loads.items() if id in self._registry.workers}
        streams, _ = await asyncio.gather(self._streams(), self._wait_for_answers(began_s))
        self._miss_workers(began_s)
        # Nobody is waited for again who did not answer.
        self._missed = {id for id, heard_s in self._heard_s.items() if heard_s < began_s}
        names = [stream["config"]["name"] for stream in streams]
        consumers = {name: await self._consumers(name) for name in names if is_queue_stream(name)}
        dead: Mapping[str, int] = {}
        if durable_subjects.DEAD_STREAM in names:
            by_subject = await self._api.subjects(durable_subjects.DEAD_STREAM, durable_subjects.DEAD_SUBJECTS)
            dead = {subjects.untoken(subject.partition(".")[2]): letters for subject, letters in by_subject.items()}
        return Facts(
            now_ms=time.time_ns() // 1_000_000,
            url=self._url,
            server=self._bus.server_info,
            heard=[record for id, record in self._heard.items() if self._heard_s[id] >= began_s],
            missed=[record for id, record in self._heard.items() if self._heard_s[id] < began_s and not record.leaving],
            workers=dict(self._registry.workers),
            heartbeats=dict(self._heartbeats),
            counters={id: told for id, (number, told) in self._counters.items() if number == self._round},
            loads={id: told for id, (number, told) in self._loads.items() if number == self._round and told},
            known=frozenset(self._known.names()),
            streams=streams,
            consumers=consumers,
            dead=dead,
        )

    def _miss_workers(self, began_s: float) -> None:
        """Workers of the registry that were never heard here are missed too, also once others have given them up."""
        for worker, view in self._registry.workers.items():
            if worker not in self._heard and len(self._heard) < MAX_PROCESSES:
                parts = worker.rsplit("-", 2)
                host = parts[1] if len(parts) == 3 else ""
                self._heard[worker] = RoleRecord.model_construct(
                    role="worker", id=worker, host=host, pid=view.record.pid, since_ms=0
                )
                self._heard_s[worker] = began_s - _POLL_S

    async def _wait_for_answers(self, began_s: float) -> None:
        await asyncio.sleep(SETTLE_S)
        while time.monotonic() < began_s + PATIENCE_S and not self._have_all_answered(began_s):
            await asyncio.sleep(_POLL_S)

    def _have_all_answered(self, began_s: float) -> bool:
        heard = {id for id, heard_s in self._heard_s.items() if heard_s >= began_s}
        owners = {id for id in heard if self._heard[id].role == "scheduler"}
        workers = self._registry.workers.keys() & heard
        asked = {
            *self._registry.workers,
            *(id for id, record in self._heard.items() if not record.leaving),
        } - self._missed
        return (
            asked <= heard
            and all(self._counters.get(id, (0,))[0] == self._round for id in owners)
            and all(self._loads.get(id, (0,))[0] == self._round for id in workers)
        )

    def _on_presence(self, message: Message) -> None:
        try:
            record = unpack_role(message.data)
        except MalformedMessage:
            self.malformed += 1
            return
        if message.subject != subjects.presence(record.role, record.id):
            self.malformed += 1
            return
        if record.id in self._heard or len(self._heard) < MAX_PROCESSES:
            self._heard[record.id] = record
            self._heard_s[record.id] = time.monotonic()

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
        return await self._pages("$JS.API.STREAM.LIST", "streams")

    async def _consumers(self, stream: str) -> list[dict[str, Any]]:
        return await self._pages(f"$JS.API.CONSUMER.LIST.{stream}", "consumers")

    async def _pages(self, subject: str, field: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for _ in range(_MAX_PAGES):
            answer = await self._api.ask(subject, {"offset": len(found)})
            page = answer.get(field) or []
            found += page
            if not page or len(found) >= int(answer.get("total", 0)):
                break
        return found


def is_queue_stream(name: str) -> bool:
    """Whether requests wait there: `QUEUE`, and `LIVE` or one of its shards."""
    return name == durable_subjects.QUEUE_STREAM or name.partition("_")[0] == subjects.LIVE_STREAM
