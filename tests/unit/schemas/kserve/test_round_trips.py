"""What holds of the KServe v2 codec whatever is sent: tensors survive both encodings, and no body gets past WeirError."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import numpy as np
import orjson
import pytest
import rapidjson
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError
from weir.schemas.core.requests import InferResponse
from weir.schemas.core.tensors import DATATYPES, Tensor, pack_bytes
from weir.schemas.kserve.normalizer import RequestNormalizer
from weir.schemas.kserve.request import parse_infer_request, parse_raw_request
from weir.schemas.kserve.response import build_infer_response

WHATEVER_THE_MACHINE = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])

SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=3)
IN_JSON = [name for name in DATATYPES if name not in ("FP16", "BF16")]


@st.composite
def tensors(draw: st.DrawFn, datatypes: list[str]) -> Tensor:
    datatype, shape = draw(st.sampled_from(datatypes)), draw(SHAPES)
    count = math.prod(shape)
    if datatype == "BYTES":
        elements = draw(st.lists(st.text(max_size=5), min_size=count, max_size=count))
        return Tensor("T", datatype, shape, pack_bytes(elements))
    return Tensor.from_numpy("T", draw(arrays.arrays(DATATYPES[datatype].numpy, tuple(shape))), datatype)


def echo(body: bytes, header_length: int | None) -> Tensor:
    """The tensor that comes back in an answer which repeats the request's, in the encoding the request asks for."""
    request = parse_infer_request("m", "", body, header_length)
    declared = {"name": "T", "data_type": DATATYPES[request.inputs[0].datatype].config_name}
    config = {"input": [declared | {"dims": [-1] * len(request.inputs[0].shape)}]}
    RequestNormalizer(ModelConfig.model_validate(config)).normalize(request)
    chunks, length = build_infer_response(request, InferResponse("m", "1", outputs=request.inputs))
    answer = b"".join(chunks)
    [row] = rapidjson.loads(answer[:length])["outputs"]
    if "data" in row:
        text = rapidjson.dumps({"inputs": [row]}).encode()
        return parse_infer_request("m", "", text, None).inputs[0]
    return Tensor(row["name"], row["datatype"], row["shape"], answer[length:] if length else b"")


def same(left: Tensor, right: Tensor) -> bool:
    if (left.datatype, list(left.shape)) != (right.datatype, list(right.shape)):
        return False
    if left.datatype in ("FP32", "FP64"):
        return np.array_equal(left.to_numpy(), right.to_numpy(), equal_nan=True)
    return bytes(left.data) == bytes(right.data)


@WHATEVER_THE_MACHINE
@given(tensors(list(DATATYPES)))
def test_tensors_survive_the_binary_encoding(tensor: Tensor) -> None:
    members = {"name": "T", "datatype": tensor.datatype, "shape": tensor.shape}
    members["parameters"] = {"binary_data_size": tensor.size_bytes}
    header = orjson.dumps({"inputs": [members], "parameters": {"binary_data_output": True}})
    assert bytes(echo(header + bytes(tensor.data), len(header)).data) == bytes(tensor.data)


@WHATEVER_THE_MACHINE
@given(tensors(IN_JSON), st.booleans())
def test_tensors_survive_the_json_encoding(tensor: Tensor, nested: bool) -> None:
    array = tensor.to_numpy()
    values: Any = (array if nested else array.ravel()).tolist()
    if tensor.datatype == "BYTES":
        values = [element.decode() for element in array.ravel()]
    members = {"name": "T", "datatype": tensor.datatype, "shape": tensor.shape, "data": values}
    assert same(echo(rapidjson.dumps({"inputs": [members]}).encode(), None), tensor)


FIELDS = ["id", "inputs", "outputs", "parameters", "name", "datatype", "shape", "data", "binary_data_size"]
FIELDS += ["shared_memory_region", "sequence_id", "priority", "binary_data", "classification"]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(["A", *DATATYPES])
    | st.text(max_size=4)
)
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
    max_leaves=12,
)
INPUTS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.just("A") | SCALARS,
        "datatype": st.sampled_from(list(DATATYPES)) | SCALARS,
        "shape": st.lists(st.integers(0, 3), max_size=3) | DOCUMENTS,
        "data": DOCUMENTS,
        "parameters": st.fixed_dictionaries({"binary_data_size": st.integers(-1, 9)}) | DOCUMENTS,
    },
)
REQUESTS = st.fixed_dictionaries(
    {"inputs": st.lists(INPUTS, max_size=3)},
    optional={"id": SCALARS, "parameters": DOCUMENTS, "outputs": DOCUMENTS},
)
MODELS = [
    ModelConfig.model_validate(
        {"name": "m", "max_batch_size": size, "input": [{"name": "A", "data_type": data_type, "dims": [-1]}]}
    )
    for size in (0, 4)
    for data_type in ("TYPE_FP32", "TYPE_STRING", "TYPE_BOOL")
]


def serve(body: bytes, header_length: int | None) -> None:
    """Take a body as far as an answer that repeats its inputs."""
    request = parse_infer_request("m", "", body, header_length)
    for model in MODELS:
        try:
            RequestNormalizer(model).normalize(request)
        except WeirError:
            continue
        for tensor in request.inputs:
            assert tensor.to_numpy().shape == tuple(tensor.shape)
        build_infer_response(request, InferResponse("m", "1", outputs=request.inputs))


@WHATEVER_THE_MACHINE
@given(st.binary(max_size=60), st.none() | st.integers(-2, 70))
def test_any_bytes_are_parsed_or_rejected(body: bytes, header_length: int | None) -> None:
    with suppress(WeirError):
        serve(body, header_length)
    for model in MODELS:
        with suppress(WeirError):
            RequestNormalizer(model).normalize(parse_raw_request("m", "", body, model))


@WHATEVER_THE_MACHINE
@given(REQUESTS | DOCUMENTS, st.binary(max_size=10), st.booleans())
def test_any_document_is_parsed_or_rejected(document: Any, content: bytes, is_split: bool) -> None:
    header = rapidjson.dumps(document).encode()
    with suppress(WeirError):
        serve(header + content, len(header) if is_split else None)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "Inf", "-Inf"])
def test_literals_beyond_standard_json(literal: str) -> None:
    body = f'{{"inputs":[{{"name":"T","datatype":"FP32","shape":[2],"data":[1,{literal}]}}]}}'
    value = echo(body.encode(), None).to_numpy()[1]
    assert np.array_equal(value, np.float32(literal), equal_nan=True)
