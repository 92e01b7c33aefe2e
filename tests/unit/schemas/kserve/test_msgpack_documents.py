"""KServe documents in msgpack: the same requests, refusals and answers as in JSON, and no body gets past WeirError."""

from __future__ import annotations

import math
import struct
from contextlib import suppress
from typing import Any

import msgpack
import numpy as np
import pytest
import rapidjson
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.request_limits import RequestLimits
from weir.schemas.core.requests import InferRequest, InferResponse, RequestedOutput
from weir.schemas.core.tensors import DATATYPES, Tensor, pack_bytes
from weir.schemas.kserve.msgpack_documents import build_msgpack_response, msgpack_error_body, parse_msgpack_request
from weir.schemas.kserve.normalizer import RequestNormalizer
from weir.schemas.kserve.request import parse_infer_request
from weir.schemas.kserve.response import build_infer_response

WHATEVER_THE_MACHINE = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])


def one_input(**members: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "A", "datatype": "FP32", "shape": [2]} | members]}


def parse(document: Any, limits: RequestLimits | None = None) -> InferRequest:
    body = document if isinstance(document, bytes) else msgpack.packb(document)
    return parse_msgpack_request("m", "", body, limits or RequestLimits())


def refusal(document: Any, limits: RequestLimits | None = None) -> tuple[ErrorCode, str]:
    with pytest.raises(WeirError) as caught:
        parse(document, limits)
    return caught.value.code, caught.value.message


def told(request: InferRequest, *outputs: Tensor, **more: Any) -> dict[str, Any]:
    response = InferResponse("m", "3", outputs=list(outputs), **more)
    return msgpack.unpackb(b"".join(build_msgpack_response(request, response)))


def test_a_msgpack_request_has_every_json_field() -> None:
    request = parse(
        {
            "id": "mine",
            "parameters": {"sequence_id": 7, "sequence_start": True, "priority": 2, "timeout": 9, "own": 1.5},
            "inputs": [
                {"name": "A", "datatype": "FP32", "shape": [1, 2], "data": bytes(8)},
                {"name": "B", "datatype": "INT8", "shape": [2], "data": [[1], [-2]]},
                {"name": "C", "datatype": "BYTES", "shape": [2], "data": ["ä", b"\xff"]},
                {"name": "D", "datatype": "BF16", "shape": [1], "data": b"\x80\x3f"},
            ],
            "outputs": [{"name": "OUT", "parameters": {"classification": 3}}],
        }
    )
    assert (request.id, request.correlation_id, request.sequence_flags) == ("mine", 7, 1)
    assert (request.priority, request.timeout_us, request.parameters) == (2, 9, {"own": 1.5})
    content = [bytes(8), b"\1\xfe", b"\2\0\0\0\xc3\xa4\1\0\0\0\xff", b"\x80\x3f"]
    assert [bytes(tensor.data) for tensor in request.inputs] == content
    [output] = request.outputs
    assert (output.name, output.class_count) == ("OUT", 3)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    datatype, shape = draw(st.sampled_from(list(DATATYPES))), draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    if datatype == "BYTES":
        count = math.prod(shape)
        return Tensor("T", datatype, shape, pack_bytes(draw(st.lists(st.binary(), min_size=count, max_size=count))))
    return Tensor.from_numpy("T", draw(arrays.arrays(DATATYPES[datatype].numpy, tuple(shape))), datatype)


@WHATEVER_THE_MACHINE
@given(tensors(), st.sampled_from([None, "", "x"]))
def test_tensors_survive_both_ways(tensor: Tensor, id: str | None) -> None:
    row = {"name": "T", "datatype": tensor.datatype, "shape": list(tensor.shape), "data": bytes(tensor.data)}
    request = parse({"inputs": [row]} | ({} if id is None else {"id": id}))
    config = {"input": [{"name": "T", "data_type": DATATYPES[tensor.datatype].config_name, "dims": list(tensor.shape)}]}
    if all(tensor.shape):
        RequestNormalizer(ModelConfig.model_validate(config)).normalize(request)
    expected = {"model_name": "m", "model_version": "3", "outputs": [row]}
    assert told(request, *request.inputs) == expected | ({"id": id} if id else {})


def test_responses_hold_the_requested_outputs_as_bytes() -> None:
    outputs = [Tensor("A", "FP32", (3,), np.array([1, 3, 2], "<f4").tobytes()), Tensor("B", "INT8", [1], b"\1")]
    request = InferRequest("m", id="r")
    assert [row["name"] for row in told(request, *outputs, parameters={"p": True})["outputs"]] == ["A", "B"]
    assert told(request, *outputs, parameters={"p": True})["parameters"] == {"p": True}
    request.outputs = [RequestedOutput("A", class_count=2)]
    [row] = told(request, *outputs)["outputs"]
    classes = pack_bytes(["3.000000:1", "2.000000:2"])
    assert row == {"name": "A", "datatype": "BYTES", "shape": [2], "data": classes}


def test_an_output_in_the_callers_memory_has_no_data() -> None:
    output = RequestedOutput("A")
    output.region = ("file", 1, 0, 4)  # type: ignore[assignment]
    request = InferRequest("m", outputs=[output, RequestedOutput("B")])
    rows = told(request, Tensor("B", "INT8", [1], b"\1"), Tensor("A", "INT8", [1], b"\2"))["outputs"]
    assert [row.get("data") for row in rows] == [b"\1", None]


