"""`Statistics`: the counters of all workers, schedulers and response caches, collected on demand and summed.

Each process counts its own work; gateways count what their response caches answer. Every query goes to all processes, so
any process that collects reports the totals of the cluster, and they include a request as soon as its response has arrived.

When the source of counters departs:
- the last known counters of a worker that has left or died stay in the sums: a counter never decreases. A worker that
  leaves publishes its final counters; of one that was killed, the last query counts;
- all counters of an unloaded version are dropped, and a version that is loaded again starts at zero.
Neither survives the collecting process.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any, Generic, TypeVar

from weir.bus.kv.registry import RegistryView
from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus, Message
from weir.calls.catalog import Catalog
from weir.cluster.counters.custom_metrics import CustomMetrics, drop_versions
from weir.cluster.counters.version_totals import VersionTotals
from weir.schemas.core.names import plain_name
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.statistics import (
    ConsumerCounters,
    FamilyCounters,
    GatewayCounters,
    HealthCounters,
    ProcessReading,
    SchedulerCounters,
    VersionCounters,
    WorkerCounters,
    unpack_counters,
)

logger = logging.getLogger("weir.cluster")


QUERY_TIMEOUT_S = 0.5
"""How long a query waits for the processes."""

MAX_SCHEDULERS = 256
"""Limit of schedulers that are counted: their names come from unauthenticated messages."""

MAX_GATEWAYS = 64
"""Limit of gateways with a response cache that are counted, for the same reason."""

Key = tuple[str, int]
"""A model's name and a version."""


