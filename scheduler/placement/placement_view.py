"""`PlacementView`: what the registry's records of a model mean for its queue; `divide_instances`: its partitions.

A version that is being unloaded still runs what is queued for it, until its worker is allowed to unload it. A version
that no worker has or will have is *withdrawn*: its waiting requests fail at once. A worker that has died does not
withdraw a version, and neither does one on which the model is not placed: requests for its versions wait on.

A model with several partitions has one queue for each, and its instances are divided between them. Each scheduler
computes the division for the partitions it owns from the registry's records alone, so all agree without
communication. Promises:

- while there are at least as many instances as partitions, each instance belongs to exactly one partition, and each
  partition has at least one instance; none has more than a quarter above its even share (rounded up);
- the division depends only on the set of instances, not on who computes it or on the order of the records;
- a worker that joins or leaves moves few instances of others: none if all workers have the same multiple of the
  number
  of partitions as instances, otherwise at most about as many as it has itself.

With fewer instances than partitions, an instance is shared by several partitions, and each has one. An instance that
keeps the state of sequences can not be shared, because its slots would be assigned twice: then only as many
partitions as there are instances have one. Workers refuse to load a stateful model with fewer instances than
partitions, so this state is short, and requests wait meanwhile. No clock, no IO.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from weir.schemas.wire.registry import MAX_INSTANCES, ModelRecord, ModelState

Released = Collection[tuple[str, int]]
"""(worker, version) pairs that workers have been allowed to unload."""


@dataclass(frozen=True, slots=True)
class PlacementView:
    """The instances of a model by worker and version, their `numbers`, and the state of its versions.

    `retiring` versions still run, but new requests for the latest version go to others. `given_up` are the versions
    that no worker has any more; `is_withdrawn` means that for the whole model.
    """

    instances: dict[str, dict[int, int]]
    numbers: dict[str, dict[int, Sequence[int]]]
    retiring: frozenset[int]
    given_up: frozenset[int]
    is_withdrawn: bool

    def held_by(self, worker: str) -> tuple[dict[int, int], dict[int, Sequence[int]]]:
        """Returns how many instances of each version `worker` holds, and their numbers."""
        return self.instances.get(worker, {}), self.numbers.get(worker, {})


def placement_view(records: Mapping[str, ModelRecord], released: Released) -> PlacementView:
    """Returns the view for the records of live workers. Raises ValueError for an impossible number of instances."""
    ready: set[int] = set()
    retiring: set[int] = set()
    placed: set[int] = set()
    coming: set[int] = set()
    for worker, record in records.items():
        for number, version in record.versions.items():
            if type(version.instances) is not int or not 0 <= version.instances <= MAX_INSTANCES:
                raise ValueError(f"the number of instances is {version.instances!r}, not 0 to {MAX_INSTANCES}")
            if not record.elsewhere:
                placed.add(number)
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
    is_reported = any(record.is_known and not record.elsewhere for record in records.values())
    return PlacementView(instances, numbers, frozenset(retiring), frozenset(placed - alive), is_reported and not alive)


def is_unloading(record: ModelRecord, version: int) -> bool:
    """Whether the record's worker is unloading this version."""
    row = record.versions.get(version)
    return row is not None and row.state == ModelState.UNLOADING


def partition_view(
    ahead: PlacementView, records: Mapping[str, ModelRecord], partition: int, partitions: int
) -> PlacementView:
    """Returns `ahead` with only the instances of `partition`, one of `partitions`.

    `ahead` may leave out instances that a worker was allowed to unload for this partition. The division covers all
    recorded instances, so that the owners of other partitions divide the same set. Raises ValueError as
    `placement_view` does.
    """
    everything = placement_view(records, ())
    by_version: dict[int, list[InstanceKey]] = defaultdict(list)
    exclusive: dict[int, bool] = {}
    for worker, of_worker in everything.numbers.items():
        keeps_states = (records[worker].config or {}).get("sequence_batching") is not None
        for version, of_version in of_worker.items():
            by_version[version] += [(worker, number) for number in of_version]
            exclusive[version] = exclusive.get(version, False) or keeps_states
    shares = {
        version: share_of(
            divide_instances(frozenset(of), partitions, exclusive[version]), partition, exclusive[version]
        )
        for version, of in by_version.items()
    }
    numbers: dict[str, dict[int, Sequence[int]]] = {
        worker: {
            version: tuple(number for number in of_version if (worker, number) in shares[version])
            for version, of_version in of_worker.items()
        }
        for worker, of_worker in ahead.numbers.items()
    }
    instances = {worker: {v: len(of) for v, of in of_worker.items()} for worker, of_worker in numbers.items()}
    return replace(ahead, instances=instances, numbers=numbers)


InstanceKey = tuple[str, int]
"""(worker, number of the instance there)"""

PartitionShares = tuple[frozenset[InstanceKey], ...]
"""The instances of each partition."""


@lru_cache(maxsize=256)
def divide_instances(instances: frozenset[InstanceKey], partitions: int, exclusive: bool = False) -> PartitionShares:
    """Divides `instances` between `partitions`. With `exclusive`, no instance is ever in two shares."""
    if len(instances) < partitions:
        return _too_few(sorted(instances, key=_rank), partitions, exclusive)
    most = -(-5 * len(instances) // (4 * partitions))  # slack: without any, each change would move many instances
    shares: list[list[InstanceKey]] = [[] for _ in range(partitions)]
    left = sorted(instances, key=_rank)
    for step in range(partitions):
        still_left: list[InstanceKey] = []
        for instance in left:
            share = shares[(_home(instance, partitions) + step) % partitions]
            (share if len(share) < most else still_left).append(instance)
        left = still_left
        if not left:
            break
    least = max(1, len(instances) // (2 * partitions))
    for share in shares:
        while len(share) < least:
            share.append(max(shares, key=len).pop())
    return tuple(map(frozenset, shares))


def _too_few(instances: list[InstanceKey], partitions: int, exclusive: bool) -> PartitionShares:
    """Gives each partition one instance in turn; an exclusive instance only once."""
    shares: list[frozenset[InstanceKey]] = []
    for partition in range(partitions):
        has_one = bool(instances) and (not exclusive or partition < len(instances))
        shares.append(frozenset([instances[partition % len(instances)]] if has_one else ()))
    return tuple(shares)


def share_of(shares: PartitionShares, partition: int, exclusive: bool) -> frozenset[InstanceKey]:
    """Returns the share of a partition. One that remains from a larger number of partitions shares another's, or
    nothing.
    """
    if partition >= len(shares) and exclusive:
        return frozenset()
    return shares[partition % len(shares)]


def _home(instance: InstanceKey, partitions: int) -> int:
    """Returns the partition where an instance belongs if there is room; consecutive instances of a worker go around."""
    worker, number = instance
    return (_digest(worker) + number) % partitions


def _rank(instance: InstanceKey) -> tuple[int, InstanceKey]:
    """Sort key for instances competing for room: independent of the order in which they joined."""
    worker, number = instance
    return (_digest(worker) * 0x9E3779B97F4A7C15 + number * 0xC2B2AE3D27D4EB4F) & (1 << 64) - 1, instance


@lru_cache(maxsize=8192)
def _digest(worker: str) -> int:
    return int.from_bytes(hashlib.blake2s(worker.encode(errors="surrogatepass"), digest_size=8).digest(), "big")
