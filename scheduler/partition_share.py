"""`divide`: which partition of a model has which of its instances.

Each scheduler computes this for the partitions it owns, from the registry's records alone, and so all agree without asking
anybody. Promises:
- while there are at least as many instances as partitions, each instance belongs to exactly one partition, and each
  partition has at least one instance; none has more than a quarter above its even share (rounded up);
- the same instances are divided in the same way, whoever computes it and in whatever order they are told;
- a worker that comes or goes moves few instances of others: none at all where workers have a multiple of as many
  instances as there are partitions, otherwise about as many as it has itself, at most.

With fewer instances than partitions, an instance is shared by several, and each partition has one. An instance that keeps
the state of sequences can't be shared, for its slots would be given away twice: then only as many partitions as there are
instances have any. Workers refuse to load a model of sequences with fewer instances than it has partitions, so this is so
for moments only, and what waits meanwhile waits on. No clock, no IO.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

Instance = tuple[str, int]
"""The worker, and the number of the instance there."""

Shares = tuple[frozenset[Instance], ...]
"""The instances of each partition."""


@lru_cache(maxsize=256)
def divide(instances: frozenset[Instance], partitions: int, exclusive: bool = False) -> Shares:
    """See the module. With `exclusive` no instance is ever in two shares."""
    if len(instances) < partitions:
        return _too_few(sorted(instances, key=_rank), partitions, exclusive)
    most = -(-5 * len(instances) // (4 * partitions))  # a little slack: without any, each change would move many
    shares: list[list[Instance]] = [[] for _ in range(partitions)]
    left = sorted(instances, key=_rank)
    for step in range(partitions):
        still_left: list[Instance] = []
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


def _too_few(instances: list[Instance], partitions: int, exclusive: bool) -> Shares:
    """One instance for each partition, by turns; an exclusive one only the first time."""
    shares: list[frozenset[Instance]] = []
    for partition in range(partitions):
        has_one = bool(instances) and (not exclusive or partition < len(instances))
        shares.append(frozenset([instances[partition % len(instances)]] if has_one else ()))
    return tuple(shares)


def share_of(shares: Shares, partition: int, exclusive: bool) -> frozenset[Instance]:
    """The share of a partition; one that is left from a time when there were more shares that of another, or nothing."""
    if partition >= len(shares) and exclusive:
        return frozenset()
    return shares[partition % len(shares)]


def _home(instance: Instance, partitions: int) -> int:
    """Where an instance belongs if there is room: the instances of a worker go around."""
    worker, number = instance
    return (_digest(worker) + number) % partitions


def _rank(instance: Instance) -> tuple[int, Instance]:
    """Who comes first where there isn't room for all: an order that has nothing to do with who came when."""
    worker, number = instance
    return (_digest(worker) * 0x9E3779B97F4A7C15 + number * 0xC2B2AE3D27D4EB4F) & (1 << 64) - 1, instance


@lru_cache(maxsize=8192)
def _digest(worker: str) -> int:
    return int.from_bytes(hashlib.blake2s(worker.encode(errors="surrogatepass"), digest_size=8).digest(), "big")