class Statistics:
    """Collects the counters with `refresh`; the other methods return sums of what was collected last."""

    def __init__(self, bus: Bus, process_id: str, registry: RegistryView, catalog: Catalog) -> None:
        self._bus = bus
        self._subject = subjects.counters(process_id)
        self._registry = registry
        self._catalog = catalog
        self._rounds = count(1)
        self._round = 0
        self._awaited: set[str] = set()
        self._complete = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None
        self._workers: MetricSources[WorkerCounters] = MetricSources(self._retire_worker)
        self._schedulers: MetricSources[SchedulerCounters] = MetricSources(self._retire_scheduler)
        self._gateways: MetricSources[GatewayCounters] = MetricSources(self._retire_rows)
        # Of sources that departed too long ago to be kept separately:
        self._retired_totals: dict[Key, VersionTotals] = {}
        self._retired_families: list[FamilyCounters] = []
        self._served: dict[str, set[int]] = {}
        self.malformed_messages = 0
        registry.on_model_change(self._on_model_change)
        registry.on_worker_lost(self._on_worker_lost)

    async def start(self) -> None:
        """Subscribes to counters, and queries once to discover the schedulers.

        Replies to other processes are taken too: all gateways know the same of a process that dies, and a client gets the
        same statistics from each.
        """
        await self._bus.subscribe(f"{subjects.counters('*')}.*", self._on_counters)
        await self._bus.subscribe(subjects.LAST_COUNTERS, self._on_counters)
        self._bus.publish(subjects.STATISTICS_QUERY, b"", f"{self._subject}.0")

    async def refresh(self) -> None:
        """Queries all processes; returns when all have answered, or after `QUERY_TIMEOUT_S`.

        Calls during a running query share the next one: the counters of the running one may be older than what these
        callers have just seen.
        """
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._query_after(self._running))
        await asyncio.shield(self._next)

    def versions(self) -> dict[Key, VersionTotals]:
        """The sums of each version that is served."""
        totals = {
            (served.name, version): VersionTotals(served.name, version)
            for served in self._catalog.served()
            for version in served.versions
        }
        for key, earlier in self._retired_totals.items():
            if key in totals:
                totals[key].add_totals(earlier)
        for rows in self._version_rows():
            for row in rows:
                if (row.model, row.version) in totals:
                    totals[row.model, row.version].add(row)
        for scheduler in self.schedulers():
            for queue in scheduler.models:
                for version in queue.versions:
                    if (queue.model, version.version) in totals:
                        totals[queue.model, version.version].add_queued(version)
        return totals

    def custom_metrics(self) -> CustomMetrics:
        """The metrics that models define themselves."""
        metrics = CustomMetrics()
        for worker in self._workers.current.values():
            metrics.add(worker.families)
        for worker in self._workers.departed:
            metrics.add(worker.families, is_departed=True)
        metrics.add(self._retired_families, is_departed=True)
        return metrics

    def workers(self) -> list[WorkerCounters]:
        """The counters of live workers, and the last ones of departed workers."""
        return [*self._workers.departed, *self._workers.current.values()]

    def live_workers(self) -> list[WorkerCounters]:
        """The counters of live workers."""
        return list(self._workers.current.values())

    def consumers(self, name: str) -> tuple[list[ConsumerCounters], list[ConsumerCounters]]:
        """The counters of `weir durable` process `name` and of the gateways in its group: live, and of former lives."""

        def of_group(sources: Iterable[GatewayCounters]) -> list[ConsumerCounters]:
            return [
                source.consumer
                for source in sources
                if name and name in (source.gateway, source.group) and source.consumer is not None
            ]

        return of_group(self._gateways.current.values()), of_group(self._gateways.departed)

    def processes(self) -> Iterator[tuple[str, str, ProcessReading]]:
        """Role, name and resource usage of each live process that reports it."""
        return ((role, name, found.process) for role, name, found in self._live() if found.process is not None)

    def health(self) -> Iterator[tuple[str, str, HealthCounters]]:
        """Role, name and condition of each live process that reports it."""
        return ((role, name, found.health) for role, name, found in self._live() if found.health is not None)

    def _live(self) -> Iterator[tuple[str, str, ConsumerCounters | SchedulerCounters | WorkerCounters]]:
        for gateway in self._gateways.current.values():
            if gateway.consumer is not None:
                yield gateway.role, gateway.gateway, gateway.consumer
        for scheduler in self._schedulers.current.values():
            yield "scheduler", scheduler.scheduler, scheduler
        for worker in self._workers.current.values():
            yield "worker", worker.worker, worker

    def schedulers(self) -> list[SchedulerCounters]:
        """The counters of live schedulers, and the last ones of departed schedulers, with empty queues."""
        return [*self._schedulers.departed, *self._schedulers.current.values()]

    def _version_rows(self) -> list[list[VersionCounters]]:
        """The counters of versions, one list for each worker and gateway."""
        gateways = [*self._gateways.departed, *self._gateways.current.values()]
        return [*(worker.models for worker in self.workers()), *(gateway.models for gateway in gateways)]

    async def _query_after(self, running: asyncio.Task[None] | None) -> None:
        if running is not None:
            await running
        self._running, self._next = self._next, None
        self._round = next(self._rounds)
        self._awaited = {*self._registry.workers, *self._schedulers.current, *self._gateways.current}
        self._complete.clear()
        self._bus.publish(subjects.STATISTICS_QUERY, b"", f"{self._subject}.{self._round}")
        if not self._awaited:
            return
        try:
            await asyncio.wait_for(self._complete.wait(), QUERY_TIMEOUT_S)
        except TimeoutError:
            late = ", ".join(sorted(self._awaited))
            logger.warning("no counters from %s within %.1f s: using the last known ones", late, QUERY_TIMEOUT_S)
            for scheduler in self._awaited & self._schedulers.current.keys():
                # Nothing else detects the death of a scheduler. One that is only slow is counted again when it answers.
                self._drop_scheduler(scheduler)
            for gateway in self._awaited & self._gateways.current.keys():
                self._gateways.depart(gateway)

    def _on_counters(self, message: Message) -> None:
        try:
            counters = unpack_counters(message.data)
        except MalformedMessage as error:
            self._dropped(error)
            return
        is_last = False
        if isinstance(counters, WorkerCounters):
            # Only registered workers count: any client may publish here.
            name = counters.worker
            if name not in self._registry.workers:
                return
            self._workers.update(name, counters)
        elif isinstance(counters, GatewayCounters):
            name, is_last = counters.gateway, counters.leaving
            if not self._has_room(self._gateways, name, MAX_GATEWAYS, "gateways"):
                return
            self._gateways.update(name, counters)
            if is_last:
                self._gateways.depart(name)
        else:
            name, is_last = counters.scheduler, counters.leaving
            if not self._has_room(self._schedulers, name, MAX_SCHEDULERS, "schedulers"):
                return
            self._schedulers.update(name, counters)
            if is_last:
                self._drop_scheduler(name)
        if is_last or message.subject == f"{self._subject}.{self._round}":
            self._stop_awaiting(name)

    def _has_room(self, owners: MetricSources[Any], name: str, most: int, what: str) -> bool:
        """Whether counters of a source called `name` are accepted: names come from unauthenticated messages."""
        if name in owners.current or len(owners.current) < most:
            return True
        self._dropped(f"the limit of {most} {what} is reached")
        return False

    def _stop_awaiting(self, name: str) -> None:
        self._awaited.discard(name)
        if not self._awaited:
            self._complete.set()

    def _dropped(self, problem: object) -> None:
        self.malformed_messages += 1
        logger.warning("dropped a message of counters: %s", problem)

    def _on_worker_lost(self, worker: str) -> None:
        self._workers.depart(worker)
        self._stop_awaiting(worker)

    def _drop_scheduler(self, scheduler: str) -> None:
        departing = self._schedulers.current[scheduler]
        for queue in departing.models:
            queue.lanes = {}
            queue.load = None
            queue.owners = []
            for version in queue.versions:
                version.pending = 0
        self._schedulers.depart(scheduler)

    def _retire_worker(self, counters: WorkerCounters) -> None:
        self._retire_rows(counters)
        summed = CustomMetrics()
        summed.add(self._retired_families, is_departed=True)
        summed.add(counters.families, is_departed=True)
        self._retired_families = summed.to_counters()

    def _retire_rows(self, counters: WorkerCounters | GatewayCounters) -> None:
        for row in counters.models:
            self._totals_of(row.model, row.version).add(row)

    def _retire_scheduler(self, scheduler: SchedulerCounters) -> None:
        for queue in scheduler.models:
            for version in queue.versions:
                self._totals_of(queue.model, version.version).add_queued(version)

    def _totals_of(self, model: str, version: int) -> VersionTotals:
        # Only of served versions: a message may name anything.
        if version not in self._served.get(model, ()):
            return VersionTotals(model, version)
        return self._retired_totals.setdefault((model, version), VersionTotals(model, version))

    def _on_model_change(self, model: str) -> None:
        """Drops the counters of versions that were unloaded (the catalog has applied the change before)."""
        if not model:
            return
        served = self._catalog.served_model(model)
        versions = set() if served is None else set(served.versions)
        gone = self._served.pop(model, set()) - versions
        if versions:
            self._served[model] = versions
        if gone:
            self._forget({(model, version) for version in gone})

    def _forget(self, keys: set[Key]) -> None:
        for key in keys:
            self._retired_totals.pop(key, None)
        plain = {(plain_name(model), version) for model, version in keys}
        for worker in self.workers():
            drop_versions(worker.families, plain)
        drop_versions(self._retired_families, plain)
        for rows in self._version_rows():
            rows[:] = [row for row in rows if (row.model, row.version) not in keys]
        for scheduler in self._schedulers.departed:
            for queue in scheduler.models:
                queue.versions = [version for version in queue.versions if (queue.model, version.version) not in keys]


