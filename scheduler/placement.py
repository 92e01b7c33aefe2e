"""`Placement`: which instance, of all workers that hold a model version, takes the next batch.

Each instance has two slots: one batch executes, one is staged behind it, so that the device need not wait for the bus
between two batches. A staged batch can't grow any more, so a batch that still could is staged only shortly before the
instance is expected to be free; a full one at once. Idle instances come first, the one idle for longest first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

STAGING_LEAD_US = 500
"""How long before the expected end of the executing batch one that could still grow is staged behind it."""

_SLOTS = 2
_SMOOTHING = 0.2


class Instance(NamedTuple):
    """One instance of the model version on one worker."""

    worker: str
    number: int


class Placement:
    """The slots of all instances of one model version. Times are microseconds."""

    def __init__(self) -> None:
        # Batches that each instance holds, with the time each is taken to have begun. Dictionaries keep the order in
        # which keys were put in: an instance is put in again when it becomes idle, so the first is idle for longest.
        self._idle: dict[Instance, None] = {}
        self._busy: dict[Instance, dict[int, int]] = {}
        self._expected_us = 0.0

    def __len__(self) -> int:
        return len(self._idle) + len(self._busy)

    def instances_of(self, worker: str) -> list[Instance]:
        """The instances of one worker."""
        return [instance for instance in (*self._idle, *self._busy) if instance.worker == worker]

    def workers(self) -> set[str]:
        """Workers that hold an instance."""
        return {instance.worker for instance in (*self._idle, *self._busy)}

    def set_instances(self, worker: str, count: int) -> None:
        """`worker` now has `count` instances; one that is taken away finishes the batches it holds."""
        known = self.instances_of(worker)
        for number in range(count):
            instance = Instance(worker, number)
            if instance not in known:
                self._idle[instance] = None
        for instance in known:
            if instance.number >= count:
                self._idle.pop(instance, None)
                self._busy.pop(instance, None)

    def idle(self) -> Instance | None:
        """The instance that has been idle for longest."""
        return next(iter(self._idle), None)

    def stageable(self) -> Instance | None:
        """A busy instance with a free slot: the one that will be free first."""
        best: Instance | None = None
        best_end = 0
        for instance, batches in self._busy.items():
            if len(batches) < _SLOTS:
                begun = next(iter(batches.values()))
                if best is None or begun < best_end:
                    best, best_end = instance, begun
        return best

    def may_stage_partial(self, instance: Instance, now_us: int) -> bool:
        """Whether `instance` will be free so soon that a batch that could still grow should be staged now."""
        wake = self._stage_partial_at_us(instance)
        return wake is not None and now_us >= wake

    def wake_at_us(self) -> int | None:
        """When `may_stage_partial` next turns true for some instance with a free slot."""
        times = [
            wake
            for instance, batches in self._busy.items()
            if len(batches) < _SLOTS and (wake := self._stage_partial_at_us(instance)) is not None
        ]
        return min(times, default=None)

    def occupy(self, instance: Instance, batch_id: int, now_us: int) -> None:
        """`instance` holds one more batch."""
        if instance in self._idle:
            del self._idle[instance]
            self._busy[instance] = {batch_id: now_us}
        else:
            self._busy[instance][batch_id] = now_us

    def free(self, instance: Instance, batch_id: int, now_us: int, busy_us: int) -> None:
        """`instance` is done with a batch that took it `busy_us` (0: not known)."""
        if busy_us > 0:
            self._expected_us += _SMOOTHING * (busy_us - self._expected_us) if self._expected_us else busy_us
        batches = self._busy.get(instance)
        if batches is None or batches.pop(batch_id, None) is None:
            return
        if not batches:
            del self._busy[instance]
            self._idle[instance] = None
        else:
            # The staged batch begins only now.
            for staged in batches:
                batches[staged] = now_us

    def batches_of(self, worker: str) -> Iterator[int]:
        """Batches that the instances of `worker` hold, oldest first for each instance."""
        for instance, batches in list(self._busy.items()):
            if instance.worker == worker:
                yield from list(batches)

    def _stage_partial_at_us(self, instance: Instance) -> int | None:
        if self._expected_us < 2 * STAGING_LEAD_US:
            # So short a batch is over before waiting for it costs anything, and letting the next one grow saves more.
            return None
        begun = next(iter(self._busy[instance].values()))
        return begun + int(self._expected_us) - STAGING_LEAD_US
