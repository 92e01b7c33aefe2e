"""Backends for models that are functions of numpy arrays: `ArrayBackend` is the simplest way to write one.

`ArrayInstance` assembles batches and splits their outputs, for every backend whose models run on arrays of the host.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from weir.repository.completion import DescribedModel
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import internal
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import BY_CONFIG_NAME, DATATYPES, name_of_numpy
from weir.worker.backend_api.interface import (
    Availability,
    Execution,
    Instance,
    InstanceDevice,
    LoadedModel,
    ModelVersion,
    Result,
)
from weir.worker.devices.gpus import WorkerDevices
from weir.worker.execution.batch_tensors import BatchAssembler, BatchInputs, BatchOutputs, NamedDatatype, ragged_inputs

ArrayFunction = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
"""Maps the inputs of a batch, by name, to its outputs, by name.

With `max_batch_size` above 0 the first dimension of each array is the batch, which concatenates the rows of the requests.
Inputs are read-only and valid until the function returns. Strings are `bytes` in arrays of objects, BF16 is uint16.
"""


class ArrayBackend:
    """Base class of a backend: derive `Backend` from it and implement `open`; everything else has a default.

    `formats` are the files that its models consist of, as `weir backends` lists them. `kinds` are the kinds of instances:
    with "KIND_GPU" the function moves its arrays to the GPU by itself, which `open` has to know.
    """

    formats: Sequence[str] = ()
    kinds: Sequence[str] = ("KIND_CPU",)

    if TYPE_CHECKING:  # with either signature
        open: Callable[..., ArrayFunction]
    else:

        def open(self, model: ModelVersion) -> ArrayFunction:
            """Loads a version of a model; also as `open(self, model, device)`.

            All instances call the function that the first form returns, several at the same time. The second form is called
            once for each instance, in its thread, with its `InstanceDevice` (`kind`, `device_id`, `name`).
            """
            raise NotImplementedError

    def describe(self, model: ModelVersion) -> DescribedModel | ModelConfig | None:
        """The model's inputs and outputs, for completing its configuration; None where they are not known."""
        return None

    def availability(self, devices: WorkerDevices) -> Availability:
        """Instances run on the `kinds` for which this machine has a device."""
        kinds = tuple(kind for kind in self.kinds if kind != "KIND_GPU" or devices.host_gpus)
        return Availability(
            kinds, self.formats, "", () if len(kinds) == len(self.kinds) else ("this machine has no GPU",)
        )

    def load(self, model: ModelVersion) -> LoadedModel:
        """Loads a version of a model by `open`."""
        if _takes_device(self.open):
            return _ArrayModel(lambda device: self.open(model, device), model.config)
        function = self.open(model)
        return _ArrayModel(lambda device: function, model.config)


def _takes_device(open_model: Callable[..., ArrayFunction]) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = [one for one in inspect.signature(open_model).parameters.values() if one.kind in kinds]
    return len(given) > 1 and given[1].default is inspect.Parameter.empty


def declared_outputs(config: ModelConfig) -> tuple[list[NamedDatatype], list[NamedDatatype]]:
    """The outputs that a configuration declares, and those that are implicit states."""
    batching = config.sequence_batching
    states = () if batching is None else batching.state
    return (
        [NamedDatatype(row.name, BY_CONFIG_NAME[row.data_type].name) for row in config.output],
        [NamedDatatype(row.output_name, BY_CONFIG_NAME[row.data_type].name) for row in states],
    )


class _ArrayModel:
    def __init__(self, function_for: Callable[[InstanceDevice], ArrayFunction], config: ModelConfig) -> None:
        self._function_for = function_for
        self._config = config
        self._outputs, self._states = declared_outputs(config)

    def create_instance(self, device: InstanceDevice) -> Instance:
        names = list(dict.fromkeys([*self._outputs, *self._states]))
        runner = _FunctionRunner(self._function_for(device), names)
        return ArrayInstance(runner, self._config, self._outputs, self._states)

    def unload(self) -> None:
        del self._function_for


class _FunctionRunner:
    """Runs a backend's function, and checks what it returns."""

    def __init__(self, function: ArrayFunction, outputs: Sequence[NamedDatatype]) -> None:
        self._function = function
        self._outputs = outputs

    def run(self, inputs: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
        arrays = self._function(inputs)
        if not isinstance(arrays, Mapping):
            raise internal(f"expected a dictionary of outputs, found type '{type(arrays).__name__}'")
        return [checked_output(name, datatype, arrays) for name, datatype in self._outputs]

    def close(self) -> None:
        del self._function


def checked_output(name: str, datatype: str, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """The output of that name. Raises WeirError if it is missing, no array, or of another datatype."""
    array = arrays.get(name)
    if not isinstance(array, np.ndarray):
        found = "is missing" if array is None else f"must be an array, found type '{type(array).__name__}'"
        raise internal(f"output '{name}' {found}")
    if array.dtype != DATATYPES[datatype].numpy and not (datatype == "BYTES" and array.dtype.kind == "S"):
        found = name_of_numpy(array.dtype) or str(array.dtype)
        raise internal(f"output '{name}' is of type {found}, but the configuration specifies {datatype}")
    return array


class ArrayRunner(Protocol):
    """One instance of a model that runs on arrays of the host. All calls come from the thread of the instance."""

    def run(self, inputs: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
        """The model's outputs, in the order of the names that the runner was created with.

        Arrays of BYTES hold `bytes` as objects. Inputs are read-only, and valid until it returns. Raises WeirError.
        """

    def close(self) -> None:
        """Releases what it holds."""


class ArrayInstance:
    """Assembles each batch into arrays, runs them by `runner`, and splits its outputs into results.

    The runner returns `outputs` followed by `states`. It implements `weir.worker.backend_api.interface.Instance`.
    """

    def __init__(
        self,
        runner: ArrayRunner,
        config: ModelConfig,
        outputs: Sequence[NamedDatatype],
        states: Sequence[NamedDatatype] = (),
    ) -> None:
        self._runner = runner
        self._outputs = BatchOutputs(config, outputs, states)
        self._batching = config.max_batch_size > 0
        self._assembler = BatchAssembler(ragged_inputs(config))
        self._batch_inputs = BatchInputs(config) or None

    def execute(self, requests: Sequence[InferRequest], execution: Execution) -> list[Result]:
        """Runs one batch; one result for each request."""
        inputs = self._assembler.assemble(requests, self._batching, execution.reader)
        if self._batch_inputs is not None:
            inputs |= self._batch_inputs.of(requests)
        execution.input_ready()
        arrays = self._runner.run(inputs)
        execution.inferred()
        return self._outputs.results(requests, arrays)

    def close(self) -> None:
        """Releases the runner."""
        self._runner.close()