MAX_DEPARTED = 64
"""Departed sources whose counters are kept separately, because they may come back; older ones are added to a sum."""

Counters = TypeVar("Counters", WorkerCounters, SchedulerCounters, GatewayCounters)


class MetricSources(Generic[Counters]):
    """Counters by the name of their source. `forget` receives the counters of the longest departed source beyond the limit.

    A source that comes back under its name with another birth time is a new one: the counters of the old one stay.
    """

    def __init__(self, forget: Callable[[Counters], None]) -> None:
        self._forget: Callable[[Counters], None] = forget
        self.current: dict[str, Counters] = {}
        self._departed: OrderedDict[tuple[str, int], Counters] = OrderedDict()

    @property
    def departed(self) -> list[Counters]:
        """The last counters of departed sources."""
        return list(self._departed.values())

    def update(self, name: str, counters: Counters) -> None:
        """Takes the counters that a source has sent."""
        current = self.current.get(name)
        if current is not None and current.born_ns != counters.born_ns:
            self.depart(name)
        self._departed.pop((name, counters.born_ns), None)
        self.current[name] = counters

    def depart(self, name: str) -> None:
        """Marks a source as departed."""
        counters = self.current.pop(name, None)
        if counters is None:
            return
        self._departed[name, counters.born_ns] = counters
        if len(self._departed) > MAX_DEPARTED:
            self._forget(self._departed.popitem(last=False)[1])
