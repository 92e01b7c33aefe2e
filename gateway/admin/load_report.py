"""`LoadReports`: the load of a model in a response header, for load balancers (ORCA, Open Request Cost Aggregation).

A client asks with `endpoint-load-metrics-format: text` or `json`. Source: Triton's ORCA metric reporting, which reports the
KV cache of a language model; the utilization and the queue are Weir's. The counters of all processes are queried at most
once in `MAX_AGE_S`, however many responses report them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import orjson

from weir.cluster.counters.collection import Statistics
from weir.schemas.core.names import plain_name
from weir.schemas.wire.statistics import FamilyCounters, LoadCounters, SchedulerCounters

REQUEST_HEADER = b"endpoint-load-metrics-format"
RESPONSE_HEADER = b"endpoint-load-metrics"

MAX_AGE_S = 1.0
"""How old the counters in a report may be."""

KV_CACHE_FAMILY = "nv_trt_llm_kv_cache_block_metrics"
"""The metric family, which models define, that describes a KV cache."""

_BLOCK_TYPE = "kv_cache_block_type"


class LoadReports:
    """Reports the load of models from the counters of all processes."""

    def __init__(self, statistics: Statistics, clock: Callable[[], float] = time.monotonic) -> None:
        self._statistics = statistics
        self._clock = clock
        self._queried_s = float("-inf")
        self._headers: dict[tuple[bytes, str], bytes] = {}  # of the counters as they are now

    @property
    def is_fresh(self) -> bool:
        """Whether the counters are new enough to be reported."""
        return self._clock() - self._queried_s <= MAX_AGE_S

    async def refresh(self) -> None:
        """Queries the counters, unless they are new enough."""
        if not self.is_fresh:
            await self._statistics.refresh()
            self._queried_s = self._clock()
            self._headers.clear()

    def header(self, wanted_format: bytes, model: str) -> bytes:
        """The report about `model`, by its identity; b"" in a format that is not known."""
        if wanted_format not in (b"text", b"json"):
            return b""
        known = self._headers.get((wanted_format, model))
        if known is not None:
            return known
        families = self._statistics.custom_metrics().to_counters()
        load, named = model_load(self._statistics.schedulers(), model), kv_cache(families, plain_name(model))
        report = as_text(load, named) if wanted_format == b"text" else as_json(load, named)
        self._headers[wanted_format, model] = report
        return report


def model_load(schedulers: Iterable[SchedulerCounters], model: str) -> dict[str, float]:
    """The utilization of the model's instances, and of all instances, and the model's queue."""
    queues = [queue for scheduler in schedulers for queue in scheduler.models if queue.load is not None]
    of_model = [queue for queue in queues if queue.model == model]
    loads = [queue.load for queue in of_model if queue.load is not None]
    return {
        "application_utilization": utilization(loads),
        "weir_cluster_utilization": utilization([queue.load for queue in queues if queue.load is not None]),
        "weir_queue_depth": sum(lane.depth for queue in of_model for lane in queue.lanes.values()),
        "weir_queue_expected_wait_us": max((load.expected_wait_us for load in loads), default=0),
    }


def utilization(loads: Iterable[LoadCounters]) -> float:
    """The share of the time in which the instances of these queues were busy."""
    loads = list(loads)
    instances = sum(load.instances for load in loads)
    return round(sum(load.utilization * load.instances for load in loads) / instances, 4) if instances else 0.0


def kv_cache(families: Iterable[FamilyCounters], model: str) -> dict[str, float]:
    """Triton's metrics of the KV cache of a model, which publishes its blocks as `KV_CACHE_FAMILY`; none without."""
    blocks: dict[str, float] = {}
    for family in families:
        for series in family.series if family.name == KV_CACHE_FAMILY else ():
            if series.labels.get("model", model) == model:
                blocks[series.labels.get(_BLOCK_TYPE, "")] = series.value
    if not {"used", "max", "tokens_per"} <= blocks.keys():
        return {}
    return {
        "kv_cache_utilization": blocks["used"] / blocks["max"] if blocks["max"] else 0.0,
        "max_token_capacity": int(blocks["max"] * blocks["tokens_per"]),
    }


def as_text(load: dict[str, float], named: dict[str, float]) -> bytes:
    """The report in ORCA's native HTTP format."""
    utilized, named = _split(load, named)
    rows = {"application_utilization": utilized, **{f"named_metrics.{name}": value for name, value in named.items()}}
    return b"TEXT " + ", ".join(f"{name}={_number(value)}" for name, value in rows.items()).encode()


def as_json(load: dict[str, float], named: dict[str, float]) -> bytes:
    """The report in ORCA's JSON format."""
    utilized, named = _split(load, named)
    return b"JSON " + orjson.dumps({"application_utilization": utilized, "named_metrics": named})


def _split(load: dict[str, float], named: dict[str, float]) -> tuple[float, dict[str, float]]:
    own = dict(load)
    return own.pop("application_utilization"), {**named, **own}


def _number(value: float) -> str:
    return f"{value:f}" if isinstance(value, float) else str(value)
