"""`SequenceStrategy`: which sequences of an instance run together, and at which rows of the batch.

Source: Triton's sequence batcher. *Direct* keeps each sequence at the row of its slot, and fills the rows of idle ones
before it with null rows; *oldest* takes those that are ready, the oldest first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler.batch import Batch
from scheduler.queued_request import QueuedRequest
from scheduler.sequence import Sequence as StatefulSequence
from scheduler.sequence import SlottedInstance
from schemas.model_config import ModelConfig


class SequenceBatch(Batch):
    """A batch with the sequence of each of its requests."""

    __slots__ = ("sequences",)

    instance: SlottedInstance

    def __init__(
        self,
        id: int,
        version: int,
        instance: SlottedInstance,
        requests: list[QueuedRequest],
        sequences: Sequence[StatefulSequence],
    ) -> None:
        super().__init__(id, version, instance, requests)
        self.sequences = sequences

    def requests_at(self, rows: Iterable[int]) -> list[QueuedRequest]:
        """The requests that stand at these rows, null rows counted."""
        found: list[QueuedRequest] = []
        for row in rows:
            index = row - sum(null_row < row for null_row in self.null_rows)
            if row not in self.null_rows and 0 <= index < len(self.requests):
                found.append(self.requests[index])
        return found


class SequenceStrategy:
    """The strategy of `config`, which has `sequence_batching`. An instance has so many `slots`. Times are microseconds."""

    def __init__(self, config: ModelConfig) -> None:
        batching = config.sequence_batching
        assert batching is not None  # noqa: S101 - others have no sequences
        self._max_batch_size = self.slots = max(1, config.max_batch_size)
        self._oldest = batching.oldest
        self._direct = batching.direct
        if self._oldest is not None:
            self.slots = self._oldest.max_candidate_sequences or self._max_batch_size
            self._preferred = frozenset(self._oldest.preferred_batch_size or (self._max_batch_size,))

    def choose(self, instance: SlottedInstance, now_us: int) -> tuple[list[StatefulSequence], int]:
        """The sequences whose next requests run now on the idle instance; none, and when to look again."""
        alike = instance.first_alike(self._max_batch_size)
        oldest_us = min(sequence.queue[0].enqueued_us for sequence in alike)
        if self._oldest is None:
            wanted = (self._direct.minimum_slot_utilization if self._direct else 0.0) * len(instance.slots)
            due_us = oldest_us + (self._direct.max_queue_delay_microseconds if self._direct else 0)
            is_due = len(alike) >= wanted or now_us >= due_us
            return (sorted(alike, key=lambda sequence: sequence.slot), 0) if is_due else ([], due_us)
        due_us = oldest_us + self._oldest.max_queue_delay_microseconds
        if len(alike) >= max(self._preferred) or now_us >= due_us:
            return alike, 0
        fitting = [size for size in self._preferred if size <= len(alike)]
        return (alike[: max(fitting)], 0) if fitting else ([], due_us)

    def null_rows(self, slots: Sequence[int]) -> list[int]:
        """The rows that nobody has in a batch of the sequences in these slots, ascending."""
        if self._oldest is not None or self._max_batch_size == 1:
            return []
        # A model may keep its states by row: each sequence stays at the row of its slot.
        return [row for row in range(slots[-1]) if row not in slots]
