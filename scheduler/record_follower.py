"""`RecordFollower`: what workers' records in the registry mean for the models that a scheduler owns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from bus import subjects
from bus.live_queues import LiveQueue
from bus.registry import RegistryView
from runtime.log_limiter import LogLimiter
from scheduler.counters import forget_unloaded
from scheduler.outlook import is_unloading, outlook
from scheduler.owned_model import OwnedModel
from scheduler.shared_outlook import shared_by
from scheduler.strategy_files import StrategyFiles
from scheduler.version_scheduler import Ended
from scheduler.wanted_queues import queues_by
from schemas.drain import DrainMessage
from schemas.model_config import ModelConfig
from schemas.registry import ModelRecord

_limited = LogLimiter(logging.getLogger("weir.scheduler"))


class RecordFollower:
    """Tells models' policies which versions there are, how they are configured, and who runs them.

    `known(model)` is what a model's workers told before they went, where that is remembered.
    """

    def __init__(
        self,
        registry: RegistryView,
        strategies: StrategyFiles,
        known: Callable[[str], ModelRecord | None] = lambda _name: None,
    ) -> None:
        self._registry = registry
        self._strategies = strategies
        self._known = known
        self._most_queues: dict[str, int] = {}  # of models that have, or have had, several

    def queues_of(self, model: str) -> list[LiveQueue]:
        """The queues of the model, also those that it had before it was loaded with fewer partitions.

        Something may be left in those; their owners find out what becomes of it (`scheduler.partition_share`).
        """
        queues = queues_by(self._told(model), model)
        most = max(len(queues), self._most_queues.get(model, 1))
        if most > 1:
            self._most_queues[model] = most
        return queues + [LiveQueue(model, partition) for partition in range(len(queues), most)]

    def _records(self, model: str) -> dict[str, ModelRecord]:
        """By worker, what those tell of the model that go on taking batches."""
        views = {w: view for w, view in self._registry.workers.items() if not view.record.draining}
        return {worker: view.models[model] for worker, view in views.items() if model in view.models}

    def _told(self, model: str) -> list[ModelRecord]:
        """What workers tell of the model, or did before they went."""
        known = self._known(model)
        return list(self._records(model).values()) or ([known] if known else [])

    def update(self, owned: OwnedModel, now_us: int) -> Iterator[Ended]:
        """The records have changed: tells the model's policy; what ends by that is to be answered."""
        name = owned.name
        records = self._records(name)
        owned.let_go = {(w, v) for w, v in owned.let_go if w in records and is_unloading(records[w], v)}
        queues = len(queues_by(self._told(name), name))
        owned.signals.divide(queues)
        try:
            ahead = outlook(records, owned.let_go)
            if queues > 1 or owned.queue.partition:
                ahead = shared_by(ahead, records, owned.queue.partition, queues)
            configs = {worker: ModelConfig.model_validate(records[worker].config) for worker in ahead.instances}
        except ValueError as error:
            # Nobody vouches for a record: one that makes no sense is taken for one of nothing.
            _limited.warning("malformed record", "model %s: a worker's record of it makes no sense: %s", name, error)
            ahead, configs = outlook({}, ()), {}
        for worker, config in configs.items():
            for number in ahead.instances[worker]:
                owned.scheduler.configure(number, config, self._strategies.find(name, number, config))
        if not configs and not owned.scheduler.versions() and (known := self._known(name)) is not None:
            # Its queue is bounded as it will be when a worker comes.
            config = ModelConfig.model_validate(known.config)
            for number in known.versions:
                owned.scheduler.configure(number, config, self._strategies.find(name, number, config))
        owned.scheduler.look_ahead(ahead.retiring, ahead.given_up, ahead.is_given_up)
        for worker in self._registry.workers:
            yield owned.scheduler.set_instances(worker, *ahead.held_by(worker))
        if owned.scheduler.has_given_up:
            yield owned.scheduler.expire(now_us)
        forget_unloaded(owned.scheduler, [v.models[name] for v in self._registry.workers.values() if name in v.models])

    def needless(self, owned: OwnedModel, drain: DrainMessage, reply: str) -> list[int] | None:
        """The versions that a worker asks to unload and may, for nothing is left that it must run; None: don't answer.

        `reply` is where it wants the answer.
        """
        worker, model, versions, _ = drain
        view = self._registry.workers.get(worker)
        record = None if view is None else view.models.get(owned.name)
        if record is None or model != owned.name or reply != subjects.drained(worker):
            return None
        free = [v for v in versions if is_unloading(record, v) and not owned.scheduler.needs(worker, v)]
        owned.let_go.update((worker, version) for version in free)
        return free
