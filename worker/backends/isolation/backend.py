"""`IsolatedBackend` runs each instance of another backend in a process of its own.

The process is that of a Python model whose code is `isolated_model.py`, in which the other backend loads the model. After a
crash it is therefore restarted, and its batch runs again, as with any Python model; large tensors lie in shared memory. The
process receives the requests of a batch one by one, and assembles the batch itself.

On a GPU such an instance has one batch at a time, so copies do not overlap the run of the batch before: the memory that it
shares with its worker, and the messages between them, are for one call. Isolation is for models that crash, and not for
throughput. Its process may pin as much host memory as the worker.

A model is isolated if its configuration, or by default its backend, asks for it (`isolate_if_wanted`).
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar, cast, runtime_checkable

from weir.repository.completion import DescribedModel, DescribedTensor
from weir.repository.config_text import config_from_dict, config_to_json
from weir.schemas.config.model_config import ModelConfig, ModelOutput, ModelParameter
from weir.schemas.core.errors import internal, invalid
from weir.schemas.core.requests import InferRequest, RequestedOutput
from weir.schemas.core.tensors import Tensor
from weir.worker.backend_api.interface import (
    Availability,
    Backend,
    Execution,
    Instance,
    InstanceDevice,
    LoadedModel,
    ModelVersion,
    Result,
    VersionLoader,
)
from weir.worker.backends.isolation.messages import (
    DESCRIPTION_PARAMETER,
    MODEL_PARAMETER,
    STATE_PREFIX,
    locate_backend,
)
from weir.worker.backends.python.backend import PythonBackend, PythonModel
from weir.worker.cuda.pinned import PINNED
from weir.worker.devices.gpus import WorkerDevices

_CODE = Path(__file__).with_name("isolated_model.py")


class IsolatedBackend:
    """Has the capabilities of `inner` (`weir.worker.backend_api.interface.Backend`), whose instances run in processes."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self._python = PythonBackend(_CODE)

    def availability(self, devices: WorkerDevices) -> Availability:
        """The availability of the inner backend."""
        return self._inner.availability(devices)

    def describe(self, model: ModelVersion) -> DescribedModel | ModelConfig | None:
        """The description by the inner backend, made in a process."""
        completed = self._python.describe(_wrapped(model, self._inner))
        if not isinstance(completed, ModelConfig):
            raise internal("the model's process returned no configuration")
        description = json.loads(completed.parameter(DESCRIPTION_PARAMETER, "null"))
        if description is None:
            return None
        if "config" in description:
            return config_from_dict(description["config"])
        inputs, outputs, defaulted = ([DescribedTensor(*row) for row in rows] for rows in description["tensors"])
        return DescribedModel(inputs, outputs, defaulted, *description["sizes"])

    def load(self, model: ModelVersion) -> LoadedModel:
        """Instances share nothing: each process loads the model."""
        return _IsolatedModel(model, self._inner)


class _IsolatedModel(PythonModel):
    def __init__(self, model: ModelVersion, inner: Backend) -> None:
        super().__init__(model, _CODE)
        self._inner = inner

    def create_instance(self, device: InstanceDevice) -> Instance:
        instance = self._start(_wrapped(self._model, self._inner, device), device)
        states = _states(self._model.config)
        return _StatefulInstance(instance, states) if states else instance


class _StatefulInstance:
    """Separates the states in the results of the process from the outputs."""

    def __init__(self, instance: Instance, states: Sequence[ModelOutput]) -> None:
        self._instance = instance
        self._states = [RequestedOutput(state.name) for state in states]

    def execute(self, requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None]:
        requests = [self._with_states(request) for request in requests]
        # A process returns no handles.
        outcomes = cast(Sequence[Result | None], self._instance.execute(requests, execution))
        for outcome in filter(None, outcomes):
            _separate_states(outcome)
        return outcomes

    def _with_states(self, request: InferRequest) -> InferRequest:
        if not request.outputs:
            return request  # all outputs, the states included
        extended = copy.copy(request)
        extended.outputs = [*request.outputs, *self._states]
        return extended

    def close(self) -> None:
        self._instance.close()


def _separate_states(outcome: Result) -> None:
    """Moves the outputs that are states, which have prefixed names, to the states of the result."""
    outcome.states = [
        # A copy, because the state is kept and its memory is reused by the next batch.
        Tensor(tensor.name.removeprefix(STATE_PREFIX), tensor.datatype, tensor.shape, bytes(tensor.data))
        for tensor in outcome.outputs
        if tensor.name.startswith(STATE_PREFIX) and not isinstance(tensor.data, tuple)
    ]
    outcome.outputs = [tensor for tensor in outcome.outputs if not tensor.name.startswith(STATE_PREFIX)]


def _states(config: ModelConfig) -> list[ModelOutput]:
    """The implicit states as outputs of the process."""
    return [
        ModelOutput(name=STATE_PREFIX + state.output_name, data_type=state.data_type, dims=state.dims)
        for state in (config.sequence_batching.state if config.sequence_batching is not None else ())
    ]


def _wrapped(model: ModelVersion, inner: Backend, device: InstanceDevice | None = None) -> ModelVersion:
    """The model as the Python backend gets it: a parameter contains what the process needs to load the inner model."""
    config = model.config
    description = {
        "backend": locate_backend(inner, model),
        "name": model.name,
        "version": model.version,
        "model_directory": str(model.model_directory.resolve()),
        "config": config_to_json(config),
        "settings": dict(model.settings),
        # Without the host policy: the process was started under it.
        "device": None if device is None else (device.kind, device.device_id, device.name, device.profiles),
        "pinned_bytes": PINNED.total_bytes,
    }
    states = _states(config)
    wrapper = config.replace(
        backend="python",
        platform="",
        default_model_filename="",
        parameters={**config.parameters, MODEL_PARAMETER: ModelParameter(string_value=json.dumps(description))},
        output=[*config.output, *states],
        # The worker keeps implicit states, so that no sequence is lost with its process.
        sequence_batching=None if states else config.sequence_batching,
    )
    return dataclasses.replace(model, config=wrapper)


ISOLATION = "isolation"
"""The parameter of a model that decides: "process" or "thread"."""


@runtime_checkable
class PrefersProcess(Protocol):
    """A backend that wants to run some models in processes of their own."""

    def prefers_process(self, model: ModelVersion) -> bool:
        """Whether to isolate instances of this model where its configuration does not decide. Raises WeirError."""


AnyBackend = TypeVar("AnyBackend", bound=VersionLoader)


def isolate_if_wanted(backend: AnyBackend, model: ModelVersion) -> AnyBackend | IsolatedBackend:
    """The backend that loads this model: `backend`, or an `IsolatedBackend` around it.

    Python models run in processes in any case, and ensembles run nothing themselves. Raises WeirError (INVALID_ARG) for
    another value of the parameter.
    """
    if isinstance(backend, PythonBackend) or model.config.is_ensemble:
        return backend
    wanted = model.config.parameter(ISOLATION)
    if wanted not in ("", "process", "thread"):
        raise invalid(
            f"parameter '{ISOLATION}' of model '{model.name}' must be \"process\" or \"thread\", found '{wanted}'"
        )
    if wanted == "process" or (not wanted and isinstance(backend, PrefersProcess) and backend.prefers_process(model)):
        return IsolatedBackend(cast(Backend, backend))
    return backend
