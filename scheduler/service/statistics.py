"""What a scheduler measures of its queues: `DispatchCounters` and `RetiredCounters` count, `LoadSignals` derives load.

All of it ends in the scheduler's response to a statistics query (`weir.schemas.wire.statistics.QueueCounters`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from weir.bus.naming.live_queues import LiveQueue
from weir.runtime.loop_lag import process_health
from weir.runtime.processes.usage import process_usage
from weir.scheduler.batching.dispatch import BATCH
from weir.scheduler.batching.version import Version
from weir.scheduler.model_scheduler import ModelScheduler
from weir.scheduler.placement.desired_workers import DesiredWorkers, Load
from weir.schemas.core.requests import Lane
from weir.schemas.wire.registry import ModelRecord, ModelState
from weir.schemas.wire.statistics import MAX_NAME_LENGTH, pack_counters
from weir.telemetry.instruments import SizeHistogram, Utilization

_ACTIVE_US = 60_000_000
_UNLOADED_STATES = (ModelState.UNLOADING, ModelState.UNAVAILABLE)


class DispatchCounters:
    """Counters of one queue: batches by their number of requests, repeated batches, and redelivered frames."""

    __slots__ = ("_first_delivery", "batch_requests", "redelivered_frames", "retried_batches")

    def __init__(self) -> None:
        self.batch_requests = SizeHistogram()
        self.retried_batches = 0
        self.redelivered_frames = 0
        self._first_delivery = " "  # prefix of the ack subjects of first deliveries by the queue's consumer

    def frame_received(self, ack_subject: str) -> None:
        """Counts a frame if it is a redelivery, which its ack subject shows."""
        if ack_subject.startswith(self._first_delivery):
            return
        # $JS.ACK.<stream>.<consumer>.<delivered>.…, with <domain>.<account> before the stream since protocol 2.
        tokens = ack_subject.split(".")
        delivered = 4 if len(tokens) < 11 else 6
        if len(tokens) >= 9 and tokens[delivered] != "1":
            self.redelivered_frames += 1
        elif len(tokens) >= 9:
            self._first_delivery = ".".join(tokens[: delivered + 1]) + "."

    def to_dict(self, model: str) -> dict[str, Any]:
        """Returns the counters in the form of `QueueCounters`, without lanes and versions."""
        return {
            "model": model,
            "lanes": {},
            "versions": [],
            "redelivered_frames": self.redelivered_frames,
            "retried_batches": self.retried_batches,
            "batch_requests": self.batch_requests.snapshot(),
        }


class RetiredCounters:
    """The counters of queues that this scheduler has handed over, which stay in its sums.

    Waiting requests are not in them: the queue's next owner reports those.
    """

    def __init__(self) -> None:
        self._dispatched: dict[LiveQueue, DispatchCounters] = {}
        self._failures: dict[str, dict[int, Counter[str]]] = {}  # of versions, by model

    def add(self, queue: LiveQueue, counters: DispatchCounters, scheduler: ModelScheduler) -> None:
        """Adds the counters of a queue that now has another owner."""
        self._dispatched[queue] = counters
        of_model = self._failures.setdefault(queue.model, {})
        for number, version in scheduler.versions().items():
            of_model.setdefault(number, Counter()).update(version.failures)

    def restore(self, queue: LiveQueue) -> DispatchCounters:
        """Returns the counters of a queue that is owned again, or new ones."""
        return self._dispatched.pop(queue, None) or DispatchCounters()

    def reset_unloaded_failures(self, model: str, records: Sequence[ModelRecord]) -> None:
        """Removes the failures of versions that were unloaded."""
        versions = self._failures.get(model, {})
        for number in [number for number in versions if _is_unloaded(number, records)]:
            del versions[number]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Returns all of them, in the form of `QueueCounters`."""
        rows = [counters.to_dict(queue.model) for queue, counters in self._dispatched.items()]
        for model, versions in self._failures.items():
            if versions:
                failures = [{"version": number, "pending": 0, "failures": dict(of)} for number, of in versions.items()]
                rows.append({**DispatchCounters().to_dict(model), "versions": failures})
        return rows


