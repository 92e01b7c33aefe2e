"""Batch inputs of ragged batches, and outputs without rows that are split into several responses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError
from weir.schemas.core.requests import InferRequest, RequestedOutput
from weir.schemas.core.tensors import Tensor
from weir.worker.execution.batch_tensors import BatchInputs, batch_output_splits, split_outputs

SHAPES = [[1, 4, 1], [2, 1, 2], [1, 2, 2]]
EXPECTED: dict[str, Any] = {
    "BATCH_ELEMENT_COUNT": [4, 4, 4],
    "BATCH_ACCUMULATED_ELEMENT_COUNT": [4, 8, 12],
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": [0, 4, 8, 12],
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": [0, 0, 0, 0],
    "BATCH_ITEM_SHAPE": [[4, 1], [1, 2], [1, 2], [2, 2]],
    "BATCH_ITEM_SHAPE_FLATTEN": [4, 1, 1, 2, 1, 2, 2, 2],
}


def config(**fields: Any) -> ModelConfig:
    outputs = [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1, 2]}]
    return ModelConfig.model_validate({"name": "m", "max_batch_size": 8, "output": outputs, **fields})


def of_shape(*shape: int, outputs: tuple[str, ...] = ()) -> InferRequest:
    tensor = Tensor("IN", "FP32", shape, bytes(4 * int(np.prod(shape))))
    return InferRequest("m", inputs=[tensor], outputs=[RequestedOutput(name) for name in outputs])


@pytest.mark.parametrize(("data_type", "numpy_type"), [("TYPE_INT32", np.int32), ("TYPE_FP32", np.float32)])
@pytest.mark.parametrize("kind", EXPECTED)
def test_batch_inputs_are_computed_from_the_shapes_of_their_source(kind: str, data_type: str, numpy_type: type) -> None:
    row = {"kind": kind, "target_name": ["A", "B"], "source_input": ["IN"], "data_type": data_type}
    made = BatchInputs(config(batch_input=[row]))
    assert made.names == ["A", "B"]
    arrays = made.of([of_shape(*shape) for shape in SHAPES])
    for name in ("A", "B"):
        assert arrays[name].dtype == numpy_type
        np.testing.assert_array_equal(arrays[name], np.array(EXPECTED[kind]))


def test_a_model_without_batch_inputs_has_none_and_a_missing_source_is_an_error() -> None:
    assert not BatchInputs(config())
    made = BatchInputs(config(batch_input=[{"target_name": ["A"], "source_input": ["X"], "data_type": "TYPE_INT32"}]))
    with pytest.raises(WeirError, match="input 'X' is missing from a request of the batch"):
        made.of([of_shape(1, 1)])


SCATTER = {"batch_output": [{"target_name": ["OUT"], "source_input": ["IN"]}]}


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), min_size=1, max_size=5))
def test_shares_of_an_output_without_rows_are_as_long_as_their_inputs(shapes: list[tuple[int, int]]) -> None:
    requests = [of_shape(rows, length, 2) for rows, length in shapes]
    total = sum(2 * rows * length for rows, length in shapes)
    array = np.arange(total, dtype=np.float32)
    parts = split_outputs(requests, [("OUT", "FP32", array)], True, batch_output_splits(config(**SCATTER)))
    assert [list(tensors[0].shape) for tensors in parts] == [[rows, length, 2] for rows, length in shapes]
    np.testing.assert_array_equal(np.concatenate([tensors[0].to_numpy().ravel() for tensors in parts]), array)


def test_an_output_of_strings_without_rows_is_split_if_requested() -> None:
    outputs = [{"name": "OUT", "data_type": "TYPE_STRING", "dims": [-1]}]
    splits = batch_output_splits(config(output=outputs, **SCATTER))
    requests = [of_shape(1, 2), of_shape(1, 1, outputs=("OTHER",)), of_shape(1, 3)]
    array = np.array([b"a", b"b", b"c", b"d", b"e", b"f"], np.object_)
    first, second, third = split_outputs(requests, [("OUT", "BYTES", array)], True, splits)
    assert first[0].to_numpy().tolist() == [[b"a", b"b"]]
    assert second == []
    assert third[0].to_numpy().tolist() == [[b"d", b"e", b"f"]]


def test_shares_have_the_shape_that_the_model_sees() -> None:
    outputs = [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [1, -1], "reshape": {"shape": [-1]}}]
    splits = batch_output_splits(config(output=outputs, **SCATTER))
    array = np.arange(5, dtype=np.float32)
    parts = split_outputs([of_shape(1, 2), of_shape(1, 3)], [("OUT", "FP32", array)], True, splits)
    assert [list(tensors[0].shape) for tensors in parts] == [[1, 2], [1, 3]]


@pytest.mark.parametrize("source", [(1, 3), (1, 3, 2)])
def test_an_output_that_its_shares_do_not_fill_is_an_error(source: tuple[int, ...]) -> None:
    splits = batch_output_splits(
        config(output=[{"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1, -1]}], **SCATTER)
    )
    with pytest.raises(WeirError, match="output 'OUT' has 5 elements, but the shapes of input 'IN' require"):
        split_outputs([of_shape(*source)], [("OUT", "FP32", np.zeros(5, np.float32))], True, splits)
