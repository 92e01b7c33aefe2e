"""Metrics of load: how busy instances are, and how many workers there should be.

Schedulers measure; a gateway adds up what it is told of a model's queues. So all gateways tell the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import ceil

from calls.inference import Inference
from gateway.metrics.text import NO_LABELS, Family, Labels, Sample, counter, gauge
from runtime.memory_ledger import MemoryLedger
from schemas.statistics import LoadCounters, QueueCounters

_ROUNDING = 1e-6  # fractions that schedulers tell are sums of floats


def load_families(
    queues: Iterable[QueueCounters], served: Mapping[str, Labels], workers: Mapping[str, int]
) -> Iterator[Family]:
    """Of the models that are `served`, their labels by identity; `workers` of them that serve each."""
    loads: dict[str, list[LoadCounters]] = {model: [] for model in sorted(served)}
    for queue in queues:
        if queue.load is not None and queue.model in loads:
            loads[queue.model].append(queue.load)
    known = {model: of for model, of in loads.items() if of}
    yield gauge(
        "weir_queue_expected_wait_us",
        "How long a live request that comes now is expected to wait in microseconds",
        (Sample(served[model], max(load.expected_wait_us for load in of)) for model, of in known.items()),
    )
    yield gauge(
        "weir_workers",
        "Workers that serve the model",
        (Sample(served[model], workers.get(model, 0)) for model in loads),
    )
    yield gauge(
        "weir_instances",
        "Instances of the model that take batches",
        (Sample(served[model], sum(load.instances for load in of)) for model, of in known.items()),
    )
    yield gauge(
        "weir_worker_utilization",
        "Share of the time in which the model's instances were busy [0.0 - 1.0]",
        (Sample(served[model], _utilization(of)) for model, of in known.items()),
    )
    yield gauge(
        "weir_cluster_utilization",
        "Share of the time in which instances were busy [0.0 - 1.0]",
        [Sample(NO_LABELS, _utilization([load for of in known.values() for load in of]))],
    )
    yield gauge(
        "weir_desired_workers",
        "Workers that the model should have for its load",
        (
            Sample(served[model], max(0, ceil(sum(load.desired_workers for load in of) - _ROUNDING)))
            for model, of in known.items()
        ),
    )
    yield counter(
        "weir_refused_requests",
        "Requests that were refused because too many waited at their scheduler already",
        (
            Sample({**served[model], "reason": reason}, sum(load.refused.get(reason, 0) for load in of))
            for model, of in known.items()
            for reason in ("queue", "wait")
        ),
    )


def refusal_family(inference: Inference, ledger: MemoryLedger) -> Family:
    """What this gateway has refused itself."""
    refused = {"received": sum(ledger.refused.values()), **inference.refused}
    return counter(
        "weir_gateway_refused_requests",
        "Requests that this gateway refused because it, the broker or their queue held too many already",
        (Sample({"reason": reason}, requests) for reason, requests in refused.items()),
    )


def memory_families(ledger: MemoryLedger) -> Iterator[Family]:
    """The memory ledger of this gateway."""
    yield gauge(
        "weir_memory_ledger_bytes",
        "Memory that holds what clients have sent, or have not read yet, in bytes",
        (Sample({"kind": kind}, held_bytes) for kind, held_bytes in sorted(ledger.held_bytes.items())),
    )
    yield gauge(
        "weir_memory_ledger_peak_bytes",
        "The most that the memory ledger has held at once in bytes",
        [Sample(NO_LABELS, ledger.peak_bytes)],
    )
    yield gauge(
        "weir_memory_ledger_limit_bytes",
        "The most that the memory ledger may hold in bytes",
        [Sample(NO_LABELS, ledger.limit_bytes)],
    )
    yield counter(
        "weir_memory_ledger_refusals",
        "Requests, messages and responses for which the memory ledger had no room",
        (Sample({"kind": kind}, refusals) for kind, refusals in sorted(ledger.refused.items())),
    )


def _utilization(loads: list[LoadCounters]) -> float:
    instances = sum(load.instances for load in loads)
    return round(sum(load.utilization * load.instances for load in loads) / instances, 4) if instances else 0.0