class LoadSignals:
    """The load of one queue: utilization, expected wait, and the number of workers it should have.

    `update` refreshes it about once a second. Queries in between return the same values, so that all callers agree.
    `arrived` counts requests that arrived or that their callers rejected themselves, except for the batch lane.
    """

    def __init__(self, scheduler: ModelScheduler) -> None:
        self._scheduler = scheduler
        self._policy = DesiredWorkers()
        self._partitions = 1
        self._active_us: dict[int, int] = {}  # when each version was last active
        self._served: dict[int, int] = {}
        self._utilization = Utilization()
        self._instances = 0
        self.arrived = 0
        self._rejected_by_callers = 0

    def divide(self, partitions: int) -> None:
        """Sets the number of queues of the model. Their desired workers are added up and rounded by the reader."""
        self._partitions = partitions
        self._policy.step = 1 / partitions

    def add_arrivals(self, lane: int, requests: int) -> None:
        """Counts requests that arrived."""
        if lane != BATCH:
            self.arrived += requests

    def add_caller_rejections(self, requests: int) -> None:
        """Counts requests that a caller rejected itself, because this queue would have rejected them for their wait."""
        self.arrived += requests
        self._rejected_by_callers += requests

    def update(self, now_us: int) -> None:
        """Measures the queue. Called about once a second."""
        active = self._active(now_us)
        every = list(self._scheduler.versions().values())
        self._instances = instances = sum(version.instance_count for version in active)
        workers = {worker for version in active for worker in version.workers()}
        busy = sum(version.busy_instances for version in active)
        busy_us = sum(version.cost.busy_us for version in every)
        self._utilization.update(now_us, busy_us, busy, instances)
        load = Load(
            self.arrived,
            sum(version.cost.served for version in every),
            busy_us,
            self._scheduler.waiting,
            busy > 0,
            instances * self._partitions,  # all instances of a worker, not only its share for this queue
            len(workers),
        )
        self._policy.update(now_us, load)

    def to_dict(self) -> dict[str, Any]:
        """Returns the load in the form of `weir.schemas.wire.statistics.LoadCounters`."""
        versions = self._scheduler.versions().values()
        refused = {reason: sum(version.refused[reason] for version in versions) for reason in ("queue", "wait")}
        refused["wait"] += self._rejected_by_callers
        desired = self._policy.value
        if not desired and self._scheduler.waiting:
            desired = 1.0
        return {
            "instances": self._instances,
            "utilization": self._utilization.value,
            "desired_workers": desired,
            "expected_wait_us": max((int(v.expected_wait_us()) for v in versions if v.instance_count), default=0),
            "refused": refused,
        }

    def _active(self, now_us: int) -> list[Version]:
        """Returns the recently active versions, or else the latest: idle versions have instances, but no load."""
        versions = self._scheduler.versions()
        for number, version in versions.items():
            if version.cost.served != self._served.get(number, 0) or version.waiting or version.busy_instances:
                self._active_us[number] = now_us
            self._served[number] = version.cost.served
        late_us = now_us - _ACTIVE_US
        active = [v for n, v in versions.items() if v.instance_count and self._active_us.get(n, late_us) > late_us]
        served = [number for number, version in versions.items() if version.instance_count]
        return active or [versions[number] for number in sorted(served)[-1:]]


def model_counters(scheduler: ModelScheduler, counters: DispatchCounters, now_us: int) -> dict[str, Any]:
    """Returns the counters of a queue's policy, in the form of `QueueCounters`."""
    return {
        **counters.to_dict(scheduler.name),
        "lanes": {lane.name.lower(): _lane_counters(scheduler, lane.value, now_us) for lane in Lane},
        "versions": [
            {
                "version": number,
                "pending": version.waiting + version.staged,
                "busy": version.busy_instances,
                "failures": dict(version.failures),
            }
            for number, version in scheduler.versions().items()
        ],
        "owners": [
            {"owner": use.owner[:MAX_NAME_LENGTH], "in_flight": use.in_flight, "refused": use.refused}
            for use in scheduler.owners.largest()
        ],
    }


def _lane_counters(scheduler: ModelScheduler, lane: int, now_us: int) -> dict[str, int]:
    depth = scheduler.waiting_in(lane)
    oldest_us = scheduler.oldest_us(lane) if depth else None
    return {"depth": depth, "oldest_us": 0 if oldest_us is None else max(0, now_us - oldest_us)}


def pack_scheduler_counters(
    id: str, born_ns: int, models: list[dict[str, Any]], malformed_messages: int, leaving: bool
) -> bytes:
    """Returns a scheduler's response to a statistics query; `leaving` marks the last one."""
    return pack_counters(
        {
            "scheduler": id,
            "born_ns": born_ns,
            "models": models,
            "malformed_messages": malformed_messages,
            "leaving": leaving,
            "process": process_usage(),
            "health": process_health(),
        }
    )


def reset_unloaded_failures(scheduler: ModelScheduler, records: Iterable[ModelRecord]) -> None:
    """Resets the failures of versions that their workers have unloaded: they start at zero when loaded again.

    This does not apply to a version whose workers have died, because no record mentions it.
    """
    records = list(records)
    for number, version in scheduler.versions().items():
        if _is_unloaded(number, records):
            version.failures.update(dict.fromkeys(version.failures, 0))


def _is_unloaded(number: int, records: Sequence[ModelRecord]) -> bool:
    states = [record.versions[number].state for record in records if number in record.versions]
    return bool(states) and all(state in _UNLOADED_STATES for state in states)
