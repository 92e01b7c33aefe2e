"""The names of the files that hold the weights of an ONNX model."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from weir.schemas.core.errors import WeirError
from weir.worker.backends.onnxruntime.external_data import external_files


def model(count: int) -> onnx.ModelProto:
    """A graph that adds `count` constants of 4 KiB each."""
    names = [f"w{place}" for place in range(count)]
    weights = [numpy_helper.from_array(np.full(1024, place, np.float32), name) for place, name in enumerate(names)]
    sums = ["x", *(f"s{place}" for place in range(count - 1)), "y"]
    nodes = [helper.make_node("Add", [sums[place], name], [sums[place + 1]]) for place, name in enumerate(names)]
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1024]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "graph", tensors[:1], tensors[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_a_model_that_holds_its_weights_needs_no_other_file(tmp_path: Path) -> None:
    onnx.save(model(2), tmp_path / "net.onnx")
    assert external_files(tmp_path / "net.onnx") == []


@pytest.mark.parametrize(("is_one", "expected"), [(True, ["net.data"]), (False, ["w0", "w1", "w2"])])
def test_the_files_of_weights_are_found(tmp_path: Path, is_one: bool, expected: list[str]) -> None:
    onnx.save_model(
        model(3),
        tmp_path / "net.onnx",
        save_as_external_data=True,
        all_tensors_to_one_file=is_one,
        location="net.data" if is_one else None,
        size_threshold=0,
    )
    assert external_files(tmp_path / "net.onnx") == expected
    assert all((tmp_path / name).is_file() for name in expected)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_other_files_are_refused_or_name_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "net.onnx").write_bytes(content)
    with suppress(WeirError):
        external_files(tmp_path / "net.onnx")
