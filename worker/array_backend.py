"""`ArrayBackend`: the easy way to write a backend, for models that are a function of numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from repository.completion import DescribedModel
from schemas.datatypes import BY_CONFIG_NAME, DATATYPES, name_of_numpy
from schemas.errors import internal
from schemas.model_config import ModelConfig
from worker.array_instance import ArrayInstance
from worker.backend import Availability, Instance, InstanceDevice, LoadedModel, ModelVersion
from worker.devices import WorkerDevices
from worker.tensor_declarations import NamedDatatype

ArrayFunction = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
"""From the inputs of a batch, by name, to its outputs, by name.

With `max_batch_size` above 0 the first dimension of each is the batch, and the rows of different requests lie one behind
the other. Inputs are read-only and valid until it returns. Strings are `bytes` in arrays of objects, BF16 is uint16.
"""


class ArrayBackend:
    """Derive the class `Backend` from it and write `open`; everything else may be left as it is.

    `formats` are the files that its models consist of, as `weir backends` lists them.
    """

    formats: Sequence[str] = ()

    def open(self, model: ModelVersion) -> ArrayFunction:
        """Loads a version of a model; what this returns is called by all its instances, several at a time."""
        raise NotImplementedError

    def describe(self, model: ModelVersion) -> DescribedModel | ModelConfig | None:
        """The model's inputs and outputs, for completing its configuration; None: it can't tell."""
        return None

    def availability(self, devices: WorkerDevices) -> Availability:
        """Where numpy runs; instances of any kind are run by the same function."""
        return Availability(("KIND_CPU",), self.formats)

    def load(self, model: ModelVersion) -> LoadedModel:
        """See `worker.backend.Backend`."""
        return _ArrayModel(self.open(model), model.config)


class _ArrayModel:
    def __init__(self, function: ArrayFunction, config: ModelConfig) -> None:
        self._function = function
        self._config = config
        batching = config.sequence_batching
        self._outputs = [NamedDatatype(row.name, BY_CONFIG_NAME[row.data_type].name) for row in config.output]
        self._states = [
            NamedDatatype(row.output_name, BY_CONFIG_NAME[row.data_type].name)
            for row in (batching.state if batching is not None else ())
        ]

    def create_instance(self, device: InstanceDevice) -> Instance:
        names = list(dict.fromkeys([*self._outputs, *self._states]))
        return ArrayInstance(_FunctionRunner(self._function, names), self._config, self._outputs, self._states)

    def unload(self) -> None:
        del self._function


class _FunctionRunner:
    """See `worker.array_instance.ArrayRunner`."""

    def __init__(self, function: ArrayFunction, outputs: Sequence[NamedDatatype]) -> None:
        self._function = function
        self._outputs = outputs

    def run(self, inputs: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
        arrays = self._function(inputs)
        if not isinstance(arrays, Mapping):
            raise internal(f"expected a dictionary of outputs, found type '{type(arrays).__name__}'")
        return [_checked(name, datatype, arrays) for name, datatype in self._outputs]

    def close(self) -> None:
        del self._function


def _checked(name: str, datatype: str, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    array = arrays.get(name)
    if not isinstance(array, np.ndarray):
        found = "is missing" if array is None else f"is no array but of type '{type(array).__name__}'"
        raise internal(f"output '{name}' {found}")
    if array.dtype != DATATYPES[datatype].numpy and not (datatype == "BYTES" and array.dtype.kind == "S"):
        found = name_of_numpy(array.dtype) or str(array.dtype)
        raise internal(f"output '{name}' is of type {found}, but the configuration says {datatype}")
    return array
