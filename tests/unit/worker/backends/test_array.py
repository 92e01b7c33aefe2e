"""`ArrayBackend` and `ArrayInstance`: functions of arrays as models, with batches, states and errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from weir.bus.payloads.arena import PayloadReader
from weir.repository.config_text import config_from_dict
from weir.schemas.core.errors import WeirError
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import Tensor
from weir.worker.backend_api.interface import Execution, Instance, InstanceDevice, LoadedModel, ModelVersion
from weir.worker.backends.array import ArrayBackend, ArrayFunction
from weir.worker.devices.gpus import CPU_ONLY

CONFIG = {
    "name": "m",
    "max_batch_size": 8,
    "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [2]}],
    "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [2]}],
}


class Functions(ArrayBackend):
    formats = ("weights.npz",)

    def __init__(self, function: ArrayFunction) -> None:
        self.function = function

    def open(self, model: ModelVersion) -> ArrayFunction:
        return self.function


def loaded(function: ArrayFunction, **fields: object) -> LoadedModel:
    return Functions(function).load(ModelVersion("m", 1, Path(), config_from_dict(CONFIG | fields)))


def instance(function: ArrayFunction, **fields: object) -> Instance:
    return loaded(function, **fields).create_instance(InstanceDevice("KIND_CPU", 0, "m_0"))


def request(*rows: list[float], **outputs: object) -> InferRequest:
    return InferRequest("m", inputs=[Tensor.from_numpy("X", np.array(rows, np.float32), "FP32")])


def run(made: Instance, *requests: InferRequest) -> list[list[list[float]]]:
    results = made.execute(requests, Execution(PayloadReader()))
    return [result.outputs[0].to_numpy().tolist() for result in results]  # type: ignore[union-attr]


def test_requests_run_as_one_batch() -> None:
    batches: list[np.ndarray] = []

    def double(inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        batches.append(inputs["X"])
        return {"Y": inputs["X"] * 2, "unused": np.zeros(1)}

    assert run(instance(double), request([1, 2], [3, 4]), request([5, 6])) == [[[2, 4], [6, 8]], [[10, 12]]]
    (batch,) = batches
    assert batch.shape == (3, 2)
    assert not batch.flags.writeable


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({}, "output 'Y' is missing"),
        ({"Y": [[1.0, 2.0]]}, "output 'Y' must be an array, found type 'list'"),
        ({"Y": np.zeros((1, 2))}, "output 'Y' is of type FP64, but the configuration specifies FP32"),
        ([np.zeros((1, 2))], "expected a dictionary of outputs, found type 'list'"),
    ],
)
def test_errors_name_the_output(returned: object, message: str) -> None:
    with pytest.raises(WeirError, match=message):
        run(instance(lambda inputs: returned), request([1, 2]))  # type: ignore[arg-type,return-value]


def test_strings_may_be_arrays_of_fixed_length() -> None:
    output = [{"name": "Y", "data_type": "TYPE_STRING", "dims": [2]}]
    made = instance(lambda inputs: {"Y": np.array([[b"a", b"bc"]])}, output=output)
    assert run(made, request([1, 2])) == [[[b"a", b"bc"]]]


def test_states_are_kept_for_the_sequence() -> None:
    state = {"input_name": "S", "output_name": "S_OUT", "data_type": "TYPE_FP32", "dims": [1]}
    made = instance(
        lambda inputs: {"Y": inputs["X"], "S_OUT": inputs["X"][:, :1]}, sequence_batching={"state": [state]}
    )
    (result,) = made.execute([request([1, 2])], Execution(PayloadReader()))  # type: ignore[misc]
    assert result is not None
    assert [tensor.name for tensor in result.outputs] == ["Y"]
    assert [(state.name, state.to_numpy().tolist()) for state in result.states] == [("S_OUT", [[1.0]])]


def test_defaults() -> None:
    backend = Functions(lambda inputs: inputs)
    assert backend.availability(CPU_ONLY) == (("KIND_CPU",), ("weights.npz",), "", ())
    assert backend.describe(ModelVersion("m", 1, Path(), config_from_dict(CONFIG))) is None
    with pytest.raises(NotImplementedError):
        ArrayBackend().open(ModelVersion("m", 1, Path(), config_from_dict(CONFIG)))
