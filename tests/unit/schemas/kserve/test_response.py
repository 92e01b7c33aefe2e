"""What a KServe v2 answer looks like; texts as a running Triton 2.51 writes them."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import orjson
import pytest
import rapidjson

from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.requests import InferRequest, InferResponse, RequestedOutput
from weir.schemas.core.tensors import DATATYPES, PayloadRef, Tensor, pack_bytes
from weir.schemas.kserve.json_tensors import json_data
from weir.schemas.kserve.response import build_infer_response, error_body

PAIR = struct.pack("<2f", 1, 2.5)


def tensor(name: str = "X", datatype: str = "FP32", shape: list[int] | None = None, data: bytes = PAIR) -> Tensor:
    return Tensor(name, datatype, [2] if shape is None else shape, data)


def request(*outputs: RequestedOutput, binary: bool = False, id: str = "") -> InferRequest:
    made = InferRequest("m", id=id, outputs=list(outputs))
    made.binary_default = binary
    return made


def body(asked: InferRequest, *outputs: Tensor, parameters: dict[str, Any] | None = None) -> bytes:
    chunks, header_length = build_infer_response(asked, InferResponse("m", "3", "", list(outputs), parameters))
    assert header_length is None
    return b"".join(chunks)


def test_a_plain_response() -> None:
    assert body(request(), tensor()) == (
        b'{"model_name":"m","model_version":"3","outputs":'
        b'[{"name":"X","datatype":"FP32","shape":[2],"data":[1.0,2.5]}]}'
    )


def test_the_id_and_parameters_when_there_are_any() -> None:
    assert body(request(id="r"), parameters={"p": 1}) == (
        b'{"id":"r","model_name":"m","model_version":"3","parameters":{"p":1},"outputs":[]}'
    )


def test_binary_outputs_follow_the_json_uncopied() -> None:
    first, second = memoryview(PAIR), memoryview(b"\1\2")
    outputs = [Tensor("X", "FP32", [2], first), Tensor("E", "INT8", [0], b""), Tensor("Y", "INT8", (2,), second)]
    chunks, header_length = build_infer_response(request(binary=True), InferResponse("m", "3", outputs=outputs))

    assert chunks[1:] == [first, second]
    assert chunks[1] is first
    assert header_length == len(chunks[0])
    assert [row["parameters"] for row in orjson.loads(chunks[0])["outputs"]] == [
        {"binary_data_size": 8},
        {"binary_data_size": 0},
        {"binary_data_size": 2},
    ]


def test_an_empty_binary_output_alone_is_plain_json() -> None:
    assert body(request(binary=True), tensor(shape=[0], data=b"")).endswith(
        b'"shape":[0],"parameters":{"binary_data_size":0}}]}'
    )


def test_listed_outputs_decide_for_themselves() -> None:
    asked = request(RequestedOutput("Y", binary=True), RequestedOutput("X"), binary=True)
    outputs = [tensor("X"), tensor("unasked"), tensor("Y")]
    chunks, header_length = build_infer_response(asked, InferResponse("m", "3", outputs=outputs))
    rows = orjson.loads(chunks[0])["outputs"]
    assert [(row["name"], "data" in row) for row in rows] == [("X", True), ("Y", False)]
    assert (chunks[1:], header_length) == ([PAIR], len(chunks[0]))


@pytest.mark.parametrize(
    ("datatype", "code", "values", "text"),
    [
        ("BOOL", "2?", [True, False], b"[true,false]"),
        ("UINT64", "1Q", [2**64 - 1], b"[18446744073709551615]"),
        ("INT64", "1q", [-(2**63)], b"[-9223372036854775808]"),
        ("INT8", "2b", [-1, 1], b"[-1,1]"),
        ("UINT16", "1H", [65535], b"[65535]"),
        ("FP32", "3f", [0.1, 16777216, -0.0], b"[0.10000000149011612,16777216.0,-0.0]"),
        ("FP64", "2d", [0.1, 5e-324], b"[0.1,5e-324]"),
        ("FP32", "3f", [math.nan, math.inf, -math.inf], b"[NaN,Infinity,-Infinity]"),
        ("FP64", "2d", [1e308, 1e308], b"[1e+308,1e+308]"),
    ],
)
def test_json_values(datatype: str, code: str, values: list[Any], text: bytes) -> None:
    data = struct.pack("<" + code, *values)
    assert b'"data":' + text + b"}" in body(request(), tensor(datatype=datatype, shape=[len(values)], data=data))


def test_not_a_number_beside_numbers() -> None:
    data = struct.pack("<3d", 0.1, math.nan, 1e-7)
    written = rapidjson.loads(body(request(), tensor(datatype="FP64", shape=[3], data=data)))["outputs"][0]["data"]
    assert (written[0], math.isnan(written[1]), written[2]) == (0.1, True, 1e-7)


def test_strings_and_what_is_not_a_string() -> None:
    data = pack_bytes(["é€😀".encode(), b'a"\\\n\1\0z', b"\xff\xfe"])
    written = body(request(), tensor(datatype="BYTES", shape=[3], data=data))
    assert '["é€😀","a\\"\\\\\\n\\u0001\\u0000z","\ufffd\ufffd"]'.encode() in written


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_floats_travel_as_binary_only(datatype: str) -> None:
    half = tensor(datatype=datatype, shape=[4])
    with pytest.raises(WeirError) as caught:
        body(request(), half)
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert caught.value.message == (
        f"sending {datatype} data via JSON is not supported. Please use the binary data format for output"
    )
    assert build_infer_response(request(binary=True), InferResponse("m", "3", outputs=[half]))[0][1] == PAIR


@pytest.mark.parametrize(
    "output",
    [
        tensor(shape=[3]),
        tensor(datatype="BYTES", shape=[1], data=b"\5\0\0\0ab"),
        tensor(datatype="BYTES", shape=[2], data=pack_bytes([b"a"])),
    ],
)
def test_content_that_does_not_fill_the_shape(output: Tensor) -> None:
    with pytest.raises(WeirError) as caught:
        body(request(), output)
    assert caught.value.code is ErrorCode.INTERNAL
    assert caught.value.message == "output tensor shape does not match size of output for 'X'"


def test_classification_of_an_output() -> None:
    asked = request(RequestedOutput("X", class_count=1))
    response = InferResponse("m", "3", outputs=[tensor(shape=[1, 2])])
    chunks, _ = build_infer_response(asked, response, {"X": ["cat", "dog"]}.get, batching=True)
    [row] = orjson.loads(chunks[0])["outputs"]
    assert row == {"name": "X", "datatype": "BYTES", "shape": [1, 1], "data": ["2.500000:1:dog"]}


def test_classification_as_binary() -> None:
    asked = request(RequestedOutput("X", binary=True, class_count=5))
    chunks, _ = build_infer_response(asked, InferResponse("m", "3", outputs=[tensor()]))
    assert chunks[1] == pack_bytes([b"2.500000:1", b"1.000000:0"])


def test_references_have_to_be_fetched_first() -> None:
    lost = Tensor("X", "FP32", [2], PayloadRef("segment", 0, 1, 0, 8))
    with pytest.raises(TypeError, match="'X' has not been fetched"):
        build_infer_response(request(), InferResponse("m", "3", outputs=[lost]))


@pytest.mark.parametrize(("message", "shown"), [('say "no"', 'say "no"'), ("", ""), ("bad \udcff", "bad ?")])
def test_errors(message: str, shown: str) -> None:
    assert orjson.loads(error_body(message)) == {"error": shown}


@pytest.mark.parametrize(
    "datatype", ["BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP32", "FP64"]
)
def test_long_outputs_have_the_text_of_short_ones(datatype: str) -> None:
    numpy = DATATYPES[datatype].numpy
    bits = np.random.default_rng(5).integers(0, 256, 4096 * numpy.itemsize, np.uint8)
    values = (bits[:4096] > 127) if datatype == "BOOL" else bits.view(numpy)
    if values.dtype.kind == "f":
        values = np.where(np.isfinite(values), values, 0.1).astype(numpy)
    for start in (0, 4095):  # a short one takes the other way
        part = values[start:]
        text = orjson.dumps(json_data("out", datatype, [len(part)], part.tobytes()))
        assert text == orjson.dumps(part.tolist())


def test_long_outputs_that_are_not_finite_have_bare_literals() -> None:
    values = np.array([1.5, np.nan, -np.inf] * 1000, np.float32)
    text = orjson.dumps(json_data("out", "FP32", [3000], values.tobytes()))
    assert text.startswith(b"[1.5,NaN,-Infinity,1.5")
