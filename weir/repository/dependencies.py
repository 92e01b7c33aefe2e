"""The models that ensembles need, by their configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from weir.schemas.config.model_config import EnsembleStep, ModelConfig
from weir.schemas.core.names import model_identity, plain_name


def step_identity(step: EnsembleStep) -> str:
    """The identity of a step's model, in a configuration that `resolve_namespaces` has returned."""
    return model_identity(step.model_name, step.model_namespace)


def composing_models(config: ModelConfig) -> list[str]:
    """The models an ensemble is made of, each once, in order of its steps; none for another model."""
    scheduling = config.ensemble_scheduling
    return [] if scheduling is None else list(dict.fromkeys(map(step_identity, scheduling.step)))


def resolve_namespaces(config: ModelConfig, namespace: str, is_known: Callable[[str], bool]) -> ModelConfig:
    """The configuration of an ensemble that lies in `namespace`, with `model_namespace` where a step needs one.

    As in Triton, the model of a step is the one of its name in the ensemble's own namespace, if `is_known(identity)`, else
    the only one of that name. Namespaces in a configuration file are ignored, as in Triton.
    """
    scheduling = config.ensemble_scheduling
    if scheduling is None:
        return config
    of_steps = [
        namespace if namespace and is_known(model_identity(step.model_name, namespace)) else ""
        for step in scheduling.step
    ]
    if of_steps == [step.model_namespace for step in scheduling.step]:
        return config
    steps = [step.replace(model_namespace=own) for step, own in zip(scheduling.step, of_steps, strict=True)]
    return config.replace(ensemble_scheduling=scheduling.replace(step=steps))


def unneeded_models(config: ModelConfig, others: Iterable[ModelConfig], explicit: Iterable[str]) -> list[str]:
    """The composing models to unload with `config`: those not in `explicit` that no other model needs."""
    needed = {name for other in others if other.name != config.name for name in composing_models(other)}
    named = set(explicit)
    return [name for name in composing_models(config) if name not in needed and plain_name(name) not in named]
