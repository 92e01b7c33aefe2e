"""What a scheduler counts of its models, and what it tells when it is asked (`schemas.statistics.QueueCounters`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from runtime.health import process_health
from scheduler.model_scheduler import ModelScheduler
from schemas.lanes import Lane
from schemas.registry import ModelRecord, ModelState
from schemas.statistics import pack_counters
from telemetry.histogram import SizeHistogram
from telemetry.process_usage import process_usage


class DispatchCounters:
    """Of one model: batches by the requests they were sent with, batches done again, and frames delivered again."""

    __slots__ = ("_first_delivery", "batch_requests", "redelivered_frames", "redone_batches")

    def __init__(self) -> None:
        self.batch_requests = SizeHistogram()
        self.redone_batches = 0
        self.redelivered_frames = 0
        self._first_delivery = " "  # how the ack subjects of frames begin that the queue's consumer delivers first

    def frame_came(self, ack_subject: str) -> None:
        """A frame was pulled; its ack subject tells how often it has been delivered."""
        if ack_subject.startswith(self._first_delivery):
            return
        # $JS.ACK.<stream>.<consumer>.<delivered>.…, with <domain>.<account> before the stream since protocol 2.
        tokens = ack_subject.split(".")
        delivered = 4 if len(tokens) < 11 else 6
        if len(tokens) >= 9 and tokens[delivered] != "1":
            self.redelivered_frames += 1
        elif len(tokens) >= 9:
            self._first_delivery = ".".join(tokens[: delivered + 1]) + "."


def model_counters(scheduler: ModelScheduler, counters: DispatchCounters, now_us: int) -> dict[str, Any]:
    """The model's part of the answer, in the form of `QueueCounters`."""
    return {
        "model": scheduler.name,
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
        "redelivered_frames": counters.redelivered_frames,
        "redone_batches": counters.redone_batches,
        "batch_requests": counters.batch_requests.snapshot(),
    }


def _lane_counters(scheduler: ModelScheduler, lane: int, now_us: int) -> dict[str, int]:
    depth = scheduler.waiting_in(lane)
    oldest_us = scheduler.oldest_us(lane) if depth else None
    return {"depth": depth, "oldest_us": 0 if oldest_us is None else max(0, now_us - oldest_us)}


def pack_scheduler(
    id: str, born_ns: int, models: list[dict[str, Any]], malformed_messages: int, leaving: bool
) -> bytes:
    """The answer of a scheduler: `models` are `model_counters`, `leaving` says that it is the last."""
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


def forget_unloaded(scheduler: ModelScheduler, records: Iterable[ModelRecord]) -> None:
    """Failures of a version that its workers have unloaded are forgotten: it starts at zero when it is loaded again.

    A version whose workers have died is none of those: no record speaks of it.
    """
    records = list(records)
    for number, version in scheduler.versions().items():
        states = [record.versions[number].state for record in records if number in record.versions]
        if states and all(state in (ModelState.UNLOADING, ModelState.UNAVAILABLE) for state in states):
            version.failures.update(dict.fromkeys(version.failures, 0))
