"""`IsolatedBackend`: another backend, each of whose instances runs in a process of its own.

The process is that of a Python model whose code is `isolated_model.py`, which has the other backend load the model. So it
is started anew after a crash, and its batch done again, as with any Python model; large tensors lie in shared memory. It
gets the requests of a batch one by one, and puts the batch together itself.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from repository.completion import DescribedModel, DescribedTensor
from repository.config_text import config_from_dict, config_to_json
from schemas.errors import WeirError, internal
from schemas.model_config import ModelConfig, ModelOutput, ModelParameter
from schemas.requests import InferRequest, RequestedOutput
from schemas.tensors import Tensor
from worker.backend import (
    Availability,
    Backend,
    Execution,
    Instance,
    InstanceDevice,
    LoadedModel,
    ModelVersion,
    Pending,
    Result,
)
from worker.backends.python import PythonBackend
from worker.devices import WorkerDevices
from worker.isolation.inner_backend import source_of
from worker.isolation.messages import DESCRIBED, INNER, RAISED, STATE, error_in

_CODE = Path(__file__).with_name("isolated_model.py")


class IsolatedBackend:
    """See the module, and `worker.backend.Backend`: what the `inner` one can, it can."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self._python = PythonBackend(_CODE)

    def availability(self, devices: WorkerDevices) -> Availability:
        """That of the other backend."""
        return self._inner.availability(devices)

    def describe(self, model: ModelVersion) -> DescribedModel | ModelConfig | None:
        """What the other backend says, asked in a process of its own."""
        with _as_told():
            answered = self._python.describe(_outer(model, self._inner))
        if not isinstance(answered, ModelConfig):
            raise internal("the model's process has not answered what was asked")
        told = json.loads(answered.parameter(DESCRIBED, "null"))
        if told is None:
            return None
        if "config" in told:
            return config_from_dict(told["config"])
        return DescribedModel(*([DescribedTensor(*row) for row in rows] for rows in told["tensors"]))

    def load(self, model: ModelVersion) -> LoadedModel:
        """Nothing is shared by instances."""
        return _IsolatedModel(self._python, self._inner, model)


class _IsolatedModel:
    starts_in_parallel = True

    def __init__(self, python: PythonBackend, inner: Backend, model: ModelVersion) -> None:
        self._python = python
        self._inner = inner
        self._model = model
        self._loaded: list[LoadedModel] = []

    def create_instance(self, device: InstanceDevice) -> Instance:
        with _as_told():
            loaded = self._python.load(_outer(self._model, self._inner, device))
            self._loaded.append(loaded)
            instance = loaded.create_instance(device)
        return _IsolatedInstance(instance, _states(self._model.config))

    def unload(self) -> None:
        # Each instance has ended its own process; what these have counted goes now.
        while self._loaded:
            self._loaded.pop().unload()


class _IsolatedInstance:
    """Takes what the process says for what the instance in it would have said."""

    def __init__(self, instance: Instance, states: Sequence[str]) -> None:
        self._instance = instance
        self._states = [RequestedOutput(STATE + name) for name in states]

    def execute(self, requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None]:
        """See `worker.backend.Instance`."""
        if self._states:
            requests = [self._asking_for_states(request) for request in requests]
        outcomes = self._instance.execute(requests, execution)
        if isinstance(outcomes, Pending):
            outcomes = outcomes.results()
        for outcome in outcomes:
            if not outcome:
                continue
            if outcome.error is not None and outcome.error.message.startswith(RAISED):
                raise WeirError(outcome.error.code, outcome.error.message.removeprefix(RAISED))
            if self._states:
                _take_states(outcome)
        return outcomes

    def _asking_for_states(self, request: InferRequest) -> InferRequest:
        if not request.outputs:
            return request
        asking = copy.copy(request)
        asking.outputs = [*request.outputs, *self._states]
        return asking

    def close(self) -> None:
        self._instance.close()


@contextmanager
def _as_told() -> Iterator[None]:
    """An error that the other backend raised in the process is raised as it was, without where that was."""
    try:
        yield
    except WeirError as error:
        raise error_in(error.message) or error from error


def _take_states(outcome: Result) -> None:
    """Outputs that are states, which come under other names, become the outcome's states."""
    outcome.states = [
        # A state is kept, and the memory it came in is the next batch's.
        Tensor(tensor.name.removeprefix(STATE), tensor.datatype, tensor.shape, bytes(tensor.data))
        for tensor in outcome.outputs
        if tensor.name.startswith(STATE) and not isinstance(tensor.data, tuple)
    ]
    outcome.outputs = [tensor for tensor in outcome.outputs if not tensor.name.startswith(STATE)]


def _states(config: ModelConfig) -> list[str]:
    batching = config.sequence_batching
    return [] if batching is None else [state.output_name for state in batching.state]


def _outer(model: ModelVersion, inner: Backend, device: InstanceDevice | None = None) -> ModelVersion:
    """The model as the Python backend sees it: it carries what the process needs to know in a parameter."""
    config = model.config
    told = {
        "backend": source_of(inner, model),
        "name": model.name,
        "version": model.version,
        "model_directory": str(model.model_directory.resolve()),
        "config": config_to_json(config),
        "settings": dict(model.settings),
        "device": None if device is None else _told_device(device),
    }
    states = [
        ModelOutput(name=STATE + state.output_name, data_type=state.data_type, dims=state.dims)
        for state in (config.sequence_batching.state if config.sequence_batching is not None else ())
    ]
    outer = config.replace(
        backend="python",
        platform="",
        default_model_filename="",
        parameters={**config.parameters, INNER: ModelParameter(string_value=json.dumps(told))},
        output=[*config.output, *states],
        # The states of sequences lie with the worker, so no sequence goes with its process.
        sequence_batching=None if states else config.sequence_batching,
    )
    return dataclasses.replace(model, config=outer)


def _told_device(device: InstanceDevice) -> dict[str, object]:
    """What travels of where an instance runs: what else there is of it holds for the process as it was started."""
    told = {field.name: getattr(device, field.name) for field in dataclasses.fields(device)}
    return {name: value for name, value in told.items() if type(value) in (str, int, tuple)}
