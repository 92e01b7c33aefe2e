"""`measure`: the values of the page's charts and tables, from two readings of the counters of a cluster. Sans-IO."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

from weir.cluster.counters.devices import DeviceLoad
from weir.cluster.rates import QueueReading, Rates, Reading, rates_by_model, total_rates
from weir.console.history.series import Values

_NO_QUEUE = QueueReading()
_RATES = tuple(field.name for field in fields(Rates))


@dataclass(frozen=True, slots=True)
class Load:
    """The load between two readings, by column (`weir.console.history.series`): of the cluster, and of each model."""

    cluster: Values
    models: dict[str, Values]


def measure(before: Reading, after: Reading, devices: DeviceLoad, has_gateway: bool = True) -> Load:
    """The load between `before` and `after`. Without a gateway, rates of 0 are unknown: no client could send a request."""
    models = {
        name: _columns(rates, after.queues.get(name, _NO_QUEUE), has_gateway)
        for name, rates in rates_by_model(before, after).items()
    }
    cluster = _columns(total_rates(before, after), _all_queues(after.queues.values()), has_gateway)
    return Load({**cluster, **asdict(devices)}, models)


def _columns(rates: Rates, queue: QueueReading, has_gateway: bool) -> Values:
    # Durable requests are executed without a gateway too.
    is_known = has_gateway or rates.requests_per_s > 0
    return {
        **(asdict(rates) if is_known else dict.fromkeys(_RATES)),
        "queue_depth": queue.waiting,
        "queue_oldest_s": queue.oldest_s,
        "utilization": queue.utilization,
    }


def _all_queues(queues: Iterable[QueueReading]) -> QueueReading:
    every = QueueReading()
    for queue in queues:
        every.depth["all"] = every.depth.get("all", 0) + queue.waiting
        every.oldest_s = max(every.oldest_s, queue.oldest_s)
        every.instances += queue.instances
        every.busy_share += queue.busy_share
    return every
