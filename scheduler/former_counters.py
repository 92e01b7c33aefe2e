"""`FormerCounters`: what a scheduler has counted of queues that it has handed over, which stays in the sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from bus.live_queues import LiveQueue
from scheduler.counters import DispatchCounters
from scheduler.owned_model import OwnedModel
from schemas.registry import ModelRecord, ModelState

_NOTHING_LEFT = (ModelState.UNLOADING, ModelState.UNAVAILABLE)


class FormerCounters:
    """See the module. What waits is its next owner's to tell: of these queues there is nothing here."""

    def __init__(self) -> None:
        self._dispatched: dict[LiveQueue, DispatchCounters] = {}
        self._failures: dict[str, dict[int, Counter[str]]] = {}  # of versions, by model

    def dropped(self, owned: OwnedModel) -> None:
        """The queue is another's from now on."""
        self._dispatched[owned.queue] = owned.counters
        of_model = self._failures.setdefault(owned.name, {})
        for number, version in owned.scheduler.versions().items():
            of_model.setdefault(number, Counter()).update(version.failures)

    def taken_again(self, queue: LiveQueue) -> DispatchCounters | None:
        """What was counted of a queue that is owned again, which goes on from there; None of one that is new."""
        return self._dispatched.pop(queue, None)

    def follow(self, model: str, records: Sequence[ModelRecord]) -> None:
        """Failures of versions that were unloaded are forgotten, as `scheduler.counters.forget_unloaded` does."""
        versions = self._failures.get(model)
        for number in list(versions or ()):
            states = [record.versions[number].state for record in records if number in record.versions]
            if versions and states and all(state in _NOTHING_LEFT for state in states):
                del versions[number]

    def told(self) -> list[dict[str, Any]]:
        """All of it, in the form of `schemas.statistics.QueueCounters`."""
        rows: dict[str, dict[str, Any]] = {}
        told = [_row(queue.model, counters) for queue, counters in self._dispatched.items()]
        for model, versions in self._failures.items():
            if versions:
                rows[model] = _row(model, DispatchCounters())
                rows[model]["versions"] = [
                    {"version": number, "pending": 0, "failures": dict(failures)}
                    for number, failures in versions.items()
                ]
        return told + list(rows.values())


def _row(model: str, counters: DispatchCounters) -> dict[str, Any]:
    return {
        "model": model,
        "lanes": {},
        "versions": [],
        "redelivered_frames": counters.redelivered_frames,
        "redone_batches": counters.redone_batches,
        "batch_requests": counters.batch_requests.snapshot(),
    }
