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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar, cast, runtime_checkable

from weir.repository.completion import DescribedModel, DescribedTensor
from weir.repository.config_text import config_from_dict, config_to_json
from weir.schemas.config.model_config import ModelConfig, ModelOutput, ModelParameter
from weir.schemas.core.errors import WeirError, internal, invalid
from weir.schemas.core.requests import InferRequest, RequestedOutput
from weir.schemas.core.tensors import Tensor
from weir.worker.backend_api.interface import (
    Availability,
    Backend,
    Execution,
    ExecutionHandle,
    Instance,
    InstanceDevice,
    LoadedModel,
    ModelVersion,
    Result,
    VersionLoader,
)
from weir.worker.backends.isolation.messages import (
    BATCH_ERROR_PREFIX,
    DESCRIPTION_PARAMETER,
    MODEL_PARAMETER,
    STATE_PREFIX,
    decode_error,
    locate_backend,
)
from weir.worker.backends.python.backend import PythonBackend
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
        with _original_errors():
            completed = self._python.describe(_wrapped(model, self._inner))
        if not isinstance(completed, ModelConfig):
            raise internal("the model's process returned no configuration")
        description = json.loads(completed.parameter(DESCRIPTION_PARAMETER, "null"))
        if description is None:
            return None
        if "error" in description:
            raise decode_error(description["error"]) or internal(description["error"])
        if "config" in description:
            return config_from_dict(description["config"])
        inputs, outputs, defaulted = ([DescribedTensor(*row) for row in rows] for rows in description["tensors"])
        return DescribedModel(inputs, outputs, defaulted, *description["sizes"])

    def load(self, model: ModelVersion) -> LoadedModel:
        """Instances share nothing: each process loads the model."""
        return _IsolatedModel(self._python, self._inner, model)


class _IsolatedModel:
    starts_in_parallel = True
    is_isolated = True

    def __init__(self, python: PythonBackend, inner: Backend, model: ModelVersion) -> None:
        self._python = python
        self._inner = inner
        self._model = model
        self._loaded: list[LoadedModel] = []

    def create_instance(self, device: InstanceDevice) -> Instance:
        with _original_errors():
            loaded = self._python.load(_wrapped(self._model, self._inner, device))
            self._loaded.append(loaded)
            instance = loaded.create_instance(device)
        return _IsolatedInstance(instance, _states(self._model.config))

    def unload(self) -> None:
        # Each instance has ended its own process; this releases their custom metrics.
        while self._loaded:
            self._loaded.pop().unload()


class _IsolatedInstance:
    """Translates the results of the process into those of the instance in it."""

    def __init__(self, instance: Instance, states: Sequence[str]) -> None:
        self._instance = instance
        self._states = [RequestedOutput(STATE_PREFIX + name) for name in states]

    def execute(self, requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None]:
        if self._states:
            requests = [self._with_states(request) for request in requests]
        outcomes = self._instance.execute(requests, execution)
        if isinstance(outcomes, ExecutionHandle):
            outcomes = outcomes.results()
        for outcome in outcomes:
            if not outcome:
                continue
            if outcome.error is not None and outcome.error.message.startswith(BATCH_ERROR_PREFIX):
                raise WeirError(outcome.error.code, outcome.error.message.removeprefix(BATCH_ERROR_PREFIX))
            if self._states:
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


@contextmanager
def _original_errors() -> Iterator[None]:
    """Raises an error of the inner backend as it was raised in the process, without a traceback."""
    try:
        yield
    except WeirError as error:
        raise decode_error(error.message) or error from error


def _separate_states(outcome: Result) -> None:
    """Moves the outputs that are states, which have prefixed names, to the states of the result."""
    outcome.states = [
        # A copy, because the state is kept and its memory is reused by the next batch.
        Tensor(tensor.name.removeprefix(STATE_PREFIX), tensor.datatype, tensor.shape, bytes(tensor.data))
        for tensor in outcome.outputs
        if tensor.name.startswith(STATE_PREFIX) and not isinstance(tensor.data, tuple)
    ]
    outcome.outputs = [tensor for tensor in outcome.outputs if not tensor.name.startswith(STATE_PREFIX)]


def _states(config: ModelConfig) -> list[str]:
    batching = config.sequence_batching
    return [] if batching is None else [state.output_name for state in batching.state]


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
        "device": None if device is None else _device_fields(device),
        "pinned_bytes": PINNED.total_bytes,
    }
    states = [
        ModelOutput(name=STATE_PREFIX + state.output_name, data_type=state.data_type, dims=state.dims)
        for state in (config.sequence_batching.state if config.sequence_batching is not None else ())
    ]
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


def _device_fields(device: InstanceDevice) -> dict[str, object]:
    """The fields that the process needs. The host policy is left out: the process was started under it."""
    fields = {field.name: getattr(device, field.name) for field in dataclasses.fields(device)}
    return {name: value for name, value in fields.items() if type(value) in (str, int, tuple)}


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
    wanted = _isolation_parameter(model.config)
    if wanted == "process" or (not wanted and isinstance(backend, PrefersProcess) and backend.prefers_process(model)):
        return IsolatedBackend(cast(Backend, backend))
    return backend


def _isolation_parameter(config: ModelConfig) -> str:
    wanted = config.parameter(ISOLATION)
    if wanted not in ("", "process", "thread"):
        raise invalid(
            f"parameter '{ISOLATION}' of model '{config.name}' must be \"process\" or \"thread\", found '{wanted}'"
        )
    return wanted
