"""Which models need which, by their configurations."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.model_config import ModelConfig


def composing_models(config: ModelConfig) -> list[str]:
    """The models an ensemble is made of, each once, in order of its steps; none for another model."""
    scheduling = config.ensemble_scheduling
    return [] if scheduling is None else list(dict.fromkeys(step.model_name for step in scheduling.step))


def left_over(config: ModelConfig, others: Iterable[ModelConfig], explicit: Iterable[str]) -> list[str]:
    """The composing models that go with `config`: those nobody asked for by name, and that no other model needs."""
    needed = {name for other in others if other.name != config.name for name in composing_models(other)}
    return [name for name in composing_models(config) if name not in needed and name not in set(explicit)]
