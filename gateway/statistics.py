"""`Statistics`: the counters of all workers and schedulers, asked for when somebody wants to know, and summed.

Who counts is who does the work, and for what response caches answer, their gateways. All are asked, so any gateway tells
the totals of the cluster, and a request that was answered is in them as soon as its answer has come.

What becomes of counters when their owner goes:
- of a worker that has left or died, its last known ones stay in the sums: a counter never goes back. A worker that leaves
  says a last word; of one that was killed, what was last asked for is what is known;
- of a version that was unloaded, all are forgotten, and a version that is loaded again starts at zero.
Neither outlasts the gateway.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from itertools import count
from typing import Any

from bus import subjects
from bus.connection import Bus, Message
from bus.registry import RegistryView
from calls.catalog import Catalog
from gateway.counter_owners import CounterOwners
from gateway.custom_metrics import CustomMetrics, forget_versions
from gateway.version_totals import VersionTotals
from schemas.model_identity import plain_name
from schemas.statistics import (
    FamilyCounters,
    GatewayCounters,
    HealthCounters,
    ProcessReading,
    SchedulerCounters,
    VersionCounters,
    WorkerCounters,
    unpack_counters,
)
from schemas.wire import MalformedMessage

logger = logging.getLogger("weir.gateway")

ANSWER_TIMEOUT_S = 0.5
"""How long a round waits for those it asked."""

MAX_SCHEDULERS = 256
"""Schedulers that are listened to: their names come from messages alone."""

MAX_GATEWAYS = 64
"""Gateways with a response cache that are listened to, likewise."""

Key = tuple[str, int]
"""A model's name and a version."""


