"""`ModelPlacement`: which of the models that declare resource needs this worker should load, given the other workers.

Each worker publishes in its record which of these models it could load (its *offers*). All workers read the same records
and compute the same plan from them (`weir.worker.lifecycle.placement_rules`), so no worker has to coordinate with another.
Without a model that declares needs, nothing is published and the registry is not watched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from weir.bus.kv.registry import WorkerView
from weir.repository.layout import FoundModel
from weir.repository.loading import config_bytes, read_config
from weir.runtime.containment import contained
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.config.parameters import ModelNeeds, ParameterError, ResourceAmounts, needs_of
from weir.schemas.core.errors import WeirError, unavailable
from weir.schemas.wire.registry import UNLOADED, ModelOffer, ModelRecord, ModelState
from weir.worker.backend_api.inference_client import InferenceClient
from weir.worker.devices.gpus import WorkerDevices
from weir.worker.lifecycle.instance_plan import runs_elsewhere
from weir.worker.lifecycle.model_state import ManagedModel, ManagedModels
from weir.worker.lifecycle.placement_rules import Holding, PlacementStep, Plan, WorkerFacts, plan, shortage, steps

OFFERS_TIMEOUT_S = 0.5
"""How long a load waits for the offers of the other workers."""


class ModelPlacement:
    """The placement plan as this worker sees it, and what this worker has to do about it. Runs in the event loop.

    `capacity` is what this worker has for models that declare needs.
    """

    def __init__(
        self,
        models: ManagedModels,
        client: InferenceClient,
        worker_id: str,
        capacity: ResourceAmounts,
        devices: WorkerDevices,
    ) -> None:
        self._models = models
        self._records = models.records
        self._client = client
        self._worker_id = worker_id
        self._capacity = capacity
        self._devices = devices
        self._offers: dict[str, ModelOffer] = {}
        self._loading: set[str] = set()
        self._failed: set[str] = set()
        self._is_leaving = False
        self._decided: tuple[Plan, dict[str, PlacementStep]] | None = None
        self._changed = asyncio.Event()
        self._is_watching = self._is_review_scheduled = False
        self._on_step: Callable[[str, PlacementStep], None] = lambda _name, _step: None

    def on_step(self, listener: Callable[[str, PlacementStep], None]) -> None:
        """Calls `listener(name, step)` when the plan asks for something of this worker that it is not doing yet."""
        self._on_step = listener

    # Offers

    async def offer_found(self, found: Mapping[str, FoundModel]) -> None:
        """Offers all models in the repositories in one record, so that no plan is made from half of them."""
        needs = await asyncio.to_thread(lambda: {name: self._needs(model, None) for name, model in found.items()})
        offers = {name: ModelOffer(one) for name, one in needs.items() if one is not None}
        # A model that serves although its folder is gone is withdrawn when it is unloaded.
        offers |= {name: offer for name, offer in self._offers.items() if name not in found}
        await self._publish(offers)

    async def withdraw(self, name: str) -> None:
        """Withdraws the offer of the model."""
        self._failed.discard(name)
        if name in self._offers:
            await self._publish({other: offer for other, offer in self._offers.items() if other != name})

    def is_offered(self, name: str) -> bool:
        """Whether the model declares needs and this worker could load it."""
        return name in self._offers

    def _needs(self, found: FoundModel, override: str | None) -> ModelNeeds | None:
        config = read_declaring(found, override)
        return None if config is None or runs_elsewhere(config, self._devices) else needs_of(config)

    async def _publish(self, offers: dict[str, ModelOffer]) -> None:
        if offers == self._offers:
            return
        self._offers = offers
        if offers and not self._is_watching:
            self._is_watching = True
            self._client.registry.on_model_change(lambda _name: self._schedule_review())
            self._client.registry.on_worker_lost(lambda _worker: self._schedule_review())
            self._client.open_soon()
        await self._records.describe(offers=offers)
        self._schedule_review()

    # Loading

    async def admits(self, model: ManagedModel, found: FoundModel, override: str | None, revision: int) -> bool:
        """Whether this worker should load the model. If it fits on no worker, `model.error` says so afterwards.

        A request of the repository API (`revision` above 0) waits until the workers that should load the model have tried;
        loads at the start and after a poll do not.
        """
        needs = await asyncio.to_thread(self._needs, found, override)
        if needs is None:
            await self.withdraw(model.name)
            return True
        self._failed.discard(model.name)
        revision = max(revision, self._offers[model.name].revision if model.name in self._offers else 0)
        await self._publish({**self._offers, model.name: ModelOffer(needs, revision)})
        await self._open_registry()
        if revision:
            with suppress(TimeoutError):
                async with asyncio.timeout(OFFERS_TIMEOUT_S):
                    await self._until(lambda: self._all_have_offered(model.name, revision))
            await self._until(lambda: self._may_proceed(model.name, revision))
        return self._admits(model, needs)

    def _admits(self, model: ManagedModel, needs: ModelNeeds) -> bool:
        planned, decided = self._decide()
        holders = planned.get(model.name, frozenset())
        if self._worker_id in holders:
            return decided.get(model.name) is not PlacementStep.WAIT
        model.error = None
        if not model.is_serving:
            model.reason, model.elsewhere = "", False
        if not holders:
            reason = shortage(needs, self._facts())
            model.error = unavailable(f"load failed for model '{model.name}': {reason}")
            if not model.is_serving:
                model.reason, model.elsewhere = f"{model.error.code.title}: {reason}", True
        return False

    async def conclude(self, model: ManagedModel) -> None:
        """After a load request: withdraws the offer of a model that could not be loaded on any worker."""
        if model.name not in self._offers or model.is_serving:
            return
        others = (view.models.get(model.name) for view in self._client.registry.workers.values())
        is_ready = any(record is not None and _reported_holding(record) is Holding.READY for record in others)
        if model.error is not None or not is_ready:
            await self.withdraw(model.name)

    @contextmanager
    def loading(self, model: ManagedModel) -> Iterator[None]:
        """Counts the model as loading for the duration of the context; it has failed if it does not serve at the end."""
        if model.name not in self._offers:
            yield
            return
        self._loading.add(model.name)
        self._schedule_review()
        try:
            yield
        finally:
            self._loading.discard(model.name)
            if not model.is_serving:
                self._failed.add(model.name)
            self._schedule_review()

    async def leave(self, timeout_s: float) -> None:
        """Before shutdown: returns when other workers serve what the plan gives them, or after `timeout_s`."""
        if not self._offers:
            return
        self._is_leaving = True
        await self._records.describe(leaving=True)
        self._schedule_review()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: not any(map(self._is_needed, self._offers)))

    # The plan

    def step(self, name: str) -> PlacementStep:
        """What this worker should do about the model now."""
        return self._decide()[1].get(name, PlacementStep.KEEP) if self._client.is_open else PlacementStep.KEEP

    def holders(self, name: str) -> frozenset[str] | None:
        """The workers that should serve the model; None for a model that is not placed."""
        return self._decide()[0].get(name) if name in self._offers and self._client.is_open else None

    def _decide(self) -> tuple[Plan, dict[str, PlacementStep]]:
        if self._decided is None:
            facts = self._facts()
            planned = plan(facts)
            self._decided = planned, steps(self._worker_id, facts, planned)
        return self._decided

    def _facts(self) -> list[WorkerFacts]:
        holdings = {name: self._holding(name) for name in self._offers}
        needs = {name: offer.needs for name, offer in self._offers.items()}
        own = WorkerFacts(self._worker_id, self._capacity, needs, holdings, self._is_leaving)
        workers = self._client.registry.workers.items()
        return [own, *(_reported_facts(name, view) for name, view in workers if name != self._worker_id)]

    def _holding(self, name: str) -> Holding:
        """The state of the model on this worker."""
        model = self._models.find(name)
        if model is not None and model.is_serving:
            return Holding.READY
        if name in self._loading:
            return Holding.LOADING
        if model is not None and (model.served or model.retiring):
            return Holding.LEAVING
        return Holding.FAILED if name in self._failed else Holding.ABSENT

    def _may_proceed(self, name: str, revision: int) -> bool:
        """Whether this worker may load the model now, or the workers that should have tried."""
        planned, decided = self._decide()
        holders = planned.get(name, frozenset())
        if self._worker_id in holders:
            return decided.get(name) is not PlacementStep.WAIT
        return not holders or any(self._reported_revision(worker, name) >= revision for worker in holders)

    def _all_have_offered(self, name: str, revision: int) -> bool:
        """Whether every other worker has offered the model for this request, or has carried the request out."""
        for worker, view in self._client.registry.workers.items():
            offer = view.record.offers.get(name)
            has_offered = offer is not None and offer.revision >= revision
            is_done = has_offered or self._reported_revision(worker, name) >= revision
            if worker != self._worker_id and not (is_done or view.record.draining or view.record.leaving):
                return False
        return True

    def _reported_revision(self, worker: str, name: str) -> int:
        view = self._client.registry.workers.get(worker)
        record = None if view is None else view.models.get(name)
        return 0 if record is None else record.revision

    def _is_needed(self, name: str) -> bool:
        """Whether only this worker serves a model that others are about to load."""
        if self._holding(name) is not Holding.READY:
            return False
        facts = {one.worker: one for one in self._facts()}
        holdings = {facts[worker].holding(name) for worker in self._decide()[0].get(name, frozenset())}
        return Holding.READY not in holdings and bool(holdings & {Holding.ABSENT, Holding.LOADING})

    # Changes

    async def _open_registry(self) -> None:
        """Returns when the registry can be read: without it the state of the other workers is unknown."""
        while not self._client.is_open:
            with suppress(WeirError):
                await self._client.open()
        self._decided = None

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _schedule_review(self) -> None:
        self._decided = None
        if not self._is_review_scheduled:
            self._is_review_scheduled = True
            asyncio.get_running_loop().call_soon(self._review)

    @contained()
    def _review(self) -> None:
        """Looks once at all changes of this turn of the event loop."""
        self._is_review_scheduled = False
        self._decided = None
        self._changed.set()
        if self._client.is_open:
            for name, step in self._decide()[1].items():
                if step is not PlacementStep.KEEP and name not in self._loading:
                    self._on_step(name, step)


def read_declaring(found: FoundModel, override: str | None) -> ModelConfig | None:
    """The model's configuration as written, or None for a model that declares no needs. Blocking.

    A search for the prefix of the declarations avoids parsing nearly all configurations twice.
    """
    try:
        if override is None:
            if not found.config_file or b"weir_" not in config_bytes(found):
                return None
        elif "weir_" not in override:
            return None
        config = read_config(found, override).config
        return None if needs_of(config) is None else config
    except (WeirError, OSError, ParameterError):
        return None  # loading the model reports the error


def _reported_facts(worker: str, view: WorkerView) -> WorkerFacts:
    record = view.record
    return WorkerFacts(
        worker,
        record.capacity,
        {name: offer.needs for name, offer in record.offers.items()},
        {name: _reported_holding(model) for name, model in view.models.items()},
        record.leaving or record.draining,
    )


def _reported_holding(record: ModelRecord) -> Holding:
    """The state of a model on another worker, by its record."""
    states = {version.state for version in record.versions.values()}
    for state, holding in (
        (ModelState.READY, Holding.READY),
        (ModelState.LOADING, Holding.LOADING),
        (ModelState.UNLOADING, Holding.LEAVING),
    ):
        if state in states:
            return holding
    has_failed = record.reason or any(row.reason not in ("", UNLOADED) for row in record.versions.values())
    return Holding.FAILED if has_failed and not record.elsewhere else Holding.ABSENT
