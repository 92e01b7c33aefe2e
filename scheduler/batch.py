"""`Batch`: requests that run together, and `BatchesInFlight`: those of a version that have not ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from scheduler.placement import Instance
from scheduler.queued_request import QueuedRequest
from schemas.messages import SequencePlace


class Batch:
    """Requests that run together: of this version, on this instance.

    `null_rows` are the places in the batch, ascending, at which rows stand that are nobody's: a sequence batcher keeps
    each sequence at the row of its slot. `places` are there for requests of sequences, one for each. `has_deadlines`: some
    requests may have one. `released`: the instance has taken on another since, while answers of this batch are still to
    come. `is_series`: they are executed one after another, each alone. `is_alone`: all of
    its requests are of offline jobs. `tells_lanes`: it has steps, whose requests are of the lanes of its own.
    """

    __slots__ = (
        "has_deadlines",
        "id",
        "instance",
        "is_alone",
        "is_series",
        "null_rows",
        "places",
        "released",
        "requests",
        "tells_lanes",
        "version",
    )

    def __init__(self, id: int, version: int, instance: Instance, requests: list[QueuedRequest]) -> None:
        self.id = id
        self.version = version
        self.instance = instance
        self.requests = requests
        self.null_rows: Sequence[int] = ()
        self.places: Sequence[SequencePlace] = ()
        self.has_deadlines = True
        self.released = False
        self.is_series = False
        self.is_alone = False
        self.tells_lanes = False

    @property
    def still_in(self) -> list[QueuedRequest]:
        """Its requests, less those of a series that were handed back."""
        if not self.is_series:
            return self.requests
        return [request for request in self.requests if request.place == self.id]


class BatchesInFlight:
    """Batches that workers have been sent and have not ended; in the order in which they were sent."""

    __slots__ = ("_batches", "_by_worker")

    def __init__(self) -> None:
        self._batches: dict[int, Batch] = {}
        self._by_worker: defaultdict[str, dict[int, None]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches.values())

    def add(self, batch: Batch) -> None:
        """The batch has been sent."""
        self._batches[batch.id] = batch
        self._by_worker[batch.instance.worker][batch.id] = None

    def get(self, batch_id: int) -> Batch | None:
        """The batch of this id, if it is one of these."""
        return self._batches.get(batch_id)

    def pop(self, batch_id: int) -> Batch | None:
        """The same; it has ended."""
        batch = self._batches.pop(batch_id, None)
        if batch is not None:
            del self._by_worker[batch.instance.worker][batch_id]
        return batch

    def on(self, worker: str) -> list[int]:
        """Ids of those that `worker` has, oldest first."""
        return list(self._by_worker.get(worker, ()))

    def forget(self, worker: str) -> None:
        """The worker is gone, and has none any more."""
        self._by_worker.pop(worker, None)
