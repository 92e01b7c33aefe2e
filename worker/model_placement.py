"""`ModelPlacement`: which of the models that declare what they need this worker is to hold, beside the other workers.

Follows the registry and asks `worker.placement_rules`. What this worker could hold stands in its own record, so that all
workers see the same. A worker none of whose models declares anything does nothing here, and doesn't listen either.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from nats.errors import Error as NatsError

from bus.registry import WorkerView
from repository.layout import FoundModel
from repository.loading import config_bytes, read_config
from runtime.containment import contained
from schemas.errors import WeirError, unavailable
from schemas.model_config import ModelConfig
from schemas.placement import Amounts, BadDeclaration, ModelNeeds, needs_of
from schemas.registry import UNLOADED, ModelRecord, ModelState, Offer
from worker.controlled_model import ControlledModel
from worker.devices import WorkerDevices
from worker.inner_calls import InnerCalls
from worker.instance_plan import is_for_others
from worker.placement_rules import Holding, Plan, Step, WorkerFacts, plan, shortage, steps

logger = logging.getLogger("weir.worker")

ANSWERS_PATIENCE_S = 0.5
"""How long a load waits for the other workers to tell whether they could have the model too."""


class ModelPlacement:
    """See the module. Everything runs in the event loop.

    `describe(**fields)` changes the worker's own record. `on_step(name, step)` is called when something is to be done about
    a model that nobody is doing; `holding(name)` tells how this worker stands with one.
    """

    def __init__(
        self,
        describe: Callable[..., Awaitable[None]],
        calls: InnerCalls,
        worker_id: str,
        capacity: Amounts,
        devices: WorkerDevices,
    ) -> None:
        self._describe = describe
        self._calls = calls
        self._me = worker_id
        self._capacity = capacity
        self._devices = devices
        self._offers: dict[str, Offer] = {}
        self._loading: set[str] = set()
        self._failed: set[str] = set()
        self._leaving = False
        self._decided: tuple[Plan, dict[str, Step]] | None = None
        self._changed = asyncio.Event()
        self._is_listening = self._is_looking = False
        self.on_step: Callable[[str, Step], None] = lambda _name, _step: None
        self.holding: Callable[[str], Holding] = lambda _name: Holding.ABSENT

    # What this worker could hold

    async def offer_found(self, found: Mapping[str, FoundModel]) -> None:
        """Tells of all models in the repositories at once: the first plan is not made of half of them."""
        needs = await asyncio.to_thread(lambda: {name: self._needs(model, None) for name, model in found.items()})
        offers = {name: Offer(one) for name, one in needs.items() if one is not None}
        # What is still served, and was taken away, is withdrawn when it is unloaded.
        offers |= {name: offer for name, offer in self._offers.items() if name not in found}
        await self._tell(offers)

    async def withdraw(self, name: str) -> None:
        """The model is not to be held here any more, for whatever reason."""
        self._failed.discard(name)
        if name in self._offers:
            await self._tell({other: offer for other, offer in self._offers.items() if other != name})

    def _needs(self, found: FoundModel, override: str | None) -> ModelNeeds | None:
        config = read_declaring(found, override)
        return None if config is None or is_for_others(config, self._devices) else needs_of(config)

    async def _tell(self, offers: dict[str, Offer]) -> None:
        if offers == self._offers:
            return
        self._offers = offers
        if offers and not self._is_listening:
            self._is_listening = True
            self._calls.registry.on_model_change(lambda _name: self._look_later())
            self._calls.registry.on_worker_lost(lambda _worker: self._look_later())
            self._calls.start_to_open()
        await self._describe_as(offers=offers)
        self._look_later()

    async def _describe_as(self, **fields: Any) -> None:
        try:
            await self._describe(**fields)
        except (NatsError, OSError, TimeoutError) as error:
            # The broker is away: the record is written again when it is back.
            logger.warning("the registry could not be told of this worker: %s: %s", type(error).__name__, error)

    # Loading

    async def admits(self, model: ControlledModel, found: FoundModel, override: str | None, revision: int) -> bool:
        """Whether the model is to be loaded here; where it fits nowhere, `model` says so after that.

        An operation that somebody waits for (`revision`) is not over before those workers are done that are to have the
        model; at the start, and when folders are polled, they are not waited for.
        """
        needs = await asyncio.to_thread(self._needs, found, override)
        if needs is None:
            await self.withdraw(model.name)
            return True
        self._failed.discard(model.name)
        revision = max(revision, self._offers[model.name].revision if model.name in self._offers else 0)
        await self._tell({**self._offers, model.name: Offer(needs, revision)})
        await self._listen()
        if revision:
            with suppress(TimeoutError):
                async with asyncio.timeout(ANSWERS_PATIENCE_S):
                    await self._until(lambda: self._all_have_heard(model.name, revision))
            await self._until(lambda: self._is_over(model.name, revision))
        return self._verdict(model, needs)

    def _verdict(self, model: ControlledModel, needs: ModelNeeds) -> bool:
        planned, decided = self._decide()
        holders = planned.get(model.name, frozenset())
        if self._me in holders:
            return decided.get(model.name) is not Step.WAIT
        model.error = None
        if not model.is_serving:
            model.reason, model.elsewhere = "", False
        if not holders:
            reason = shortage(needs, self._facts())
            model.error = unavailable(f"load failed for model '{model.name}': {reason}")
            if not model.is_serving:
                model.reason, model.elsewhere = f"{model.error.code.title}: {reason}", True
        return False

    async def conclude(self, model: ControlledModel) -> None:
        """An operation on the model is over: what did not work anywhere is not to be held any more."""
        if model.name not in self._offers or model.is_serving:
            return
        others = (view.models.get(model.name) for worker, view in self._calls.registry.workers.items())
        is_there = any(record is not None and _holding(record) is Holding.READY for record in others)
        if model.error is not None or not is_there:
            await self.withdraw(model.name)

    @contextmanager
    def loading(self, model: ControlledModel) -> Iterator[None]:
        """While the context lasts, the model is being loaded here; at its end it serves, or has failed."""
        if model.name not in self._offers:
            yield
            return
        self._loading.add(model.name)
        self._look_later()
        try:
            yield
        finally:
            self._loading.discard(model.name)
            if not model.is_serving:
                self._failed.add(model.name)
            self._look_later()

    async def leave(self, timeout_s: float) -> None:
        """Holds nothing new, and returns when others have what they are to have of it, or after `timeout_s`."""
        if not self._offers:
            return
        self._leaving = True
        await self._describe_as(leaving=True)
        self._look_later()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: not any(map(self._is_needed, self._offers)))

    # What is to be done

    def is_offered(self, name: str) -> bool:
        """Whether the model is one that declares what it needs, and that this worker could hold."""
        return name in self._offers

    def has_failed(self, name: str) -> bool:
        """Whether the model could not be loaded here, and is not tried again by itself."""
        return name in self._failed

    def is_loading(self, name: str) -> bool:
        """Whether the model is being loaded here."""
        return name in self._loading

    def step(self, name: str) -> Step:
        """What this worker is to do about the model now."""
        return self._decide()[1].get(name, Step.KEEP) if self._calls.is_open else Step.KEEP

    def holders(self, name: str) -> frozenset[str] | None:
        """The workers that are to hold the model, None where that is up to nobody."""
        return self._decide()[0].get(name) if name in self._offers and self._calls.is_open else None

    def _decide(self) -> tuple[Plan, dict[str, Step]]:
        if self._decided is None:
            facts = self._facts()
            planned = plan(facts)
            self._decided = planned, steps(self._me, facts, planned)
        return self._decided

    def _facts(self) -> list[WorkerFacts]:
        mine = {name: self.holding(name) for name in self._offers}
        needs = {name: offer.needs for name, offer in self._offers.items()}
        others = [_facts_of(name, view) for name, view in self._calls.registry.workers.items() if name != self._me]
        return [WorkerFacts(self._me, self._capacity, needs, mine, self._leaving), *others]

    def _is_over(self, name: str, revision: int) -> bool:
        """Whether it is this worker's turn to load the model, or those that are to have it have tried."""
        planned, decided = self._decide()
        holders = planned.get(name, frozenset())
        if self._me in holders:
            return decided.get(name) is not Step.WAIT
        return not holders or any(self._revision(worker, name) >= revision for worker in holders)

    def _all_have_heard(self, name: str, revision: int) -> bool:
        for worker, view in self._calls.registry.workers.items():
            offer = view.record.offers.get(name)
            has_offered = offer is not None and offer.revision >= revision
            has_heard = has_offered or self._revision(worker, name) >= revision
            if worker != self._me and not (has_heard or view.record.draining or view.record.leaving):
                return False
        return True

    def _revision(self, worker: str, name: str) -> int:
        view = self._calls.registry.workers.get(worker)
        record = None if view is None else view.models.get(name)
        return 0 if record is None else record.revision

    def _is_needed(self, name: str) -> bool:
        """Whether others are about to have what only this worker has."""
        if self.holding(name) is not Holding.READY:
            return False
        holders = self._decide()[0].get(name, frozenset())
        facts = {one.worker: one for one in self._facts()}
        return any(facts[worker].holding(name) in (Holding.ABSENT, Holding.LOADING) for worker in holders) and not any(
            facts[worker].holding(name) is Holding.READY for worker in holders
        )

    # Changes

    async def _listen(self) -> None:
        """Returns when the registry can be read: without it nobody knows what others have."""
        while not self._calls.is_open:
            with suppress(WeirError):
                await self._calls.open()
        self._decided = None

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _look_later(self) -> None:
        self._decided = None
        if not self._is_looking:
            self._is_looking = True
            asyncio.get_running_loop().call_soon(self._look)

    @contained()
    def _look(self) -> None:
        """Whatever changed in this turn of the event loop is looked at once."""
        self._is_looking = False
        self._decided = None
        self._changed.set()
        if self._calls.is_open:
            for name, step in self._decide()[1].items():
                if step is not Step.KEEP and name not in self._loading:
                    self._take_step(name, step)

    @contained()
    def _take_step(self, name: str, step: Step) -> None:
        self.on_step(name, step)


def read_declaring(found: FoundModel, override: str | None) -> ModelConfig | None:
    """The model's configuration as it is written, None for one that declares nothing; blocking.

    Nearly all models are spared from being read twice.
    """
    try:
        if override is None:
            if not found.config_file or b"weir_" not in config_bytes(found):
                return None
        elif "weir_" not in override:
            return None
        config = read_config(found, override).config
        return None if needs_of(config) is None else config
    except (WeirError, OSError, BadDeclaration):
        return None  # loading it tells what is wrong


def _facts_of(worker: str, view: WorkerView) -> WorkerFacts:
    record = view.record
    return WorkerFacts(
        worker,
        record.capacity,
        {name: offer.needs for name, offer in record.offers.items()},
        {name: _holding(model) for name, model in view.models.items()},
        record.leaving or record.draining,
    )


def _holding(record: ModelRecord) -> Holding:
    """How a worker stands with a model, as it tells."""
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
