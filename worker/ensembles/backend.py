"""`EnsembleBackend`: what makes ensembles of configurations, in the place that other models' backends have.

An ensemble is loaded when the models it is made of are served, by this worker or others, as the registry tells.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from repository.dependencies import composing_models, in_namespaces, step_identity
from repository.layout import FoundModel, ModelRepository
from repository.loading import read_config
from schemas.errors import ErrorCode, WeirError
from schemas.model_config import ModelConfig, TransactionPolicy
from schemas.registry import ModelState
from worker.backend import Instance, InstanceDevice, ModelVersion
from worker.ensembles.checks import ComposingModel, check_ensemble_models
from worker.ensembles.plan import EnsemblePlan
from worker.inner_calls import InnerCalls

_ECHO_PATIENCE_S = 1.0
"""How long a model that was just loaded here may take until the registry tells of it."""

_ECHO_POLL_S = 0.01
_LOOK_TIMEOUT_S = 30.0

_T = TypeVar("_T")


class UnfitEnsemble(WeirError):
    """An ensemble that can't run on the models it is made of, as they are now."""


class EnsembleModel:
    """A loaded ensemble: its plan, and the way to ask its steps."""

    def __init__(self, plan: EnsemblePlan, calls: InnerCalls) -> None:
        self.plan = plan
        self.calls = calls

    def create_instance(self, device: InstanceDevice) -> Instance:
        """Ensembles have a coordinator in the event loop, and no instance in a thread."""
        raise NotImplementedError

    def unload(self) -> None:
        """Nothing is held."""


class EnsembleBackend:
    """See the module. Called off the event loop `loop`, in which `calls` lives."""

    def __init__(self, repository: ModelRepository, calls: InnerCalls, loop: asyncio.AbstractEventLoop) -> None:
        self._repository = repository
        self._calls = calls
        self._loop = loop

    def settle(self, config: ModelConfig, found: FoundModel) -> ModelConfig:
        """`config` of `found` as it is served: decoupled where a step is, and with the namespaces of its steps.

        Raises UnfitEnsemble.
        """
        circle = self.circle(config, found)
        if circle:
            raise UnfitEnsemble(ErrorCode.INVALID_ARG, f"circular dependency between ensembles: {circle}")
        config = self._wait_for(self._settle_steps(config, found.namespace))
        composing = self._composing(config)
        try:
            check_ensemble_models(config, composing)
        except WeirError as error:
            raise UnfitEnsemble(error.code, error.message) from error
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
        """A configuration of an ensemble is never completed from anything else."""

    def load(self, model: ModelVersion) -> EnsembleModel:
        """See `worker.backend.Backend`."""
        return EnsembleModel(EnsemblePlan(model.config, _decoupled(self._composing(model.config))), self._calls)

    def circle(self, config: ModelConfig, found: FoundModel) -> str:
        """How the ensemble `found` comes to be a part of itself, "" where it does not."""
        name = found.identity
        way = self._way_back(name, config, found, [])
        return "" if way is None else f"{name} -> ... -> {way[-1]} -> {name}"

    def _way_back(self, name: str, config: ModelConfig, found: FoundModel, way: list[str]) -> list[str] | None:
        if found.identity in way:
            return None
        way = [*way, found.identity]
        for composing in composing_models(in_namespaces(config, found.namespace, self._repository.has)):
            if composing == name:
                return way
            try:
                inner = self._repository.find(composing)
                of_inner = read_config(inner).config
            except WeirError:
                continue  # it has no steps here; what is wrong with it is told elsewhere
            back = self._way_back(name, of_inner, inner, way)
            if back is not None:
                return back
        return None

    def _composing(self, config: ModelConfig) -> dict[str, ComposingModel]:
        return self._wait_for(self._look(composing_models(config)))

    def _wait_for(self, looking: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(looking, self._loop).result(_LOOK_TIMEOUT_S)

    async def _settle_steps(self, config: ModelConfig, namespace: str) -> ModelConfig:
        """The configuration with the namespaces of its steps, as soon as all their models are served, or a little later."""
        await self._calls.open()
        catalog, patience_s = self._calls.catalog, _ECHO_PATIENCE_S
        while True:
            settled = in_namespaces(config, namespace, catalog.knows)
            if patience_s <= 0 or all(catalog.served_model(name) for name in composing_models(settled)):
                return settled
            await asyncio.sleep(_ECHO_POLL_S)
            patience_s -= _ECHO_POLL_S

    async def _look(self, names: list[str]) -> dict[str, ComposingModel]:
        await self._calls.open()
        return {name: self._composing_model(name) for name in names}

    def _composing_model(self, name: str) -> ComposingModel:
        served = self._calls.catalog.served_model(name)
        if served is not None:
            return ComposingModel(served.config, served.versions, served.labels)
        failures = [
            f"version {number} is at {version.state} state: {version.reason};\n"
            for view in self._calls.registry.workers.values()
            if name in view.models
            for number, version in view.models[name].versions.items()
            if version.state is ModelState.UNAVAILABLE
        ]
        return ComposingModel(failure="".join(failures).removesuffix("\n"))


def _decoupled(composing: dict[str, ComposingModel]) -> set[str]:
    return {name for name, model in composing.items() if model.config is not None and model.config.is_decoupled}
