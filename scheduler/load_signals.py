"""`LoadSignals`: what a queue tells of its load: utilization, expected wait, and how many workers it should have.

Looked at about once a second; what is asked for in between is what was seen last, so that all who ask hear the same.
"""

from __future__ import annotations

from typing import Any

from scheduler.admission import Pace
from scheduler.desired_workers import DesiredWorkers, Load
from scheduler.lanes import BATCH, LIVE
from scheduler.model_scheduler import AnyVersion, ModelScheduler
from telemetry.utilization import Utilization

_ACTIVE_US = 60_000_000


class LoadSignals:
    """Of one queue. `arrived` requests have come, or were turned away by their callers, but for those of offline jobs."""

    def __init__(self, scheduler: ModelScheduler) -> None:
        self._scheduler = scheduler
        self._policy = DesiredWorkers()
        self._partitions = 1
        self._active_us: dict[int, int] = {}  # when each version had something to do last
        self._served: dict[int, int] = {}
        self._paces: dict[int, Pace] = {}
        self._utilization = Utilization()
        self._instances = 0
        self.arrived = 0
        self._turned_away = 0

    def divide(self, partitions: int) -> None:
        """The model has so many queues, whose numbers of workers are added up and rounded by whoever asks."""
        self._partitions = partitions
        self._policy.step = 1 / partitions

    def came(self, lane: int, requests: int) -> None:
        """So many requests have come."""
        if lane != BATCH:
            self.arrived += requests

    def turned_away(self, requests: int) -> None:
        """A caller knew that these would have been refused for their wait, and didn't send them."""
        self.arrived += requests
        self._turned_away += requests

    def look(self, now_us: int) -> None:
        """Looks at the queue. Called about once a second."""
        active = self._active(now_us)
        every = list(self._scheduler.versions().values())
        self._instances = instances = sum(version.instance_count for version in active)
        workers = {worker for version in active for worker in version.workers()}
        busy = sum(version.busy_instances for version in active)
        busy_us = sum(version.busy_us for version in every)
        self._utilization.look(now_us, busy_us, busy, instances)
        load = Load(
            self.arrived,
            sum(version.served for version in every),
            busy_us,
            self._scheduler.waiting,
            busy > 0,
            instances * self._partitions,  # what a worker has, and not what it has for this queue alone
            len(workers),
        )
        self._policy.look(now_us, load)

    def told(self) -> dict[str, Any]:
        """As `schemas.statistics.LoadCounters` has it."""
        versions = self._scheduler.versions().values()
        refused = {reason: sum(version.refused[reason] for version in versions) for reason in ("queue", "wait")}
        refused["wait"] += self._turned_away
        desired = self._policy.value
        if not desired and self._scheduler.waiting:
            desired = 1.0
        return {
            "instances": self._instances,
            "utilization": self._utilization.value,
            "desired_workers": desired,
            "expected_wait_us": max(map(self._expected_wait_us, versions), default=0),
            "refused": refused,
        }

    def _expected_wait_us(self, version: AnyVersion) -> int:
        pace = self._paces.get(version.version)
        if pace is None or not version.instance_count:
            return 0
        return int(version.waiting_in(LIVE) * pace.us_per_request / version.instance_count)

    def _active(self, now_us: int) -> list[AnyVersion]:
        """The versions that have something to do, or else the latest: others have instances too, but for nothing."""
        versions = self._scheduler.versions()
        for number, version in versions.items():
            if version.served != self._served.get(number, 0) or version.waiting or version.busy_instances:
                self._active_us[number] = now_us
            self._served[number] = version.served
            self._paces.setdefault(number, Pace()).look(version.served, version.busy_us)
        late_us = now_us - _ACTIVE_US
        active = [v for n, v in versions.items() if v.instance_count and self._active_us.get(n, late_us) > late_us]
        served = [number for number, version in versions.items() if version.instance_count]
        return active or [versions[number] for number in sorted(served)[-1:]]
