"""What a worker publishes of itself: load, counters and heartbeats."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.collecting_bus import CollectingBus
from tests.support.contained_sites import fail_for
from weir.schemas.wire.registry import WorkerRecord
from weir.worker import service as service_module
from weir.worker.service import CounterSources, WorkerLoad, WorkerService

S = 1_000_000


def result(instances: int, busy_s: float, ensemble: object = None) -> Any:
    served = SimpleNamespace(instances=[None] * instances, statistics=SimpleNamespace(busy_ns=int(busy_s * 1e9)))
    return SimpleNamespace(config=SimpleNamespace(ensemble_scheduling=ensemble), served={1: served})


def held(model: str, instance: int, version: int = 1) -> Any:
    return SimpleNamespace(message=SimpleNamespace(model=model, version=version, instance=instance))


def test_an_instance_with_several_batches_is_busy_once_and_ensembles_do_not_count() -> None:
    models = {"a": result(2, 0), "b": result(2, 0), "all": result(1, 0, ensemble=object())}
    batches = [held("a", 0), held("a", 0), held("b", 1), held("all", 0), held("gone", 0), held("a", 0, version=2)]
    assert WorkerLoad().to_dict(models, batches) == {"instances": 4, "busy": 2, "utilization": 0.0}


def test_utilization_covers_the_last_seconds() -> None:
    load = WorkerLoad()
    for second in range(1, 21):
        load.measure(second * S, {"a": result(2, second), "b": result(2, 0)}, [])
    assert load.to_dict({}, [])["utilization"] == pytest.approx(0.25, abs=0.01)


class Bus(CollectingBus):
    """A bus with a registry bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.jetstream = SimpleNamespace(find_stream=self._find_stream, publish=nothing)

    def on_reconnect(self, _listener: object) -> None:
        pass

    async def flush(self) -> None:
        pass

    async def _find_stream(self, name: str) -> str:
        return name


async def nothing(*_: object, **__: object) -> None:
    pass


@pytest.fixture
def dispatcher() -> Any:
    served = SimpleNamespace(
        statistics=SimpleNamespace(snapshot=lambda: {"execution_count": 1}, busy_ns=0), instances=[]
    )
    return SimpleNamespace(
        models={"m": SimpleNamespace(served={1: served, 2: served}, config=None)},
        held=[],
        held_ids=lambda: {"s": [1]},
        start=nothing,
    )


def create(bus: Bus, dispatcher: Any) -> WorkerService:
    sources = CounterSources(payload_server=cast(Any, SimpleNamespace(start=nothing)))
    return WorkerService(cast(Any, bus), dispatcher, WorkerRecord("w", 1), sources)


async def test_counters_that_can_not_be_read_do_not_hide_the_others(
    dispatcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = "weir.worker.service:WorkerService._statistics_row"
    fail_for(monkeypatch, site, lambda _self, _name, number, _served: number == 1)
    assert [row["version"] for row in create(Bus(), dispatcher).statistics()] == [2]


async def test_heartbeats_go_on_after_a_failure(dispatcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "HEARTBEAT_INTERVAL_S", 0.001)
    monkeypatch.setattr(service_module, "ensure_streams", nothing)
    calls: list[int] = []

    def fails_twice(*_: object) -> bool:
        calls.append(1)
        return len(calls) < 3

    fail_for(monkeypatch, "weir.worker.service:WorkerService._beat", fails_twice)
    bus = Bus()
    async with asyncio.TaskGroup() as background:
        before = asyncio.all_tasks()
        await create(bus, dispatcher).start(background)
        while not bus.taken("heartbeat."):
            await asyncio.sleep(0)
        for task in asyncio.all_tasks() - before:
            task.cancel()
    assert len(calls) >= 3