@pytest.mark.parametrize("size", [0, 255, 256, 65_535, 65_536, 1 << 20])
def test_content_of_any_size_is_not_copied(size: int) -> None:
    data = bytes(size)
    chunks = build_msgpack_response(
        InferRequest("m"), InferResponse("m", "1", outputs=[Tensor("A", "INT8", [size], data)])
    )
    assert chunks[1] is data
    assert msgpack.unpackb(b"".join(chunks))["outputs"][0]["data"] == data


def test_an_error_is_a_map() -> None:
    assert msgpack.unpackb(msgpack_error_body("why \ud800")) == {"error": "why ?"}


DEEP = b"\x91" * 5000 + b"\xc0"
MANY = b"\xdd" + struct.pack(">I", 1 << 31)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"{}",
        DEEP,
        MANY,
        MANY * 500,
        b"\x81\xa2id\xa1\xff",
        b"\x80\x80",
        b"\x81\x01\x02",
        b"\xc6\xff\xff\xff\xff",
        b"\xc7\x03\xff123",
    ],
)
def test_a_body_that_is_not_msgpack_is_an_invalid_argument(body: bytes) -> None:
    code, message = refusal(body)
    assert code is ErrorCode.INVALID_ARG
    assert message.startswith("failed to parse the request msgpack: ")


def test_limits_are_enforced() -> None:
    few = RequestLimits(json_values=300, input_size=64, tensors=2)
    content = one_input(shape=[250], data=bytes(1000))
    assert parse(content, few).inputs[0].size_bytes == 1000
    text = "request msgpack holds more than 300 bytes besides the content of its tensors"
    for hidden in (
        {"outputs": [{"data": bytes(1000)}]},
        {"parameters": {"x": bytes(1000)}},
        {"more": list(range(300))},
    ):
        assert refusal(content | hidden, few) == (ErrorCode.INVALID_ARG, text)
    for document in ([bytes(1000)], {"inputs": bytes(1000)}, {"inputs": [bytes(1000)]}):
        assert refusal(document, few) == (ErrorCode.INVALID_ARG, text)
    assert refusal(one_input(shape=[17], data=[0.0] * 17), few)[1].startswith(
        "JSON input 'A' has a byte_size (68 bytes)"
    )
    assert refusal({"inputs": [{}, {}, {}]}, few)[1] == "request holds more than 2 inputs"


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.sampled_from(["A", *DATATYPES])
    | st.text(max_size=4)
)
FIELDS = ["id", "inputs", "outputs", "parameters", "name", "datatype", "shape", "data", "binary_data_size"]
FIELDS += ["shared_memory_region", "sequence_id", "priority", "binary_data", "classification", "triton_x"]
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
        "data": st.lists(SCALARS, max_size=4) | DOCUMENTS,
        "parameters": st.fixed_dictionaries({"binary_data_size": st.integers(-1, 9)}) | DOCUMENTS,
    },
)
REQUESTS = st.fixed_dictionaries(
    {"inputs": st.lists(INPUTS, max_size=3)},
    optional={"id": SCALARS, "parameters": DOCUMENTS, "outputs": DOCUMENTS},
)


def outcome(parsed: Any, body: bytes) -> Any:
    """All that a request says, or what it is refused with."""
    try:
        request: InferRequest = parsed("m", "", body)
    except WeirError as error:
        return error.code, error.message
    said = [request.id, repr(request.parameters), request.correlation_id, request.sequence_flags, request.priority]
    said += [(tensor.name, tensor.datatype, tensor.shape, bytes(tensor.data)) for tensor in request.inputs]
    return said + [(output.name, output.binary, output.class_count) for output in request.outputs]


def in_json(model: str, version: str, body: bytes) -> InferRequest:
    return parse_infer_request(model, version, body, None)


@settings(WHATEVER_THE_MACHINE, max_examples=400)
@given(REQUESTS | DOCUMENTS)
def test_a_document_means_the_same_as_in_json(document: Any) -> None:
    text = rapidjson.dumps(document).encode()
    assert outcome(parse_msgpack_request, msgpack.packb(document)) == outcome(in_json, text)


GOOD = msgpack.packb(
    {
        "id": "a",
        "parameters": {"sequence_id": 1, "x": 2},
        "inputs": [{"name": "A", "datatype": "FP32", "shape": [1, 2], "data": bytes(8)}, {"name": "B", "data": ["x"]}],
        "outputs": [{"name": "OUT", "parameters": {"binary_data": True}}],
    }
)
SMALL = RequestLimits(json_values=64)
MODEL = ModelConfig.model_validate({"name": "m", "input": [{"name": "A", "data_type": "TYPE_FP32", "dims": [-1, -1]}]})


def serve(body: bytes) -> None:
    for limits in (RequestLimits(), SMALL):
        with suppress(WeirError):
            request = parse_msgpack_request("m", "", body, limits)
            told(request, *request.inputs)
            build_infer_response(request, InferResponse("m", "1"))
            RequestNormalizer(MODEL).normalize(request)


@settings(WHATEVER_THE_MACHINE, max_examples=500)
@given(st.binary(max_size=80))
def test_any_bytes_are_parsed_or_rejected(body: bytes) -> None:
    serve(body)


@settings(WHATEVER_THE_MACHINE, max_examples=1000)
@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 3)
)
def test_a_damaged_request_is_parsed_or_rejected(changes: list[tuple[int, int]], cut: int) -> None:
    body = bytearray(GOOD)
    for position, value in changes:
        body[position] = value
    serve(bytes(body[: len(body) - cut]))
