"""Which queues a model's record calls for."""

from __future__ import annotations

from bus.live_queues import LiveQueue
from schemas.registry import ModelRecord


def queues_of(record: ModelRecord) -> list[LiveQueue]:
    """The queues of live requests for the model that a worker has this record of."""
    return [LiveQueue(record.name)]
