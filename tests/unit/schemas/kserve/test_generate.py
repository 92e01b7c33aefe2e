"""Generate requests and responses: what members become, and what they must be."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.request_limits import RequestLimits
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.core.tensors import Tensor, unpack_bytes
from weir.schemas.kserve.generate import build_generate_response, parse_generate_request

TYPES = {"text": "STRING", "count": "INT32", "flag": "BOOL", "half": "FP16", "values": "FP32"}


def config(batch: int = 0, **dims: list[int]) -> ModelConfig:
    inputs = [{"name": name, "data_type": f"TYPE_{TYPES[name]}", "dims": of} for name, of in dims.items()]
    return ModelConfig.model_validate({"name": "m", "max_batch_size": batch, "input": inputs})


MODEL = config(text=[-1], count=[1], flag=[1], half=[2], values=[2, -1])


def parse(document: Any, model: ModelConfig = MODEL, **limits: int) -> InferRequest:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return parse_generate_request("m", "", text, model, RequestLimits(**limits))


def refusal(document: Any, model: ModelConfig = MODEL, **limits: int) -> tuple[ErrorCode, str]:
    with pytest.raises(WeirError) as caught:
        parse(document, model, **limits)
    return caught.value.code, caught.value.message


def test_members_become_inputs_and_parameters() -> None:
    request = parse({"text": "hello", "count": 3, "id": "7", "x": 1.5, "sequence_id": 4, "parameters": {"y": True}})
    text, count = request.inputs
    assert (text.name, text.datatype, text.shape) == ("text", "BYTES", [1])
    assert unpack_bytes(text.data) == [b"hello"]
    assert (count.shape, count.to_numpy().tolist()) == ([1], [3])
    assert request.id == "7"
    assert request.parameters == {"id": "7", "x": 1.5, "sequence_id": 4, "y": True}
    assert request.correlation_id == 0


def test_nested_members_may_be_inputs() -> None:
    assert [tensor.name for tensor in parse({"parameters": {"text": "a"}}).inputs] == ["text"]


def test_a_model_may_have_an_input_of_that_name() -> None:
    model = ModelConfig.model_validate(
        {"name": "m", "input": [{"name": "parameters", "data_type": "TYPE_INT32", "dims": [1]}]}
    )
    assert parse({"parameters": 5}, model).inputs[0].to_numpy().tolist() == [5]


@pytest.mark.parametrize(
    ("batch", "dims", "count", "shape"),
    [
        (0, [1], 1, [1]),
        (0, [-1], 0, [0]),
        (0, [-1], 5, [5]),
        (0, [2, -1], 2, [2, 1]),
        (0, [2, -1], 6, [2, 3]),
        (0, [2, -1], 0, [2, 0]),
        (0, [-1, -1], 3, [1, 3]),
        (0, [-1, 3, -1], 6, [1, 3, 2]),
        (0, [-1, 3], 6, [2, 3]),
        (0, [4], 4, [4]),
        (4, [1], 1, [1, 1]),
        (4, [1], 2, [2, 1]),
        (4, [-1], 3, [1, 3]),
        (0, [4], 3, None),
        (0, [4], 8, None),
        (0, [4], 0, None),
        (0, [2, -1], 3, None),
        (0, [-1, 3, -1], 4, None),
    ],
)
def test_elements_fill_the_innermost_dimension_first(
    batch: int, dims: list[int], count: int, shape: list[int] | None
) -> None:
    model, document = config(batch, values=dims), {"values": [0.5] * count}
    if shape is None:
        text = "The schema can not convert input 'values' to tensor with proper shape"
        assert refusal(document, model) == (ErrorCode.INVALID_ARG, text)
    else:
        assert parse(document, model).inputs[0].shape == shape


@given(st.integers(0, 1), st.lists(st.sampled_from([-1, 1, 2, 3]), min_size=1, max_size=4), st.integers(0, 40))
def test_a_shape_fits_its_model_and_its_elements(batch: int, dims: list[int], count: int) -> None:
    try:
        tensor = parse({"values": [1.0] * count}, config(batch, values=dims)).inputs[0]
    except WeirError as error:
        assert error.code is ErrorCode.INVALID_ARG  # noqa: PT017
        return
    declared = [-1] * batch + dims
    assert math.prod(tensor.shape) == count
    assert all(dim in (-1, given) for dim, given in zip(declared, tensor.shape, strict=True))


INVALID_TYPE = "has invalid type. It should be either 'int', 'bool', or 'string'."
INTERNAL, INVALID = ErrorCode.INTERNAL, ErrorCode.INVALID_ARG


@pytest.mark.parametrize(
    ("document", "code", "text"),
    [
        (b"{", INTERNAL, "failed to parse the request JSON buffer: Missing a name for object member. at 1"),
        (b"", INTERNAL, "failed to parse the request JSON buffer: The document is empty. at 0"),
        ([], INTERNAL, "attempt to get members for non-object"),
        (7, INTERNAL, "attempt to get members for non-object"),
        ({"id": 7}, INTERNAL, "Unable to parse 'id': attempt to access JSON non-string as string"),
        ({"x": None}, INVALID, f"parameter 'x' {INVALID_TYPE}"),
        ({"x": [1]}, INVALID, f"parameter 'x' {INVALID_TYPE}"),
        (
            {"parameters": 5},
            INTERNAL,
            "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object",
        ),
        ({"parameters": {"x": {}}}, INVALID, f"Converting keyword: 'parameters': parameter 'x' {INVALID_TYPE}"),
        (
            {"parameters": {"parameters": {}}},
            INVALID,
            f"Converting keyword: 'parameters': parameter 'parameters' {INVALID_TYPE}",
        ),
        (
            {"text": "a", "parameters": {"text": "b"}},
            INVALID,
            "Converting keyword: 'parameters': [request id: <id_unknown>] input 'text' already exists in request",
        ),
        ({"text": 5}, INTERNAL, "Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
        ({"text": None}, INTERNAL, "Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
        (
            {"count": "3"},
            INTERNAL,
            "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer",
        ),
        ({"flag": 1}, INTERNAL, "Unable to parse 'data': attempt to access JSON non-boolean as boolean"),
        (
            {"half": [1, 2]},
            INVALID,
            "receiving FP16 data via JSON is not supported. Please use the binary data format for input half",
        ),
    ],
)
def test_rejected_requests(document: Any, code: ErrorCode, text: str) -> None:
    assert refusal(document) == (code, text)


def test_limits() -> None:
    assert refusal({"a": 1, "b": 2, "c": 3}, parameters=2)[1] == "request holds more than 2 parameters"
    assert refusal({"id": "abcdef"}, id_length=5)[1] == "request 'id' cannot be longer than 5 characters"
    assert "request JSON size of 9 bytes exceeds" in refusal({"a": "b"} and b'{"a":"b"}', input_size=8)[1]


def tensor(name: str, values: Any, datatype: str) -> Tensor:
    return Tensor.from_numpy(name, values, datatype)


def test_a_response() -> None:
    outputs = [
        tensor("z", np.array([[1.5]], np.float32), "FP32"),
        tensor("a", np.array(["x", "é"], object), "BYTES"),
        tensor("empty", np.zeros([0], np.int32), "INT32"),
        tensor("one", np.array([True]), "BOOL"),
    ]
    response = InferResponse("m", "1", "7", outputs, {"took": 5})
    assert build_generate_response(response).decode() == (
        '{"a":["x","é"],"empty":[],"id":"7","model_name":"m","model_version":"1","one":true,"took":5,"z":1.5}'
    )


def test_values_that_are_not_finite_are_bare_literals() -> None:
    values = np.array([math.nan, math.inf, -math.inf], np.float32)
    outputs = [tensor("many", values, "FP32"), tensor("one", values[:1], "FP32")]
    body = build_generate_response(InferResponse("m", "1", outputs=outputs))
    assert body == b'{"many":[NaN,Infinity,-Infinity],"model_name":"m","model_version":"1","one":NaN}'


def test_an_output_that_is_not_for_json() -> None:
    response = InferResponse("m", "1", outputs=[tensor("h", np.zeros([2], np.float16), "FP16")])
    with pytest.raises(WeirError, match="sending FP16 data via JSON is not supported"):
        build_generate_response(response)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*TYPES, "id", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*TYPES, "id", "x", "parameters"]), JSON, max_size=5))
def test_any_generate_document_is_parsed_or_rejected(document: dict[str, Any]) -> None:
    try:
        request = parse(document)
    except WeirError as error:
        assert error.code in (ErrorCode.INTERNAL, ErrorCode.INVALID_ARG)  # noqa: PT017
        return
    assert all(type(value) in (str, int, float, bool) for value in (request.parameters or {}).values())


def test_a_repeated_input_is_rejected() -> None:
    text = "[request id: <id_unknown>] input 'text' already exists in request"
    assert refusal(b'{"text": "a", "count": 1, "text": "b"}') == (ErrorCode.INVALID_ARG, text)
    named = "[request id: r] input 'count' already exists in request"
    assert refusal(b'{"id": "r", "count": 1, "text": "count", "count": 2}') == (ErrorCode.INVALID_ARG, named)
    assert [tensor.name for tensor in parse(b'{"text": "text", "count": 1, "x": "count"}').inputs] == ["text", "count"]
    assert refusal(b'{"text":"a","count":1,"count":2,"text":"b"}')[1].startswith(
        "[request id: <id_unknown>] input 'count'"
    )
