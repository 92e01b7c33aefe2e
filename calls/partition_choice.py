"""Which of a model's queues takes a request: the way that a caller chooses partitions.

A request of a sequence goes where its correlation id says (`schemas.partitions`). Any other may go anywhere, and what
leaves together stays together as far as it makes sense: `PartitionChoice` decides.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from bus.live_queues import LiveQueue
from schemas.model_config import ModelConfig
from schemas.partitions import partition_of, partitions_of


class AnyQueue(NamedTuple):
    """Whichever queue of a model with several. A full batch has `batch` requests, and with `waits` one is waited for."""

    model: str
    partitions: int
    batch: int
    waits: bool

    def __str__(self) -> str:
        return self.model


Destination = str | LiveQueue | AnyQueue
"""Where a request is to go. A model that has one queue is named by itself, which costs nothing."""


def destination_of(model: str, config: ModelConfig) -> str | AnyQueue:
    """Where requests go that are of no sequence. `model` is its identity."""
    partitions = partitions_of(config)
    if partitions == 1:
        return model
    batching = config.dynamic_batching
    waits = batching is not None and batching.max_queue_delay_microseconds > 0
    return AnyQueue(model, partitions, max(1, config.max_batch_size), waits)


def queue_of_sequence(queues: AnyQueue, correlation_id: int | str) -> LiveQueue:
    """Where the requests of a sequence go."""
    return LiveQueue(queues.model, partition_of(correlation_id, queues.partitions))


class PartitionChoice:
    """The requests that one caller has under way for one model, by partition; chooses for those that come next.

    They go where fewest are under way. A model that waits for its batches to fill is asked in one partition until a batch
    is full there. While little is under way one partition has all of it: another one for each caller, or all would crowd
    in the first. No clock, no IO.
    """

    __slots__ = ("_order", "_under_way", "queues")

    def __init__(self, queues: AnyQueue, caller: str = "") -> None:
        self.queues = queues
        home = int.from_bytes(hashlib.blake2s(caller.encode(), digest_size=8).digest(), "big")
        self._order = [(home + step) % queues.partitions for step in range(queues.partitions)]
        self._under_way = [0] * queues.partitions

    def piece(self, requests: int) -> int:
        """How many of so many requests that leave now go to one partition: all, unless they are more than a batch."""
        return max(self.queues.batch, -(-requests // self.queues.partitions))

    def take(self, requests: int) -> int:
        """The partition for so many requests, which are under way from now on."""
        under_way, batch = self._under_way, self.queues.batch if self.queues.waits else 1
        chosen = min(self._order, key=lambda partition: under_way[partition] // batch)
        under_way[chosen] += requests
        return chosen

    def end(self, partition: int) -> None:
        """One of the requests of that partition is over."""
        self._under_way[partition] -= 1

    def under_way(self) -> list[int]:
        """How many requests each partition has."""
        return list(self._under_way)


class PlaceInPartition:
    """What a request holds until it is over (`calls.payload_store.Freeable`): its place among those under way."""

    __slots__ = ("_choice", "_partition")

    def __init__(self, choice: PartitionChoice, partition: int) -> None:
        self._choice = choice
        self._partition = partition

    def free(self) -> None:
        """The request is over."""
        self._choice.end(self._partition)
