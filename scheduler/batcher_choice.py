"""Which batcher a model's configuration asks for."""

from __future__ import annotations

from scheduler.batcher import Batcher, DefaultBatcher
from scheduler.dynamic_batcher import DynamicBatcher
from schemas.model_config import ModelConfig

DEFAULT_MAX_QUEUE_SIZE = 10_000
"""Requests that may wait for one model version when its configuration sets no `max_queue_size`."""


def batcher_for(config: ModelConfig) -> Batcher:
    """A batcher with an empty queue, as `config` describes it."""
    dynamic = config.dynamic_batching
    if dynamic is None:
        return DefaultBatcher(DEFAULT_MAX_QUEUE_SIZE)
    policy = dynamic.default_queue_policy
    return DynamicBatcher(
        max_batch_size=config.max_batch_size,
        preferred_batch_sizes=dynamic.preferred_batch_size,
        max_queue_delay_us=dynamic.max_queue_delay_microseconds,
        max_queue_size=(policy.max_queue_size if policy is not None else 0) or DEFAULT_MAX_QUEUE_SIZE,
    )
