"""What is left of an outlook for one partition of a model: the instances of its share (`scheduler.partition_share`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from scheduler.outlook import Outlook, outlook
from scheduler.partition_share import Instance, divide, share_of
from schemas.registry import ModelRecord


def shared_by(ahead: Outlook, records: Mapping[str, ModelRecord], partition: int, partitions: int) -> Outlook:
    """`ahead` with the instances of `partition` alone, one of so many that the model has.

    `ahead` may leave out what a worker was given leave to unload for this partition. Shares are of all that is there, or
    the owners of other partitions would divide something else. Raises ValueError as `outlook` does.
    """
    everything = outlook(records, ())
    by_version: dict[int, list[Instance]] = defaultdict(list)
    exclusive: dict[int, bool] = {}
    for worker, of_worker in everything.numbers.items():
        keeps_states = (records[worker].config or {}).get("sequence_batching") is not None
        for version, of_version in of_worker.items():
            by_version[version] += [(worker, number) for number in of_version]
            exclusive[version] = exclusive.get(version, False) or keeps_states
    shares = {
        version: share_of(divide(frozenset(of), partitions, exclusive[version]), partition, exclusive[version])
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
