"""`EnsembleBackend`: loads ensembles, as other backends load models; and the checks of their composing models.

An ensemble can be loaded when all its composing models are served, by this worker or by others, according to the registry.

`check_ensemble_models` checks an ensemble against its composing models. The order of the checks and their texts are those
of Triton 2.51. What the ensemble's configuration shows by itself is checked earlier (`weir.repository.scheduler_rules`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from weir.repository.dependencies import composing_models, resolve_namespaces, step_identity
from weir.repository.layout import FoundModel, ModelRepository
from weir.repository.loading import read_config
from weir.schemas.config.model_config import EnsembleStep, ModelConfig, ModelInput, ModelOutput, TransactionPolicy
from weir.schemas.core.errors import ErrorCode, WeirError, invalid
from weir.schemas.wire.registry import ModelState
from weir.worker.backend_api.inference_client import InferenceClient
from weir.worker.backend_api.interface import Instance, InstanceDevice, ModelVersion
from weir.worker.ensembles.run import EnsemblePlan

_REGISTRY_DELAY_S = 1.0
"""How long a model that was just loaded on this worker may take to appear in the registry."""

_POLL_S = 0.01
_LOOKUP_TIMEOUT_S = 30.0

_T = TypeVar("_T")


class InvalidEnsemble(WeirError):
    """An ensemble that can't run on its composing models as they are loaded now."""


class EnsembleModel:
    """A loaded ensemble: its plan, and the client by which it calls the models of its steps."""

    def __init__(self, plan: EnsemblePlan, client: InferenceClient) -> None:
        self.plan = plan
        self.client = client

    def create_instance(self, device: InstanceDevice) -> Instance:
        """Not supported: an ensemble has a coordinator in the event loop (`EnsembleInstance`), and no thread."""
        raise NotImplementedError

    def unload(self) -> None:
        """Does nothing: an ensemble holds no resources."""


class EnsembleBackend:
    """Loads ensembles. Its methods are called outside of `loop`, the event loop of `client`."""

    def __init__(self, repository: ModelRepository, client: InferenceClient, loop: asyncio.AbstractEventLoop) -> None:
        self._repository = repository
        self._client = client
        self._loop = loop

    def resolve(self, config: ModelConfig, found: FoundModel) -> ModelConfig:
        """The configuration with which `found` is served: decoupled if a step is, with the namespaces of its steps.

        Raises InvalidEnsemble.
        """
        circle = self.find_circle(config, found)
        if circle:
            raise InvalidEnsemble(ErrorCode.INVALID_ARG, f"circular dependency between ensembles: {circle}")
        config = self._wait_for(self._resolve_steps(config, found.namespace))
        composing = self._composing(config)
        try:
            check_ensemble_models(config, composing)
        except WeirError as error:
            raise InvalidEnsemble(error.code, error.message) from error
        return config.replace(model_transaction_policy=TransactionPolicy(decoupled=bool(_decoupled(composing))))

    def labels(self, config: ModelConfig) -> dict[str, list[str]]:
        """The labels that outputs of the ensemble inherit from the steps that write them."""
        composing, outputs = self._composing(config), config.output_by_name
        labels: dict[str, list[str]] = {}
        for step in config.ensemble_scheduling.step if config.ensemble_scheduling else ():
            for of_model, tensor in step.output_map.items():
                inherited = composing[step_identity(step)].labels.get(of_model)
                if tensor in outputs and inherited:
                    labels[tensor] = inherited
        return labels

    def describe(self, model: ModelVersion) -> None:
        """Does nothing: the configuration of an ensemble is complete as written."""

    def load(self, model: ModelVersion) -> EnsembleModel:
        """Loads the ensemble as its composing models are served now."""
        return EnsembleModel(EnsemblePlan(model.config, _decoupled(self._composing(model.config))), self._client)

    def find_circle(self, config: ModelConfig, found: FoundModel) -> str:
        """The path by which the ensemble `found` contains itself, as text; "" if it does not."""
        name = found.identity
        path = self._path_to(name, config, found, [])
        return "" if path is None else f"{name} -> ... -> {path[-1]} -> {name}"

    def _path_to(self, name: str, config: ModelConfig, found: FoundModel, path: list[str]) -> list[str] | None:
        if found.identity in path:
            return None
        path = [*path, found.identity]
        for composing in composing_models(resolve_namespaces(config, found.namespace, self._repository.has)):
            if composing == name:
                return path
            try:
                inner = self._repository.find(composing)
                inner_config = read_config(inner).config
            except WeirError:
                continue  # loading that model reports the error
            longer = self._path_to(name, inner_config, inner, path)
            if longer is not None:
                return longer
        return None

    def _composing(self, config: ModelConfig) -> dict[str, ComposingModel]:
        return self._wait_for(self._look_up(composing_models(config)))

    def _wait_for(self, looking: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(looking, self._loop).result(_LOOKUP_TIMEOUT_S)

    async def _resolve_steps(self, config: ModelConfig, namespace: str) -> ModelConfig:
        """The configuration with the namespaces of its steps, once all their models are served, or after a short wait."""
        await self._client.open()
        catalog, left_s = self._client.catalog, _REGISTRY_DELAY_S
        while True:
            resolved = resolve_namespaces(config, namespace, catalog.is_wanted)
            if left_s <= 0 or all(catalog.served_model(name) for name in composing_models(resolved)):
                return resolved
            await asyncio.sleep(_POLL_S)
            left_s -= _POLL_S

    async def _look_up(self, names: list[str]) -> dict[str, ComposingModel]:
        await self._client.open()
        return {name: self._composing_model(name) for name in names}

    def _composing_model(self, name: str) -> ComposingModel:
        served = self._client.catalog.served_model(name)
        if served is not None:
            return ComposingModel(served.config, served.versions, served.labels)
        failures = [
            f"version {number} is at {version.state} state: {version.reason};\n"
            for view in self._client.registry.workers.values()
            if name in view.models
            for number, version in view.models[name].versions.items()
            if version.state is ModelState.UNAVAILABLE
        ]
        return ComposingModel(failure="".join(failures).removesuffix("\n"))


def _decoupled(composing: dict[str, ComposingModel]) -> set[str]:
    return {name for name, model in composing.items() if model.config is not None and model.config.is_decoupled}


class ComposingModel(NamedTuple):
    """A composing model: its configuration, READY versions, and labels by output.

    A model without versions has a `failure`, or "" if no worker reports it, and no configuration.
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
        # A model without batching may have the batch as a dimension of its tensors; the shapes are compared below.
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
    # A model without batching may have the batch as a dimension of its tensor.
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
    """Raises WeirError if tensors of different decoupled models meet in a step or in a response."""
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
