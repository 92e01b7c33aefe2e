"""`ModelPlacement`: what one worker offers, loads and keeps, given the records of the other workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from weir.repository.layout import FoundModel, ModelRepository
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.config.parameters import ModelNeeds, ResourceAmounts
from weir.schemas.wire.registry import ModelOffer, ModelRecord, ModelState, VersionRecord, WorkerRecord
from weir.worker.devices.gpus import CPU_ONLY
from weir.worker.lifecycle import placement as placement_module
from weir.worker.lifecycle.loader import LoadResult
from weir.worker.lifecycle.model_state import ManagedModels, RecordPublisher
from weir.worker.lifecycle.placement import ModelPlacement
from weir.worker.lifecycle.placement_rules import PlacementStep

GIB = 1 << 30


class Cluster:
    """Worker `w` with one GiB for models, the records that it publishes, and the records of other workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repository = ModelRepository([folder])
        self.published: dict[str, Any] = {}
        self.steps: list[tuple[str, PlacementStep]] = []
        self.workers: dict[str, Any] = {}
        self._listeners: list[Callable[[str], None]] = []
        registry = SimpleNamespace(
            workers=self.workers, on_model_change=self._listeners.append, on_worker_lost=self._listeners.append
        )
        client = SimpleNamespace(registry=registry, is_open=True, open_soon=lambda: None)
        writer = SimpleNamespace(describe=self._describe)
        self.models = ManagedModels(RecordPublisher(cast(Any, writer)))
        self.placement = ModelPlacement(self.models, cast(Any, client), "w", ResourceAmounts(GIB), CPU_ONLY)
        self.placement.on_step(lambda name, step: self.steps.append((name, step)))

    async def _describe(self, **fields: Any) -> None:
        self.published |= fields

    def add(self, name: str, memory_bytes: int | None = None) -> FoundModel:
        """Writes a model into the repository, which declares that it needs so much memory."""
        (self.folder / name / "1").mkdir(parents=True)
        text = ""
        if memory_bytes is not None:
            text = f'backend: "python" parameters {{ key: "weir_memory_bytes" value {{ string_value: "{memory_bytes}" }} }}'
        (self.folder / name / "config.pbtxt").write_text(text)
        return self.repository.find(name)

    def report(
        self,
        worker: str,
        state: ModelState | None = None,
        needs: ModelNeeds | None = None,
        revision: int = 0,
        name: str = "m",
    ) -> None:
        """Sets the records of another worker: its offer of the model, and the model's state there."""
        offers = {} if needs is None else {name: ModelOffer(needs, revision)}
        record = WorkerRecord(worker, 1, capacity=ResourceAmounts(GIB), offers=offers)
        model = ModelRecord(name, {} if state is None else {1: VersionRecord(state)}, revision=revision)
        self.workers[worker] = SimpleNamespace(record=record, models={name: model})
        for listener in self._listeners:
            listener(worker)

    async def serve(self, name: str) -> None:
        """Lets this worker serve the model."""
        async with self.models.turn(name) as model:
            served = cast(Any, {1: SimpleNamespace(record=VersionRecord(ModelState.READY), model=None)})
            model.adopt(LoadResult(name, config=ModelConfig(name=name), served=served))


@pytest.fixture
async def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


async def turn() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_a_model_without_needs_is_loaded_by_every_worker(cluster: Cluster) -> None:
    found = cluster.add("m")
    async with cluster.models.turn("m") as model:
        assert await cluster.placement.admits(model, found, None, 0)
    assert cluster.published == {}, "it is not offered"
    assert not cluster.placement.is_offered("m")
    assert cluster.placement.holders("m") is None


async def test_a_model_with_needs_is_offered_and_loaded_if_it_fits(cluster: Cluster) -> None:
    found = cluster.add("m", GIB)
    async with cluster.models.turn("m") as model:
        assert await cluster.placement.admits(model, found, None, 0)
    assert cluster.published["offers"]["m"].needs.takes.memory_bytes == GIB
    assert cluster.placement.holders("m") == {"w"}
    assert cluster.placement.step("m") is PlacementStep.LOAD


async def test_a_model_that_fits_on_no_worker_is_reported(cluster: Cluster) -> None:
    found = cluster.add("m", 2 * GIB)
    async with cluster.models.turn("m") as model:
        assert not await cluster.placement.admits(model, found, None, 0)
        assert model.error is not None
        assert "no worker has room for the model" in model.error.message
        assert model.elsewhere
        await cluster.placement.conclude(model)
    assert cluster.published["offers"] == {}, "it is not offered after a failed request"


async def test_a_request_waits_for_the_offers_of_the_other_workers(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_module, "OFFERS_TIMEOUT_S", 5.0)
    found = cluster.add("m", GIB)
    cluster.report("other")
    async with cluster.models.turn("m") as model:
        admission = asyncio.create_task(cluster.placement.admits(model, found, None, 7))
        await asyncio.sleep(0.05)
        assert not admission.done()
        cluster.report("other", needs=ModelNeeds(ResourceAmounts(GIB)), revision=7)
        assert await admission
    assert cluster.published["offers"]["m"].revision == 7


async def test_a_worker_that_does_not_reply_delays_a_request_only_for_a_while(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_module, "OFFERS_TIMEOUT_S", 0.01)
    found = cluster.add("m", GIB)
    cluster.report("other")
    async with cluster.models.turn("m") as model:
        assert await cluster.placement.admits(model, found, None, 7)


async def test_a_failed_load_is_not_repeated_until_the_next_attempt(cluster: Cluster) -> None:
    found = cluster.add("m", GIB)
    async with cluster.models.turn("m") as model:
        assert await cluster.placement.admits(model, found, None, 0)
        with cluster.placement.loading(model):
            await turn()
            assert cluster.placement.step("m") is PlacementStep.KEEP
        assert cluster.placement.step("m") is PlacementStep.KEEP, "the load has failed"
        assert await cluster.placement.admits(model, found, None, 0)
        assert cluster.placement.step("m") is PlacementStep.LOAD


async def test_steps_are_reported_when_the_records_of_other_workers_change(cluster: Cluster) -> None:
    first, second = cluster.add("a", GIB), cluster.add("b", GIB)
    await cluster.placement.offer_found({"a": first, "b": second})
    await turn()
    loaded = [name for name, step in cluster.steps if step is PlacementStep.LOAD]
    assert len(loaded) == 1, "there is room for one of the two models"
    await cluster.serve(loaded[0])
    cluster.steps.clear()
    cluster.report("other", ModelState.READY, ModelNeeds(ResourceAmounts(GIB)), name=loaded[0])
    await turn()
    assert all(step is not PlacementStep.LOAD for name, step in cluster.steps if name == loaded[0])


async def test_a_worker_leaves_when_others_serve_its_models(cluster: Cluster) -> None:
    found = cluster.add("m", GIB)
    await cluster.placement.offer_found({"m": found})
    await cluster.serve("m")
    needs = ModelNeeds(ResourceAmounts(GIB))
    cluster.report("other", needs=needs)
    leaving = asyncio.create_task(cluster.placement.leave(5))
    await asyncio.sleep(0.02)
    assert cluster.published["leaving"] is True
    assert not leaving.done()
    cluster.report("other", ModelState.LOADING, needs)
    await turn()
    assert not leaving.done()
    cluster.report("other", ModelState.READY, needs)
    await leaving


async def test_a_worker_that_serves_nothing_for_others_leaves_at_once(cluster: Cluster) -> None:
    await cluster.placement.leave(600)
    assert cluster.published == {}
