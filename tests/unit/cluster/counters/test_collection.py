"""Queries of counters, and sums over sources that come, depart and unload models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from weir.bus.kv.registry import RegistryView
from weir.bus.naming import subjects
from weir.bus.nats.connection import Message
from weir.calls.cache.response_cache import CacheCounters
from weir.calls.catalog import Catalog
from weir.cluster.counters import collection as module
from weir.cluster.counters.collection import MAX_DEPARTED, MetricSources, Statistics
from weir.cluster.counters.version_totals import VersionTotals
from weir.schemas.wire.registry import ModelRecord, ModelState, VersionRecord, WorkerRecord
from weir.schemas.wire.statistics import WorkerCounters, pack_counters

KEY = ("m", 1)
PAIRS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")


class Cluster:
    """A bus on which workers and schedulers answer queries, unless they have departed or are mute."""

    def __init__(self) -> None:
        self._callbacks: dict[str, Callable[[Message], None]] = {}
        self.queries: list[str] = []
        self.workers: dict[str, dict[str, Any]] = {}
        self.schedulers: dict[str, dict[str, Any]] = {}
        self.gateways: dict[str, dict[str, Any]] = {}
        self.mute: set[str] = set()
        self.registry = RegistryView(self)  # type: ignore[arg-type]
        self.catalog = Catalog(self.registry, strict_readiness=True)
        self.statistics = Statistics(self, "gateway", self.registry, self.catalog)  # type: ignore[arg-type]
        self._writes = 0

    async def subscribe(self, subject: str, callback: Callable[[Message], None]) -> None:
        self._callbacks[subject] = callback

    async def flush(self) -> None:
        pass

    def on_reconnect(self, listener: object) -> None:
        pass

    def publish(self, subject: str, data: bytes, reply: str = "") -> None:
        assert subject == subjects.STATISTICS_QUERY
        self.queries.append(reply)
        for name, counters in {**self.workers, **self.schedulers, **self.gateways}.items():
            if name not in self.mute:
                asyncio.get_running_loop().call_soon(self.deliver, reply, pack_counters(counters))

    def deliver(self, subject: str, data: bytes) -> None:
        pattern = "statistics.answer.*.*" if subject.startswith("statistics.answer") else subject
        self._callbacks[pattern](Message(subject, "", data, ""))

    def register(self, worker: str, **states: ModelState) -> None:
        """The worker's records; models are `m`, versions `v1`."""
        self._writes += 1
        self._apply(worker, WorkerRecord(worker, 1, settled=True, written_ns=self._writes))
        versions = {int(name[1:]): VersionRecord(state, instances=1) for name, state in states.items()}
        record = ModelRecord("m", versions, {"name": "m", "backend": "python"}, written_ns=self._writes)
        self._apply(f"{worker}.m", record)

    def _apply(self, key: str, record: Any) -> None:
        self.registry._apply(key, record.pack())

    async def totals(self) -> VersionTotals:
        await self.statistics.refresh()
        return self.statistics.versions()[KEY]

    async def successes(self) -> int:
        return (await self.totals()).durations["success"][0]


def counters(worker: str, successes: int, born_ns: int = 1) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": "m",
        "version": 1,
        **{name: [successes, successes] for name in PAIRS},
        "inference_count": successes,
        "execution_count": successes,
        "last_inference_ms": successes,
        "failures": {"BACKEND": successes, "MADE_UP": 1},
        "batches": {successes: [1, 2, 3, 4]},
        "responses": {0: {"compute_infer": [1, 2], "success": [1, 2]}},
    }
    return {"worker": worker, "born_ns": born_ns, "models": [row]}


def queue(scheduler: str, pending: int, rejected: int, **more: Any) -> dict[str, Any]:
    version = {"version": 1, "pending": pending, "failures": {"REJECTED": rejected}, "failed_ns": 10 * rejected}
    return {"scheduler": scheduler, "models": [{"model": "m", "lanes": {}, "versions": [version]}], **more}


@pytest.fixture
async def cluster() -> Cluster:
    cluster = Cluster()
    for number, worker in enumerate(["a", "b"], 1):
        cluster.register(worker, v1=ModelState.READY)
        cluster.workers[worker] = counters(worker, number)
    await cluster.statistics.start()
    return cluster


async def test_the_sum_over_workers_and_schedulers(cluster: Cluster) -> None:
    cluster.schedulers["s"] = queue("s", 4, 2)
    await cluster.statistics.refresh()  # the first query discovers the scheduler
    totals = await cluster.totals()
    assert totals.pending == 4
    row = totals.triton_row()
    assert row["inference_stats"]["success"] == {"count": 3, "ns": 3}
    assert row["inference_stats"]["fail"] == {"count": 3 + 2, "ns": 3 + 20}
    assert row["last_inference"] == 2
    assert [batch["batch_size"] for batch in row["batch_stats"]] == [1, 2]
    assert row["batch_stats"][0]["compute_output"] == {"count": 1, "ns": 4}
    assert row["response_stats"]["0"]["compute_infer"] == {"count": 2, "ns": 4}
    assert row["response_stats"]["0"]["cancel"] == {"count": 0, "ns": 0}
    assert totals.failures == {"REJECTED": 2, "CANCELED": 0, "BACKEND": 3, "OTHER": 2}


