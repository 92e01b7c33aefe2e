"""`Outlook`: what the registry's records of one model, taken together, mean for its queue.

Versions that are being unloaded still run what is queued for them, until their worker is let go; a version that no
worker has or will have is given up, and what waits for it fails at once. A worker that has died tells nothing, and one that
the model is not for gives nothing up: what waits for it waits on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from schemas.registry import MAX_INSTANCES, ModelRecord, ModelState

Released = Collection[tuple[str, int]]
"""(worker, version) of what a worker was given leave to unload."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """`instances` by worker and version, and their `numbers`.

    Versions that are `retiring` run on, but new requests for the latest one go to others. `given_up` are the
    versions nobody has any more, `is_given_up` says that of the whole model.
    """

    instances: dict[str, dict[int, int]]
    numbers: dict[str, dict[int, Sequence[int]]]
    retiring: frozenset[int]
    given_up: frozenset[int]
    is_given_up: bool

    def held_by(self, worker: str) -> tuple[dict[int, int], dict[int, Sequence[int]]]:
        """How many instances of each version `worker` holds, and the numbers of those of each."""
        return self.instances.get(worker, {}), self.numbers.get(worker, {})


def outlook(records: Mapping[str, ModelRecord], released: Released) -> Outlook:
    """The outlook by the records of live workers. Raises ValueError for a number of instances that can't be."""
    ready: set[int] = set()
    retiring: set[int] = set()
    known: set[int] = set()
    coming: set[int] = set()
    for worker, record in records.items():
        for number, version in record.versions.items():
            if type(version.instances) is not int or not 0 <= version.instances <= MAX_INSTANCES:
                raise ValueError(f"{version.instances!r} instances")
            if not record.elsewhere:
                known.add(number)
            if version.state == ModelState.READY:
                ready.add(number)
            elif version.state == ModelState.LOADING:
                coming.add(number)
            elif version.state == ModelState.UNLOADING and (worker, number) not in released:
                retiring.add(number)
    retiring -= ready
    alive = ready | retiring | coming
    instances = {
        worker: {
            number: version.instances
            for number, version in record.versions.items()
            if version.instances
            and (
                version.state == ModelState.READY
                or (version.state == ModelState.UNLOADING and number in retiring and (worker, number) not in released)
            )
        }
        for worker, record in records.items()
        if record.config is not None
    }
    numbers = {
        worker: {number: records[worker].versions[number].instance_numbers for number in counts}
        for worker, counts in instances.items()
    }
    is_told_of = any((record.versions or record.reason) and not record.elsewhere for record in records.values())
    return Outlook(instances, numbers, frozenset(retiring), frozenset(known - alive), is_told_of and not alive)


def is_unloading(record: ModelRecord, version: int) -> bool:
    """Whether the record's worker unloads this version."""
    row = record.versions.get(version)
    return row is not None and row.state == ModelState.UNLOADING
