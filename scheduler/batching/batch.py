"""`Batch`: requests that run together; `BatchesInFlight`: batches sent and not ended; `BatchReconciler`: lost ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct

from weir.scheduler.batching.request import QueuedRequest
from weir.scheduler.placement.instances import Instance
from weir.schemas.wire.batches import SequencePosition
from weir.schemas.wire.observation import BatchReason
from weir.schemas.wire.registry import Heartbeat


class Batch(Struct, eq=False):
    """Requests that one instance of a version runs together.

    `padding_rows` are the positions of padding rows, ascending: a sequence batcher keeps each sequence at the row of
    its slot. `places` holds one place for each request of a sequence. `has_deadlines`: some requests may have a
    deadline. `released`: the instance has received another batch while responses of this one are still to come.
    `is_batch_lane`: all requests are of the batch lane. `has_lanes`: the batch is for an ensemble, whose steps inherit
    the lanes of its requests. `reason` is why it was sent, for observers.
    """

    id: int
    version: int
    instance: Instance
    requests: list[QueuedRequest]
    padding_rows: Sequence[int] = ()
    places: Sequence[SequencePosition] = ()
    has_deadlines: bool = True
    released: bool = False
    is_batch_lane: bool = False
    has_lanes: bool = False
    reason: BatchReason = BatchReason.FREE

    def __repr__(self) -> str:
        return f"Batch({self.id}, {self.version}, {self.instance}, {self.requests})"


class BatchesInFlight:
    """Batches that were sent to workers and have not ended, in the order in which they were sent."""

    __slots__ = ("_batches", "_by_worker")

    def __init__(self) -> None:
        self._batches: dict[int, Batch] = {}
        self._by_worker: defaultdict[str, dict[int, None]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches.values())

    def add(self, batch: Batch) -> None:
        """Adds a batch that has been sent."""
        self._batches[batch.id] = batch
        self._by_worker[batch.instance.worker][batch.id] = None

    def get(self, batch_id: int) -> Batch | None:
        """Returns the batch of this id, or None."""
        return self._batches.get(batch_id)

    def pop(self, batch_id: int) -> Batch | None:
        """Removes and returns the batch of this id, which has ended; None if there is none."""
        batch = self._batches.pop(batch_id, None)
        if batch is not None:
            del self._by_worker[batch.instance.worker][batch_id]
        return batch

    def on(self, worker: str) -> list[int]:
        """Returns the ids of the batches that `worker` holds, oldest first."""
        return list(self._by_worker.get(worker, ()))

    @property
    def staged(self) -> int:
        """Requests in batches that wait at their instance behind the one it executes."""
        executing: set[Instance] = set()
        staged = 0
        for batch in self._batches.values():
            if not batch.released:
                staged += len(batch.requests) if batch.instance in executing else 0
                executing.add(batch.instance)
        return staged

    def forget(self, worker: str) -> None:
        """Removes a lost worker, whose batches were all popped."""
        self._by_worker.pop(worker, None)


class BatchReconciler:
    """Finds batches that were lost on the way: those that a worker's heartbeats do not list twice in a row.

    `scheduler` is the id under which heartbeats list the batches of this scheduler.
    """

    def __init__(self, scheduler: str) -> None:
        self._scheduler = scheduler
        self._missing: dict[str, set[int]] = {}  # batches that a worker's last heartbeat did not list

    def lost(self, heartbeat: Heartbeat, in_flight: Callable[[str], Iterable[int]]) -> set[int]:
        """Returns the batches that are lost, of those `in_flight` on the worker that sent `heartbeat`."""
        held = heartbeat.batches.get(self._scheduler, [])
        missing = {batch_id for batch_id in in_flight(heartbeat.worker) if batch_id not in held}
        lost = missing & self._missing.get(heartbeat.worker, set())
        self._missing[heartbeat.worker] = missing - lost
        return lost

    def forget(self, worker: str) -> None:
        """Forgets a worker that is gone."""
        self._missing.pop(worker, None)

    def clear(self) -> None:
        """Forgets everything: heartbeats and ends of batches may have been missed."""
        self._missing.clear()
