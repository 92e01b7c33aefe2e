"""Which batcher a model's configuration asks for."""

from __future__ import annotations

from scheduler.batch_strategy import GuardedStrategy
from scheduler.batcher import Batcher, DefaultBatcher
from scheduler.dynamic_batcher import DynamicBatcher
from scheduler.ensemble_batcher import EnsembleBatcher
from scheduler.queue_rules import QueueRules
from scheduler.series import SeriesBatcher, forms_series
from schemas.model_config import ModelConfig


def batcher_for(config: ModelConfig, strategy: GuardedStrategy | None = None) -> Batcher:
    """A batcher with an empty queue, as `config` describes it; `strategy` is the model's own, if it has one."""
    if config.ensemble_scheduling is not None and not config.is_decoupled:
        # One whose responses come in pieces can't be done again with others: those run alone.
        return EnsembleBatcher()
    dynamic = config.dynamic_batching
    if dynamic is None:
        return SeriesBatcher() if forms_series(config) else DefaultBatcher()
    return DynamicBatcher(
        max_batch_size=config.max_batch_size,
        preferred_batch_sizes=dynamic.preferred_batch_size,
        max_queue_delay_us=dynamic.max_queue_delay_microseconds,
        rules=QueueRules.of(dynamic),
        strategy=strategy,
    )
