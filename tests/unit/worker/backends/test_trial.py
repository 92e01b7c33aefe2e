"""Models that are run to find out what their files do not say, with functions in the place of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from tests.support.models import onnx_files
from weir.repository.completion import DescribedModel
from weir.schemas.core.errors import WeirError, invalid
from weir.schemas.core.tensors import Tensor
from weir.schemas.kserve.sample_inputs import SampleInput
from weir.worker.backends.onnxruntime.trial import OnnxTrial
from weir.worker.backends.trial import BATCH, OTHER, Output, try_out

INPUTS = [SampleInput("x", "FP32", (-1, -1, 3), batches=True)]


def run_of(function: Callable[[int, int], Sequence[tuple[int, ...]]]) -> Callable[[Sequence[Tensor]], list[Output]]:
    """A model that makes the shapes of its outputs from the batch and the variable size of its input."""

    def run(tensors: Sequence[Tensor]) -> list[Output]:
        batch, size, fixed = tensors[0].shape
        assert fixed == 3
        return [Output(f"y{place}", "TYPE_FP32", shape) for place, shape in enumerate(function(batch, size))]

    return run


def only(condition: bool, *shapes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    if not condition:
        raise invalid("the model does not take this size")
    return shapes


@pytest.mark.parametrize(
    ("function", "outputs", "size", "largest"),
    [
        (
            lambda batch, size: [(batch, size), (size, 2), (4,)],
            [([-1, -1], BATCH), ([-1, 2], OTHER), ([4], "")],
            8,
            None,
        ),
        (lambda batch, size: only(size % 32 == 0, (batch, size)), [([-1, -1], BATCH)], 32, None),
        (lambda batch, size: only(size > 200, (batch, size // 2)), [([-1, -1], BATCH)], 224, None),
        (lambda batch, size: only(batch == 1, (batch, size)), [([1, -1], BATCH)], 8, 1),
        (lambda batch, size: only(batch == 1 and size % 32 == 0, (size,)), [([-1], OTHER)], 32, 1),
    ],
)
def test_dimensions_are_told_apart(
    function: Callable[[int, int], Sequence[tuple[int, ...]]],
    outputs: list[tuple[list[int], str]],
    size: int,
    largest: int | None,
) -> None:
    findings = try_out(INPUTS, run_of(function))
    assert [(row.dims, row.first_symbol) for row in findings.outputs] == outputs
    assert (findings.size, findings.largest_batch) == (size, largest)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda batch, size: only(False), "the model does not take this size"),
        (lambda batch, size: [(batch,)] * batch, "other outputs for other sizes"),
        (lambda batch, size: [(1,) * size], "other outputs for other sizes"),
    ],
)
def test_models_that_can_not_be_compared_are_refused(
    function: Callable[[int, int], Sequence[tuple[int, ...]]], text: str
) -> None:
    with pytest.raises(WeirError, match=text):
        try_out(INPUTS, run_of(function))


def described(
    folder: Path, nodes: list[onnx.NodeProto], shapes: list[list[str | int]], **constants: list[int]
) -> DescribedModel:
    """The description of an ONNX model from `x` to `y`, whose shapes have these symbols."""
    tensors = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in zip("xy", shapes, strict=True)
    ]
    values = [helper.make_tensor(name, TensorProto.INT64, [len(row)], row) for name, row in constants.items()]
    graph = helper.make_graph(nodes, "graph", tensors[:1], tensors[1:], values)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    version = onnx_files.version(folder, model=model)
    found = OnnxTrial().describe(version)
    assert found is not None
    return found


RESHAPE = [helper.make_node("Neg", ["negative"], ["shape"]), helper.make_node("Reshape", ["x", "shape"], ["y"])]
"""To a shape that the reader of the file does not know."""


def test_onnx_models_with_other_symbols_for_each_tensor_have_a_batch(tmp_path: Path) -> None:
    found = described(tmp_path, [helper.make_node("Neg", ["x"], ["y"])], [["unk_1", 4], ["unk_2", 4]])
    assert [row.first_symbol for row in (*found.inputs, *found.outputs)] == [BATCH, BATCH]
    assert (found.largest_batch, found.tried_size) == (None, 8)


def test_onnx_models_that_fix_the_batch_inside_have_none(tmp_path: Path) -> None:
    found = described(tmp_path, RESHAPE, [["batch", 4], ["batch", 4]], negative=[-1, -4])
    assert found.largest_batch == 1


def test_onnx_models_whose_output_follows_another_dimension_have_no_batch(tmp_path: Path) -> None:
    node = helper.make_node("Transpose", ["x"], ["y"], perm=[1, 0])
    found = described(tmp_path, [node], [["a", "b"], ["b", "a"]])
    assert [row.first_symbol for row in (*found.inputs, *found.outputs)] == [BATCH, OTHER]


def test_onnx_models_that_can_not_be_run_are_described_all_the_same(tmp_path: Path) -> None:
    found = described(tmp_path, RESHAPE, [["batch", "n"], ["m", 7]], negative=[-7, -7])
    assert [row.first_symbol for row in (*found.inputs, *found.outputs)] == ["batch", "m"]
    assert found.tried_size is None
