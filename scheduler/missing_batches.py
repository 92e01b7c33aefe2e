"""`MissingBatches`: batches that workers do not know of, by their heartbeats: they, or their ends, were lost on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from schemas.registry import Heartbeat


class MissingBatches:
    """Of one scheduler, `scheduler`. A batch that its worker does not know twice in a row is lost."""

    def __init__(self, scheduler: str) -> None:
        self._scheduler = scheduler
        self._missing: dict[str, set[int]] = {}  # batches that a worker's last heartbeat did not name

    def lost(self, heartbeat: Heartbeat, in_flight: Callable[[str], Iterable[int]]) -> set[int]:
        """The batches that are lost, of those that are `in_flight` on the worker."""
        held = heartbeat.batches.get(self._scheduler, [])
        if not isinstance(held, list):
            return set()  # it says nothing about us
        missing = {batch_id for batch_id in in_flight(heartbeat.worker) if batch_id not in held}
        lost = missing & self._missing.get(heartbeat.worker, set())
        self._missing[heartbeat.worker] = missing - lost
        return lost

    def forget(self, worker: str) -> None:
        """The worker is gone."""
        self._missing.pop(worker, None)

    def clear(self) -> None:
        """Heartbeats were missed, and so were ends of batches."""
        self._missing.clear()
