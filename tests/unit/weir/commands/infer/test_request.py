"""The request of `weir infer`: given inputs in the model's datatypes and shapes, made-up ones, and requests from files."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weir.commands.infer.request import generate_document, read_request, sample_request
from weir.errors import StartError
from weir.options import UsageError
from weir.schemas.config.model_config import ModelConfig


def model(*inputs: tuple[str, str, list[int]], batch: int = 0, optional: tuple[str, ...] = ()) -> ModelConfig:
    rows = [
        {"name": name, "data_type": f"TYPE_{datatype}", "dims": dims, "optional": name in optional}
        for name, datatype, dims in inputs
    ]
    return ModelConfig.model_validate({"name": "m", "max_batch_size": batch, "input": rows})


def sent(config: ModelConfig, *given: str) -> dict[str, Any]:
    """The shape and the values of each input."""
    tensors = sample_request(config, given).inputs
    return {tensor.name: (list(tensor.shape), tensor.to_numpy().ravel().tolist()) for tensor in tensors}


@pytest.mark.parametrize(
    ("datatype", "dims", "batch", "text", "shape", "values"),
    [
        ("FP32", [1], 0, "1.5", [1], [1.5]),
        ("INT64", [-1], 0, "[1,2,3]", [3], [1, 2, 3]),
        ("INT64", [-1], 0, "1,2,3", [3], [1, 2, 3]),
        ("INT32", [2], 4, "[1,2]", [1, 2], [1, 2]),
        ("INT32", [2], 4, "[1,2,3,4]", [2, 2], [1, 2, 3, 4]),
        ("INT32", [2], 4, "[[1,2],[3,4]]", [2, 2], [1, 2, 3, 4]),
        ("INT32", [-1, -1], 0, "[[1,2],[3,4]]", [2, 2], [1, 2, 3, 4]),
        ("INT32", [-1, -1], 4, "[[1,2],[3,4]]", [1, 2, 2], [1, 2, 3, 4]),
        ("BOOL", [2], 0, "[true,false]", [2], [True, False]),
        ("STRING", [1], 4, "some text, = as it is", [1, 1], [b"some text, = as it is"]),
        ("STRING", [-1], 0, '["a","b"]', [2], [b"a", b"b"]),
        ("STRING", [1], 0, "[not JSON", [1], [b"[not JSON"]),
    ],
)
def test_a_value_has_the_datatype_and_the_shape_of_the_input(
    datatype: str, dims: list[int], batch: int, text: str, shape: list[int], values: list[Any]
) -> None:
    assert sent(model(("x", datatype, dims), batch=batch), f"x={text}") == {"x": (shape, values)}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["x"], "NAME=VALUE with one of the model's inputs (x, y), not 'x'"),
        (["z=1"], "inputs (x, y), not 'z=1'"),
        (["x=1,2", "x=3,4"], "--input x is given twice"),
        (["x=one"], "'one' is not JSON"),
        (["x=[1,2,3]"], "It is INT32 with the shape [2]"),
        (["x=[1.5,2]"], "It is INT32 with the shape [2]"),
        (["x=[[1,2],[3]]"], "It is INT32 with the shape [2]"),
    ],
)
def test_a_value_that_does_not_fit_is_wrong_usage(given: list[str], reason: str) -> None:
    with pytest.raises(UsageError) as raised:
        sent(model(("x", "INT32", [2]), ("y", "INT32", [2])), *given)
    assert reason in str(raised.value)


def test_inputs_that_are_not_given_are_made_up_with_as_many_rows() -> None:
    found = sent(model(("x", "INT32", [2]), ("y", "FP32", [3]), batch=8), "x=[[1,2],[3,4]]")
    assert found["x"] == ([2, 2], [1, 2, 3, 4])
    assert found["y"][0] == [2, 3]


def test_optional_inputs_are_sent_only_if_they_are_given() -> None:
    config = model(("x", "INT32", [1]), ("y", "INT32", [1]), optional=("y",))
    assert list(sent(config)) == ["x"]
    assert list(sent(config, "y=1")) == ["x", "y"]


def test_inputs_too_large_to_be_made_up_are_to_be_given() -> None:
    with pytest.raises(StartError, match="give the input with --input or --data"):
        sent(model(("x", "FP64", [1 << 30])))


ROW = {"name": "x", "datatype": "INT32", "shape": [2], "data": [1, 2]}


def test_a_request_is_read_from_a_file_or_from_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"inputs": [ROW]}).encode()
    (tmp_path / "request.json").write_bytes(text)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(text)))
    for file in (str(tmp_path / "request.json"), "-"):
        request, read = read_request(model(("x", "INT32", [2])), file)
        assert read == text
        assert request.inputs[0].to_numpy().tolist() == [1, 2]


@pytest.mark.parametrize("text", ["", "[]", "{}", "no JSON", '{"inputs": [{"name": "x"}]}'])
def test_a_file_that_is_no_request_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text(text)
    with pytest.raises(StartError, match=r"request\.json is not a KServe request in JSON: "):
        read_request(model(("x", "INT32", [2])), str(tmp_path / "request.json"))


def test_a_request_for_a_stream_has_its_inputs_and_parameters_as_members() -> None:
    request = sample_request(model(("x", "INT32", [2]), ("t", "STRING", [1])), ["x=1,2", "t=hello"])
    request.parameters = {"temperature": 0.5}
    assert generate_document(request) == {"temperature": 0.5, "x": [1, 2], "t": ["hello"]}


def test_a_stream_can_not_carry_half_precision() -> None:
    request = sample_request(model(("x", "FP16", [2])), [])
    with pytest.raises(StartError, match="input 'x' is FP16"):
        generate_document(request)
