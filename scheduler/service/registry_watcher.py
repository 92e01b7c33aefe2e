"""`RegistryWatcher`: applies workers' records in the registry to the policies of the queues that a scheduler owns.

`queues_of` and `queues_by` derive the queues of a model: one, or one for each partition.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

from weir.bus.kv.registry import RegistryView
from weir.bus.naming import subjects
from weir.bus.naming.live_queues import LiveQueue
from weir.runtime.log_limiter import LogLimiter
from weir.scheduler.batching.custom_strategy import StrategyFiles
from weir.scheduler.batching.outcome import Ended
from weir.scheduler.placement.placement_view import is_unloading, partition_view, placement_view
from weir.scheduler.service.owned_queue import OwnedQueue
from weir.scheduler.service.statistics import reset_unloaded_failures
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.config.parameters import PARTITIONS, partitions_of
from weir.schemas.wire.model_control import DrainMessage
from weir.schemas.wire.registry import ModelRecord

_limited = LogLimiter(logging.getLogger("weir.scheduler"))


class RegistryWatcher:
    """Updates policies with the versions of their models, their configurations and the instances that run them.

    `known(model)` is the record of a model that is remembered after its workers have left, or None.
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
        self._most_queues: dict[str, int] = {}  # of models that have or had several

    def queues_of(self, model: str) -> list[LiveQueue]:
        """Returns the queues of the model, including those from before it was loaded with fewer partitions.

        Requests may remain in those; their owners see them served or failed (`weir.scheduler.placement.placement_view`).
        """
        queues = queues_by(self._records_or_known(model), model)
        most = max(len(queues), self._most_queues.get(model, 1))
        if most > 1:
            self._most_queues[model] = most
        return queues + [LiveQueue(model, partition) for partition in range(len(queues), most)]

    def _records(self, model: str) -> dict[str, ModelRecord]:
        """Returns the model's records of workers that accept batches, by worker."""
        views = {w: view for w, view in self._registry.workers.items() if not view.record.draining}
        return {worker: view.models[model] for worker, view in views.items() if model in view.models}

    def _records_or_known(self, model: str) -> list[ModelRecord]:
        """Returns the model's records, or the one that is remembered."""
        known = self._known(model)
        return list(self._records(model).values()) or ([known] if known else [])

    def update(self, owned: OwnedQueue, now_us: int) -> Iterator[Ended]:
        """Applies changed records to a queue's policy; yields the requests that end by it."""
        name = owned.name
        records = self._records(name)
        owned.released_versions = {
            (w, v) for w, v in owned.released_versions if w in records and is_unloading(records[w], v)
        }
        queues = len(queues_by(self._records_or_known(name), name))
        owned.signals.divide(queues)
        try:
            view = placement_view(records, owned.released_versions)
            if queues > 1 or owned.queue.partition:
                view = partition_view(view, records, owned.queue.partition, queues)
            configs = {worker: ModelConfig.model_validate(records[worker].config) for worker in view.instances}
        except ValueError as error:
            _limited.warning(
                "malformed record",
                "model %s: ignoring a malformed record of a worker: %s",
                name,
                error,
            )
            view, configs = placement_view({}, ()), {}
        for worker, config in configs.items():
            for number in view.instances[worker]:
                owned.scheduler.configure(number, config, self._strategies.find(name, number, config))
        if not configs and not owned.scheduler.versions() and (known := self._known(name)) is not None:
            # The limits of its queue are those that will apply when a worker joins.
            config = ModelConfig.model_validate(known.config)
            for number in known.versions:
                owned.scheduler.configure(number, config, self._strategies.find(name, number, config))
        owned.scheduler.set_lifecycle(view.retiring, view.given_up, view.is_withdrawn)
        for worker in self._registry.workers:
            yield owned.scheduler.set_instances(worker, *view.held_by(worker))
        if owned.scheduler.has_withdrawn:
            yield owned.scheduler.expire(now_us)
        reset_unloaded_failures(
            owned.scheduler, [v.models[name] for v in self._registry.workers.values() if name in v.models]
        )

    def unneeded_versions(self, owned: OwnedQueue, drain: DrainMessage, reply: str) -> list[int] | None:
        """Returns the versions that a worker asks to unload and may, since no request needs them; None: do not reply.

        `reply` is the subject to which it wants the reply.
        """
        worker, model, versions = drain.worker, drain.model, drain.versions
        view = self._registry.workers.get(worker)
        record = None if view is None else view.models.get(owned.name)
        if record is None or model != owned.name or reply != subjects.drained(worker):
            return None
        free = [v for v in versions if is_unloading(record, v) and not owned.scheduler.needs(worker, v)]
        owned.released_versions.update((worker, version) for version in free)
        return free


def queues_of(config: ModelConfig | None, model: str = "") -> list[LiveQueue]:
    """Returns the queues of a model with this configuration, by partition.

    `model` is its identity if that is not its name alone (`weir.schemas.core.names`). An unreadable configuration counts
    as one partition.
    """
    if config is None:
        return [LiveQueue(model)]
    return [LiveQueue(model or config.name, partition) for partition in range(partitions_of(config))]


def latest_config(records: Iterable[ModelRecord]) -> ModelConfig | None:
    """Returns the configuration by which callers choose partitions: that of the newest record. Raises ValueError."""
    record = max((r for r in records if r.config is not None), key=lambda r: r.written_ns, default=None)
    return None if record is None else ModelConfig.model_validate(record.config)


def queues_by(records: list[ModelRecord], model: str) -> list[LiveQueue]:
    """Returns the queues of a model by its workers' records; the first one if the records are malformed."""
    if not any(PARTITIONS in (record.config or {}).get("parameters", ()) for record in records):
        return [LiveQueue(model)]
    try:
        return queues_of(latest_config(records), model)
    except ValueError:
        return [LiveQueue(model)]
