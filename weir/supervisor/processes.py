"""How many processes `weir serve` runs of each role (`count_processes`), and on which processors (`divide_processors`).

The shares of `auto` follow from the CPU that a small request costs in each role (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from weir.options import UsageError
from weir.options.values import AUTO

PROCESSORS_PER_GATEWAY = PROCESSORS_PER_WORKER = PROCESSORS_PER_NATS_THREAD = 4
PROCESSORS_PER_SCHEDULER = 8
MAX_AUTO = 8
"""The most processes of one role that `auto` starts; more must be asked for."""


class ProcessCounts(NamedTuple):
    """The number of processes of each role."""

    gateways: int
    schedulers: int
    workers: int


class ProcessorShares(NamedTuple):
    """The numbers of the processors that each worker uses alone, and of those that all other processes share."""

    workers: tuple[frozenset[int], ...]
    others: frozenset[int]


def count_processes(values: Mapping[str, Any], processors: int, gpus: int) -> ProcessCounts:
    """The counts by the options `gateways`, `schedulers` and `workers`, on a host with these processors and GPUs.

    Raises UsageError for fewer workers than GPUs: each GPU has one worker, unless one worker has all.
    """
    workers = values["workers"]
    if workers is None:
        workers = max(1, gpus)
    elif workers == AUTO:
        workers = gpus or _share(processors, PROCESSORS_PER_WORKER)
    elif 1 < workers < gpus:
        raise UsageError(
            f"--workers={workers} is rejected: this host has {gpus} GPUs, so it must be 1 or at least {gpus}"
        )
    gateways, schedulers = values["gateways"], values["schedulers"]
    return ProcessCounts(
        _share(processors, PROCESSORS_PER_GATEWAY) if gateways == AUTO else gateways,
        _share(processors, PROCESSORS_PER_SCHEDULER) if schedulers == AUTO else schedulers,
        workers,
    )


def _share(processors: int, per_process: int) -> int:
    return min(MAX_AUTO, max(1, processors // per_process))


def divide_processors(
    reserved: int | str, processors: Sequence[int], quota: int, counts: ProcessCounts
) -> ProcessorShares | None:
    """Which processors each worker uses alone, if `reserved` (`--worker-processors`) are for workers only; None for 0.

    `processors` are neighbours when they share a core; each worker gets neighbours. With `AUTO` one processor is left for
    each gateway, scheduler and thread of nats-server, but no more than half of all; and none is reserved if fewer may be
    used at a time (`quota`): another container with a quota would reserve the same ones. Raises UsageError unless each
    worker and the other processes have at least one.
    """
    if reserved == AUTO:
        if quota < len(processors):
            return None
        threads = counts.gateways + counts.schedulers + max(1, len(processors) // PROCESSORS_PER_NATS_THREAD)
        reserved = max(counts.workers, len(processors) - min(threads, len(processors) // 2))
        if reserved >= len(processors):
            return None  # too few to divide
    assert isinstance(reserved, int)  # noqa: S101
    if not reserved:
        return None
    if not counts.workers <= reserved < len(processors):
        raise UsageError(
            f"--worker-processors={reserved} is rejected: it must be at least the number of workers "
            f"({counts.workers}), and less than that of processors ({len(processors)})"
        )
    others, own = processors[: len(processors) - reserved], processors[len(processors) - reserved :]
    bounds = [reserved * number // counts.workers for number in range(counts.workers + 1)]
    shares = tuple(frozenset(own[first:last]) for first, last in pairwise(bounds))
    return ProcessorShares(shares, frozenset(others))
