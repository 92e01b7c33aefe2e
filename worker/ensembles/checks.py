"""Whether an ensemble fits the models it is made of, as they are loaded now.

Order and texts are Triton's; a running Triton 2.51 was asked. What the ensemble's own configuration tells was checked
before (`repository.scheduler_rules`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from repository.dependencies import step_identity
from schemas.errors import invalid
from schemas.model_config import ModelConfig, ModelInput, ModelOutput
from schemas.scheduling_config import EnsembleStep


class ComposingModel(NamedTuple):
    """A model that an ensemble asks: its configuration, READY versions, and labels by output.

    `failure` tells why it has no version, "" where it is not known at all; it has neither then.
    """

    config: ModelConfig | None = None
    versions: Sequence[int] = ()
    labels: Mapping[str, list[str]] = {}
    failure: str = ""


class _Declared(NamedTuple):
    """How one model declares a tensor of the ensemble."""

    model: str
    data_type: str
    dims: list[int]
    full_dims: list[int]


def check_ensemble_models(config: ModelConfig, composing: Mapping[str, ComposingModel]) -> None:
    """Raises WeirError (INVALID_ARG) if the ensemble can't run on these models."""
    steps = config.ensemble_scheduling.step if config.ensemble_scheduling is not None else []
    _check_available(config.name, steps, composing)
    configs = [_config(composing, step) for step in steps]
    for model in configs:
        # One that does not batch has the batch as a dimension of its own, if the shapes agree.
        if 0 < model.max_batch_size < config.max_batch_size:
            raise invalid(
                f"ensemble {config.name} allows maximum batch size {config.max_batch_size}, but it contains model "
                f"{model.name} which only allows maximum batch size to be {model.max_batch_size}"
            )
    own: list[ModelInput | ModelOutput] = [*config.input, *config.output]
    declared = {tensor.name: _declared(config, tensor) for tensor in own}
    for step, model in zip(steps, configs, strict=True):
        _check_mapping(config.name, step, model, declared)
    _check_origins(config, steps, configs)


def _check_available(name: str, steps: Sequence[EnsembleStep], composing: Mapping[str, ComposingModel]) -> None:
    missing = [m for m, found in composing.items() if not found.versions and not found.failure]
    if missing:
        raise invalid(f"ensemble {name} contains models that are not available or ambiguous: {', '.join(missing)}")
    for step in steps:
        found = composing[step_identity(step)]
        if not found.versions:
            raise invalid(
                f"ensemble '{name}' depends on '{step.model_name}' which has no loaded version. Model "
                f"'{step.model_name}' loading failed with error: {found.failure}"
            )
        if step.model_version >= 0 and step.model_version not in found.versions:
            raise invalid(
                f"ensemble '{name}' depends on '{step.model_name}' whose required version {step.model_version} is not "
                "loaded."
            )


def _config(composing: Mapping[str, ComposingModel], step: EnsembleStep) -> ModelConfig:
    config = composing[step_identity(step)].config
    assert config is not None  # noqa: S101 - models with versions have one
    return config


def _check_mapping(name: str, step: EnsembleStep, model: ModelConfig, declared: dict[str, _Declared]) -> None:
    for of_model, tensor in step.input_map.items():
        found = model.input_by_name.get(of_model)
        if found is None and of_model not in _server_inputs(model):
            raise invalid(
                f"in ensemble {name}, ensemble tensor {tensor} is mapping to non-existing input {of_model} in model "
                f"{model.name}"
            )
        if found is not None:
            _check_consistency(name, tensor, _declared(model, found), declared)
    for wanted in model.input:
        if wanted.name not in step.input_map and not wanted.optional:
            raise invalid(
                f"in ensemble {name}, input {wanted.name} in model {model.name} is not mapped to any ensemble tensors"
            )
    for of_model, tensor in step.output_map.items():
        output = model.output_by_name.get(of_model)
        if output is None:
            raise invalid(
                f"in ensemble {name}, ensemble tensor {tensor} is mapped from non-existing output {of_model} in model "
                f"{model.name}"
            )
        _check_consistency(name, tensor, _declared(model, output), declared)


def _server_inputs(model: ModelConfig) -> set[str]:
    return {name for batch_input in model.batch_input for name in batch_input.target_name}


def _check_consistency(name: str, tensor: str, here: _Declared, declared: dict[str, _Declared]) -> None:
    there = declared.setdefault(tensor, here)
    subject = f"in ensemble {name}, ensemble tensor {tensor}: "
    if here.data_type != there.data_type:
        raise invalid(
            f"{subject}inconsistent data type: {there.data_type} is inferred from model {there.model} while "
            f"{here.data_type} is inferred from model {here.model}"
        )
    # Between a model that batches and one that doesn't, the batch may be a dimension of the latter's tensor.
    if not _agree(there.dims, here.dims) and not _agree(there.full_dims, here.full_dims):
        raise invalid(
            f"{subject}inconsistent shape: {_text(there.full_dims)} is inferred from model {there.model} while "
            f"{_text(here.full_dims)} is inferred from model {here.model}"
        )


def _declared(model: ModelConfig, tensor: ModelInput | ModelOutput) -> _Declared:
    full = [-1, *tensor.dims] if model.max_batch_size > 0 else list(tensor.dims)
    return _Declared(model.name, tensor.data_type, list(tensor.dims), full)


def _agree(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


def _text(dims: Sequence[int]) -> str:
    return "[" + ",".join(map(str, dims)) + "]"


def _check_origins(config: ModelConfig, steps: Sequence[EnsembleStep], configs: Sequence[ModelConfig]) -> None:
    """Tensors that meet in a step, or in a response, must come of the same responses of decoupled models."""
    origins: dict[str, int] = {tensor.name: -1 for tensor in config.input}
    waiting = list(range(len(steps)))
    while waiting:
        index = next(i for i in waiting if origins.keys() >= set(steps[i].input_map.values()))
        waiting.remove(index)
        own = config.output_by_name.keys() & set(steps[index].output_map.values())
        subject = config.name if own else steps[index].model_name
        taken = [origins[tensor] for tensor in steps[index].input_map.values()]
        origin = _common_origin(config.name, subject, taken)
        for tensor in steps[index].output_map.values():
            origins[tensor] = index if configs[index].is_decoupled else origin
    _common_origin(config.name, config.name, [origins[output.name] for output in config.output])


def _common_origin(name: str, model: str, origins: Sequence[int]) -> int:
    if len(set(origins)) > 1:
        raise invalid(
            f"in ensemble {name}, step of model '{model}' receives inputs originated from different decoupled models"
        )
    return origins[0]