class Statistics:
    """See the module. `refresh` asks; what it returns then are the sums over what was answered."""

    def __init__(self, bus: Bus, gateway_id: str, registry: RegistryView, catalog: Catalog) -> None:
        self._bus = bus
        self._subject = subjects.counters(gateway_id)
        self._registry = registry
        self._catalog = catalog
        self._rounds = count(1)
        self._round = 0
        self._awaited: set[str] = set()
        self._complete = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None
        self._workers: CounterOwners[WorkerCounters] = CounterOwners(self._sum_up_worker)
        self._schedulers: CounterOwners[SchedulerCounters] = CounterOwners(self._sum_up_scheduler)
        self._gateways: CounterOwners[GatewayCounters] = CounterOwners(self._sum_up_rows)
        self._summed_up: dict[Key, VersionTotals] = {}  # of owners that have gone too long ago to be kept apart
        self._summed_families: list[FamilyCounters] = []  # likewise
        self._served: dict[str, set[int]] = {}
        self.malformed_messages = 0
        registry.on_model_change(self._on_model_change)
        registry.on_worker_lost(self._on_worker_lost)

    async def start(self) -> None:
        """Listens for answers, and asks once, to learn which schedulers there are."""
        await self._bus.subscribe(f"{self._subject}.*", self._on_answer)
        await self._bus.subscribe(subjects.LAST_COUNTERS, self._on_answer)
        self._bus.publish(subjects.STATISTICS_QUERY, b"", f"{self._subject}.0")

    async def refresh(self) -> None:
        """Returns when everybody was asked after this call and has answered, or did not in time.

        All who call while a round is running share the next one: the running one may have been answered before what they
        have just seen.
        """
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._ask_after(self._running))
        await asyncio.shield(self._next)

    def versions(self) -> dict[Key, VersionTotals]:
        """The sums for each version that is served."""
        totals = {
            (served.name, version): VersionTotals(served.name, version)
            for served in self._catalog.served()
            for version in served.versions
        }
        for key, earlier in self._summed_up.items():
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
        """What models count themselves."""
        metrics = CustomMetrics()
        for worker in self._workers.current.values():
            metrics.add(worker.families)
        for worker in self._workers.departed:
            metrics.add(worker.families, has_gone=True)
        metrics.add(self._summed_families, has_gone=True)
        return metrics

    def workers(self) -> list[WorkerCounters]:
        """What live workers tell, and those that have gone told last."""
        return [*self._workers.departed, *self._workers.current.values()]

    def live_workers(self) -> list[WorkerCounters]:
        """What live workers tell."""
        return list(self._workers.current.values())

    def processes(self) -> Iterator[tuple[str, str, ProcessReading]]:
        """Role, name and reading of each live scheduler and worker that tells what it takes of its host."""
        for scheduler in self._schedulers.current.values():
            if scheduler.process is not None:
                yield "scheduler", scheduler.scheduler, scheduler.process
        for worker in self._workers.current.values():
            if worker.process is not None:
                yield "worker", worker.worker, worker.process

    def health(self) -> Iterator[tuple[str, str, HealthCounters]]:
        """Role, name and condition of each live scheduler and worker that reports it."""
        for scheduler in self._schedulers.current.values():
            if scheduler.health is not None:
                yield "scheduler", scheduler.scheduler, scheduler.health
        for worker in self._workers.current.values():
            if worker.health is not None:
                yield "worker", worker.worker, worker.health

    def schedulers(self) -> list[SchedulerCounters]:
        """What schedulers tell, and those that have gone told last: in their queues there is nothing any more."""
        return [*self._schedulers.departed, *self._schedulers.current.values()]

    def _version_rows(self) -> list[list[VersionCounters]]:
        """What workers and gateways count of versions, one list for each of them."""
        gateways = [*self._gateways.departed, *self._gateways.current.values()]
        return [*(worker.models for worker in self.workers()), *(gateway.models for gateway in gateways)]

    async def _ask_after(self, running: asyncio.Task[None] | None) -> None:
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
            await asyncio.wait_for(self._complete.wait(), ANSWER_TIMEOUT_S)
        except TimeoutError:
            late = ", ".join(sorted(self._awaited))
            logger.warning("%s did not tell their counters in time: the last known ones are used", late)
            for scheduler in self._awaited & self._schedulers.current.keys():
                # Nobody else notices when a scheduler dies. If it is only slow, it is listened to again when it answers.
                self._scheduler_has_gone(scheduler)
            for gateway in self._awaited & self._gateways.current.keys():
                self._gateways.gone(gateway)

    def _on_answer(self, message: Message) -> None:
        try:
            counters = unpack_counters(message.data)
        except MalformedMessage as error:
            self._dropped(error)
            return
        is_last = False
        if isinstance(counters, WorkerCounters):
            # Only of workers that the registry knows: anybody may publish here.
            name = counters.worker
            if name not in self._registry.workers:
                return
            self._workers.heard(name, counters)
        elif isinstance(counters, GatewayCounters):
            name, is_last = counters.gateway, counters.leaving
            if not self._has_room(self._gateways, name, MAX_GATEWAYS, "gateways"):
                return
            self._gateways.heard(name, counters)
            if is_last:
                self._gateways.gone(name)
        else:
            name, is_last = counters.scheduler, counters.leaving
            if not self._has_room(self._schedulers, name, MAX_SCHEDULERS, "schedulers"):
                return
            self._schedulers.heard(name, counters)
            if is_last:
                self._scheduler_has_gone(name)
        if is_last or message.subject == f"{self._subject}.{self._round}":
            self._no_longer_awaited(name)

    def _has_room(self, owners: CounterOwners[Any], name: str, most: int, what: str) -> bool:
        """Whether one of this name is listened to: names come from messages alone."""
        if name in owners.current or len(owners.current) < most:
            return True
        self._dropped(f"there are {most} {what} already")
        return False

    def _no_longer_awaited(self, name: str) -> None:
        self._awaited.discard(name)
        if not self._awaited:
            self._complete.set()

    def _dropped(self, problem: object) -> None:
        self.malformed_messages += 1
        logger.warning("dropped a message that holds no counters: %s", problem)

    def _on_worker_lost(self, worker: str) -> None:
        self._workers.gone(worker)
        self._no_longer_awaited(worker)

    def _scheduler_has_gone(self, scheduler: str) -> None:
        known = self._schedulers.current[scheduler]
        for queue in known.models:
            queue.lanes = {}
            queue.load = None
            for version in queue.versions:
                version.pending = 0
        self._schedulers.gone(scheduler)

    def _sum_up_worker(self, counters: WorkerCounters) -> None:
        self._sum_up_rows(counters)
        summed = CustomMetrics()
        summed.add(self._summed_families, has_gone=True)
        summed.add(counters.families, has_gone=True)
        self._summed_families = summed.told()

    def _sum_up_rows(self, counters: WorkerCounters | GatewayCounters) -> None:
        for row in counters.models:
            self._totals_of(row.model, row.version).add(row)

    def _sum_up_scheduler(self, scheduler: SchedulerCounters) -> None:
        for queue in scheduler.models:
            for version in queue.versions:
                self._totals_of(queue.model, version.version).add_queued(version)

    def _totals_of(self, model: str, version: int) -> VersionTotals:
        # Only of what is served: a message may name anything.
        if version not in self._served.get(model, ()):
            return VersionTotals(model, version)
        return self._summed_up.setdefault((model, version), VersionTotals(model, version))

    def _on_model_change(self, model: str) -> None:
        """Forgets what was counted of versions that are no longer there (the catalog has heard of it before)."""
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
            self._summed_up.pop(key, None)
        plain = {(plain_name(model), version) for model, version in keys}
        for worker in self.workers():
            forget_versions(worker.families, plain)
        forget_versions(self._summed_families, plain)
        for rows in self._version_rows():
            rows[:] = [row for row in rows if (row.model, row.version) not in keys]
        for scheduler in self._schedulers.departed:
            for queue in scheduler.models:
                queue.versions = [version for version in queue.versions if (queue.model, version.version) not in keys]
