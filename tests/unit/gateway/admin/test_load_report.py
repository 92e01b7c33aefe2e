"""The load of a model in a response header, in both formats of ORCA."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from weir.gateway.admin.load_report import MAX_AGE_S, LoadReports, kv_cache, model_load
from weir.schemas.wire.statistics import FamilyCounters, LaneCounters, LoadCounters, QueueCounters, SeriesCounters


def queue(model: str, instances: int, utilization: float, depth: int = 0, wait_us: int = 0) -> QueueCounters:
    load = LoadCounters(instances=instances, utilization=utilization, expected_wait_us=wait_us)
    return QueueCounters(model=model, lanes={"live": LaneCounters(depth=depth, oldest_us=0)}, versions=[], load=load)


def blocks(used: float, most: float, tokens: float, **labels: str) -> FamilyCounters:
    values = {"used": used, "max": most, "tokens_per": tokens}
    return FamilyCounters(
        name="nv_trt_llm_kv_cache_block_metrics",
        kind="gauge",
        description="",
        series=[
            SeriesCounters(labels={"kv_cache_block_type": kind, **labels}, value=value, versions=[])
            for kind, value in values.items()
        ],
    )


SCHEDULERS: Any = [
    SimpleNamespace(models=[queue("a", 2, 0.5, 3, 1000), queue("b", 2, 1.0)]),
    SimpleNamespace(models=[queue("a", 2, 1.0, 4, 500)]),
]


class FakeStatistics:
    def __init__(self, *families: FamilyCounters) -> None:
        self.refreshes = 0
        self.families = list(families)

    async def refresh(self) -> None:
        self.refreshes += 1

    def schedulers(self) -> Any:
        return SCHEDULERS

    def custom_metrics(self) -> Any:
        return SimpleNamespace(to_counters=lambda: self.families)


def reports(*families: FamilyCounters) -> tuple[LoadReports, FakeStatistics, list[float]]:
    statistics, now = FakeStatistics(*families), [0.0]
    return LoadReports(statistics, lambda: now[0]), statistics, now  # type: ignore[arg-type]


def test_the_load_of_a_model_is_that_of_its_queues() -> None:
    assert model_load(SCHEDULERS, "a") == {
        "application_utilization": 0.75,
        "weir_cluster_utilization": pytest.approx(0.8333),
        "weir_queue_depth": 7,
        "weir_queue_expected_wait_us": 1000,
    }
    assert model_load([], "a") == {
        "application_utilization": 0.0,
        "weir_cluster_utilization": 0.0,
        "weir_queue_depth": 0,
        "weir_queue_expected_wait_us": 0,
    }


def test_the_kv_cache_has_triton_s_names() -> None:
    assert kv_cache([blocks(3, 12, 64)], "m") == {"kv_cache_utilization": 0.25, "max_token_capacity": 768}
    assert kv_cache([blocks(3, 12, 64, model="m")], "m")["kv_cache_utilization"] == 0.25
    assert kv_cache([blocks(3, 12, 64, model="other")], "m") == {}
    assert kv_cache([blocks(0, 0, 64)], "m") == {"kv_cache_utilization": 0.0, "max_token_capacity": 0}
    assert kv_cache([], "m") == {}
    incomplete = blocks(3, 12, 64)
    incomplete.series.pop()
    assert kv_cache([incomplete], "m") == {}


def test_both_formats() -> None:
    of, _, _ = reports(blocks(3, 12, 64))
    assert of.header(b"text", "a") == (
        b"TEXT application_utilization=0.750000, named_metrics.kv_cache_utilization=0.250000, "
        b"named_metrics.max_token_capacity=768, named_metrics.weir_cluster_utilization=0.833300, "
        b"named_metrics.weir_queue_depth=7, named_metrics.weir_queue_expected_wait_us=1000"
    )
    report = of.header(b"json", "a")
    assert report.startswith(b"JSON {")
    assert orjson.loads(report.removeprefix(b"JSON ")) == {
        "application_utilization": 0.75,
        "named_metrics": {
            "kv_cache_utilization": 0.25,
            "max_token_capacity": 768,
            "weir_cluster_utilization": 0.8333,
            "weir_queue_depth": 7,
            "weir_queue_expected_wait_us": 1000,
        },
    }
    assert of.header(b"xml", "a") == b""


def test_counters_are_queried_once_while_they_are_fresh() -> None:
    of, statistics, now = reports()
    assert not of.is_fresh
    for _ in range(3):
        asyncio.run(of.refresh())
    assert (statistics.refreshes, of.is_fresh) == (1, True)
    first = of.header(b"text", "a")
    assert of.header(b"text", "a") is first
    now[0] += MAX_AGE_S + 0.01
    assert not of.is_fresh
    asyncio.run(of.refresh())
    assert statistics.refreshes == 2
    assert of.header(b"text", "a") == first
