"""Which queues there are to own: one for each model, or as many as it has partitions."""

from __future__ import annotations

from collections.abc import Iterable

from bus.live_queues import LiveQueue
from schemas.model_config import ModelConfig
from schemas.partitions import PARTITIONS, partitions_of
from schemas.registry import ModelRecord


def queues_of(config: ModelConfig | None, model: str = "") -> list[LiveQueue]:
    """The queues of the model that is configured like this, by partition. `model` is its identity where that isn't its
    name alone (`schemas.model_identity`). One that could not be read has the queue that each model has.
    """
    if config is None:
        return [LiveQueue(model)]
    return [LiveQueue(model or config.name, partition) for partition in range(partitions_of(config))]


def latest_config(records: Iterable[ModelRecord]) -> ModelConfig | None:
    """The configuration by which callers choose partitions: that of the record written last. Raises ValueError."""
    record = max((r for r in records if r.config is not None), key=lambda r: r.written_ns, default=None)
    return None if record is None else ModelConfig.model_validate(record.config)


def queues_by(records: list[ModelRecord], model: str) -> list[LiveQueue]:
    """The queues of a model by what its workers tell; the first one also where they tell nothing that makes sense."""
    if not any(PARTITIONS in (record.config or {}).get("parameters", ()) for record in records):
        return [LiveQueue(model)]
    try:
        return queues_of(latest_config(records), model)
    except ValueError:
        return [LiveQueue(model)]