async def test_callers_during_a_query_share_the_next_one(cluster: Cluster) -> None:
    first = asyncio.create_task(cluster.statistics.refresh())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    later = [asyncio.create_task(cluster.statistics.refresh()) for _ in range(5)]
    await asyncio.gather(first, *later)
    assert cluster.queries == [f"statistics.answer.gateway.{number}" for number in (0, 1, 2)]


async def test_a_cancelled_caller_does_not_cancel_others(cluster: Cluster) -> None:
    tasks = [asyncio.create_task(cluster.statistics.refresh()) for _ in range(2)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await tasks[1]
    assert await cluster.successes() == 3


async def test_a_reply_to_an_earlier_query_does_not_end_the_current_one(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUERY_TIMEOUT_S", 0.05)
    await cluster.statistics.refresh()
    cluster.mute = {"a", "b"}
    asked = asyncio.create_task(cluster.statistics.refresh())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for worker in ("a", "b"):
        cluster.deliver("statistics.answer.gateway.1", pack_counters(counters(worker, 7)))
    assert not asked.done()
    await asked
    assert cluster.statistics.versions()[KEY].durations["success"][0] == 14


async def test_what_a_worker_counted_stays_when_it_dies(cluster: Cluster) -> None:
    assert await cluster.successes() == 3
    del cluster.workers["b"]
    cluster.registry.drop("b")
    assert await cluster.successes() == 3
    # It was wrongly considered dead: it is counted once.
    cluster.register("b", v1=ModelState.READY)
    cluster.workers["b"] = counters("b", 5)
    assert await cluster.successes() == 6
    # Its successor has its name.
    cluster.registry.drop("b")
    cluster.register("b", v1=ModelState.READY)
    cluster.workers["b"] = counters("b", 10, born_ns=2)
    assert await cluster.successes() == 16


async def test_what_another_gateway_was_told_stays_when_a_worker_dies(cluster: Cluster) -> None:
    cluster.register("a", v1=ModelState.READY)
    cluster.register("b", v1=ModelState.READY)
    cluster.workers = {"b": counters("b", 1)}
    cluster.deliver("statistics.answer.another.7", pack_counters(counters("a", 5)))
    cluster.registry.drop("a")
    assert await cluster.successes() == 6


async def test_the_final_counters_of_a_worker_count(cluster: Cluster) -> None:
    assert await cluster.successes() == 3
    cluster.deliver(subjects.LAST_COUNTERS, pack_counters(counters("b", 9)))
    del cluster.workers["b"]
    cluster.registry.drop("b")
    assert await cluster.successes() == 10


def hits(gateway: str, number: int, **more: Any) -> dict[str, Any]:
    cached = CacheCounters()
    for _ in range(number):
        cached.hit(KEY, 10)
    cached.miss(KEY, 7)
    return {"gateway": gateway, "born_ns": 1, "models": cached.snapshot(), **more}


async def test_hits_of_all_gateways_are_added_and_stay_when_one_goes(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUERY_TIMEOUT_S", 0.05)
    cluster.gateways = {name: hits(name, 5) for name in ("gateway", "g2", "g3")}
    for counted in cluster.gateways.values():
        cluster.deliver(subjects.LAST_COUNTERS, pack_counters(counted))
    row = (await cluster.totals()).triton_row()
    assert row["inference_stats"]["cache_hit"] == {"count": 15, "ns": 150}
    assert row["inference_stats"]["cache_miss"] == {"count": 3, "ns": 21}
    assert row["inference_stats"]["success"] == {"count": 3 + 15, "ns": 3 + 150 + 21}
    assert row["inference_count"] == row["execution_count"] == 3
    cluster.deliver(subjects.LAST_COUNTERS, pack_counters(hits("g2", 6, leaving=True)))
    del cluster.gateways["g2"]
    cluster.mute = {"g3"}  # it was killed
    assert await cluster.successes() == 3 + 16
    with monkeypatch.context() as patient:
        patient.setattr(module, "QUERY_TIMEOUT_S", 600)  # no query waits for it twice
        assert await cluster.successes() == 3 + 16
    cluster.register("a", v1=ModelState.UNAVAILABLE)
    cluster.registry.drop("b")
    cluster.register("a", v1=ModelState.READY)
    cluster.gateways = {}
    assert await cluster.successes() == cluster.workers["a"]["models"][0]["success"][0], "what is unloaded is forgotten"


def of_group(gateway: str, requests: int, group: str, **more: Any) -> dict[str, Any]:
    """The reply of a gateway in a group that has published so many requests."""
    consumer = {"dispatch": {"requests": requests}, "process": {"cpu_s": 1.0, "resident_bytes": 1}}
    fields = {"gateway": gateway, "models": [], "role": "gateway", "group": group, "consumer": consumer, "born_ns": 1}
    return fields | more


async def test_the_counters_of_a_group_are_those_of_its_gateways_and_of_their_former_lives(cluster: Cluster) -> None:
    cluster.gateways = {
        "d": {**of_group("d", 1, ""), "role": "durable"},
        "g1": of_group("g1", 10, "d"),
        "g2": of_group("g2", 100, "another"),
    }
    await cluster.statistics.refresh()
    await cluster.statistics.refresh()  # the first one has only discovered them
    live, departed = cluster.statistics.consumers("d")
    assert (sorted(one.dispatch.requests for one in live), departed) == ([1, 10], [])
    assert {(role, name) for role, name, _ in cluster.statistics.processes()} == {
        ("durable", "d"),
        ("gateway", "g1"),
        ("gateway", "g2"),
    }
    cluster.gateways["g1"] = of_group("g1", 3, "d", born_ns=2)
    await cluster.statistics.refresh()
    live, departed = cluster.statistics.consumers("d")
    assert sorted(one.dispatch.requests for one in live) == [1, 3]
    assert [one.dispatch.requests for one in departed] == [10]
    assert cluster.statistics.consumers("") == ([], [])


async def test_gateways_are_not_listened_to_without_end(cluster: Cluster) -> None:
    for number in range(module.MAX_GATEWAYS + 5):
        cluster.deliver(subjects.LAST_COUNTERS, pack_counters(hits(f"g{number}", 1)))
    assert cluster.statistics.malformed_messages == 5


async def test_an_unloaded_version_starts_at_zero(cluster: Cluster) -> None:
    await cluster.statistics.refresh()
    del cluster.workers["b"]
    cluster.registry.drop("b")
    assert await cluster.successes() == 3
    cluster.register("a", v1=ModelState.UNAVAILABLE)
    cluster.workers["a"]["models"] = []
    await cluster.statistics.refresh()
    assert cluster.statistics.versions() == {}
    cluster.register("a", v1=ModelState.READY)
    assert await cluster.successes() == 0


async def test_a_version_that_is_still_there_keeps_what_it_has(cluster: Cluster) -> None:
    cluster.register("a", v1=ModelState.READY, v2=ModelState.READY)
    await cluster.statistics.refresh()
    cluster.registry.drop("b")
    await cluster.statistics.refresh()
    assert cluster.statistics.versions().keys() == {KEY, ("m", 2)}
    cluster.register("a", v1=ModelState.READY)
    assert await cluster.successes() == 3
    assert cluster.statistics.versions().keys() == {KEY}


async def test_a_scheduler_that_died_holds_up_one_round(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUERY_TIMEOUT_S", 0.05)
    cluster.schedulers["s"] = queue("s", 4, 2)
    await cluster.statistics.refresh()
    cluster.mute = {"s"}
    totals = await cluster.totals()
    assert (totals.pending, totals.failures["REJECTED"]) == (0, 2)
    cluster.mute = set()
    totals = await cluster.totals()
    assert (totals.pending, totals.failures["REJECTED"]) == (4, 2)


async def test_a_scheduler_that_leaves_and_its_successor(cluster: Cluster) -> None:
    cluster.deliver(subjects.LAST_COUNTERS, pack_counters(queue("s", 4, 2, leaving=True)))
    cluster.schedulers["s"] = queue("s", 1, 0, born_ns=5)
    cluster.deliver(subjects.LAST_COUNTERS, pack_counters(cluster.schedulers["s"]))
    totals = await cluster.totals()
    assert (totals.pending, totals.failures["REJECTED"]) == (1, 2)


async def test_strangers_and_nonsense_count_for_nothing(cluster: Cluster) -> None:
    cluster.deliver(subjects.LAST_COUNTERS, pack_counters(counters("stranger", 100)))
    cluster.deliver(subjects.LAST_COUNTERS, b"nonsense")
    for number in range(module.MAX_SCHEDULERS + 36):
        cluster.deliver(subjects.LAST_COUNTERS, pack_counters(queue(f"s{number}", 0, 0)))
    assert cluster.statistics.malformed_messages == 1 + 36
    cluster.schedulers = {f"s{number}": queue(f"s{number}", 0, 0) for number in range(module.MAX_SCHEDULERS)}
    assert await cluster.successes() == 3


async def test_sources_that_departed_long_ago_are_summed(cluster: Cluster) -> None:
    for number in range(MAX_DEPARTED + 10):
        cluster.register(f"w{number}", v1=ModelState.READY)
        cluster.deliver(subjects.LAST_COUNTERS, pack_counters(counters(f"w{number}", 1)))
        cluster.registry.drop(f"w{number}")
    assert len(cluster.statistics.workers()) == MAX_DEPARTED + 2
    assert await cluster.successes() == 3 + MAX_DEPARTED + 10


def test_an_unknown_source_can_not_depart() -> None:
    forgotten: list[WorkerCounters] = []
    owners: MetricSources[WorkerCounters] = MetricSources(forgotten.append)
    owners.depart("nobody")
    assert owners.departed == forgotten == []
