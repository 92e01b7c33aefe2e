"""The inputs of a KServe v2 body, binary and as JSON; texts and codes as a running Triton 2.51 answers them."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import orjson
import pytest

from tests.support.rejections.kserve_bodies import (
    IMPOSSIBLE,
    INTERNAL,
    INVALID_ARG,
    access,
    one_input,
    parse_data,
    parse_input,
    refusal,
)
from weir.schemas.core.errors import WeirError
from weir.schemas.core.tensors import DATATYPES, pack_bytes, pack_strings
from weir.schemas.kserve.json_documents import MAX_JSON_DEPTH
from weir.schemas.kserve.json_tensors import pack_json_data

TRUE_SHAPE = "Unable to parse 'data': Shape does not match true shape of 'data' field"


BINARY = {"inputs": [one_input(parameters={"binary_data_size": 8})]}


def test_binary_content_of_the_wrong_length() -> None:
    short = "unexpected size for input 'A', expecting {} additional bytes for model 'm'"
    assert refusal(BINARY, bytes(5)) == (INVALID_ARG, short.format(3))
    assert refusal(BINARY) == (INVALID_ARG, short.format(8))
    extra = (INVALID_ARG, "unexpected additional input data for model 'm'")
    assert refusal(BINARY, bytes(9)) == extra
    assert refusal({"inputs": [one_input(data=[1, 2])]}, b"\0") == extra
    assert refusal({"inputs": [one_input(data=[1, 2])], "outputs": 3}, b"\0") == extra


INT_VALUES = [
    ("UINT8", "300", 44),
    ("UINT8", "18446744073709551615", 255),
    ("UINT16", "65536", 0),
    ("UINT32", "4294967297", 1),
    ("UINT64", "18446744073709551615", 2**64 - 1),
    ("INT8", "-300", -44),
    ("INT16", "70000", 4464),
    ("INT32", "9223372036854775807", -1),
    ("INT64", "-9223372036854775808", -(2**63)),
    ("INT32", "-0", 0),
]
FLOAT_VALUES = [
    ("FP32", "1", 1.0),
    ("FP32", "0.1", float(np.float32(0.1))),
    ("FP32", "1e39", math.inf),
    ("FP32", "NaN", math.nan),
    ("FP32", "-Infinity", -math.inf),
    ("FP64", "Infinity", math.inf),
    ("FP64", "Inf", math.inf),
    ("FP64", "18446744073709551616", 2.0**64),
    ("FP64", "1e-50", 1e-50),
]


@pytest.mark.parametrize(("datatype", "text", "value"), INT_VALUES + FLOAT_VALUES)
def test_numbers_in_json(datatype: str, text: str, value: float) -> None:
    [parsed] = np.frombuffer(parse_data(datatype, f"[{text}]"), DATATYPES[datatype].numpy).tolist()
    assert parsed == value or (math.isnan(parsed) and math.isnan(value))


def test_booleans_and_strings_in_json() -> None:
    assert parse_data("BOOL", "[true, false]", "[2]") == b"\1\0"
    assert parse_data("BYTES", '["a", "é\\u0000"]', "[2]") == pack_bytes([b"a", "é\0".encode()])
    assert parse_data("BYTES", '["a", "b"]', "[3]") == pack_bytes([b"a", b"b"])


SIGNED, UNSIGNED = "signed-integer", "unsigned-integer"
WRONG_ELEMENTS = [
    ("BOOL", "1", access("data", "boolean")),
    ("BOOL", "null", access("data", "boolean")),
    ("INT32", "1.0", access("data", SIGNED)),
    ("INT32", "true", access("data", SIGNED)),
    ("INT32", "NaN", access("data", SIGNED)),
    ("INT64", "9223372036854775808", access("data", SIGNED)),
    ("INT8", "9223372036854775808", access("data", SIGNED)),
    ("UINT8", "-1", access("data", UNSIGNED)),
    ("UINT64", "-1", access("data", UNSIGNED)),
    ("UINT64", "18446744073709551616", access("data", UNSIGNED)),
    ("UINT16", '"a"', access("data", UNSIGNED)),
    ("FP32", "true", "Unable to parse 'data': attempt to access JSON non-number as double"),
    ("FP64", '"a"', "Unable to parse 'data': attempt to access JSON non-number as double"),
    ("FP32", "{}", "Unable to parse 'data': attempt to access JSON non-number as double"),
    ("BYTES", "1", "Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
    ("BYTES", "[[null]]", "Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
]


@pytest.mark.parametrize(("datatype", "text", "message"), WRONG_ELEMENTS)
def test_elements_of_the_wrong_type(datatype: str, text: str, message: str) -> None:
    with pytest.raises(WeirError) as caught:
        parse_data(datatype, f"[{text}]")
    assert (caught.value.code, caught.value.message) == (INTERNAL, message)


@pytest.mark.parametrize("data", [[], [1], [1, 2, 3], [[1], [[2]], 3]])
def test_data_that_does_not_fill_the_shape(data: list[Any]) -> None:
    assert refusal({"inputs": [one_input(data=data)]}) == (INTERNAL, TRUE_SHAPE)


@pytest.mark.parametrize("text", ["[[1],[2]]", "[1,[2]]", "[[[1,2]]]", "[[1,2],[]]"])
def test_nesting_does_not_matter(text: str) -> None:
    assert parse_data("FP32", text, "[2]") == struct.pack("<2f", 1, 2)


def test_the_depth_of_data() -> None:
    assert parse_data("INT8", "[" * 100 + "1" + "]" * 100) == b"\1"
    with pytest.raises(WeirError, match="depth exceeds"):
        parse_data("INT8", "[" * 101 + "1" + "]" * 101)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_floats_travel_as_binary_only(datatype: str) -> None:
    text = f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input A"
    assert refusal({"inputs": [one_input(datatype=datatype, data=[1, 2])]}) == (INVALID_ARG, text)
    size = {"binary_data_size": 4}
    assert parse_input(b"\0\1\2\3", datatype=datatype, parameters=size).inputs[0].size_bytes == 4


@pytest.mark.parametrize("datatype", ["fp32", "FLOAT", ""])
def test_unknown_datatypes(datatype: str) -> None:
    assert refusal({"inputs": [one_input(datatype=datatype, data=[1, 2])]}) == (
        INVALID_ARG,
        "invalid datatype for input A",
    )


@pytest.mark.parametrize("shape", [[0], [3, 0], []])
def test_an_input_without_elements_needs_no_data(shape: list[int]) -> None:
    assert parse_input(shape=shape, data=[1, 2, "x"]).inputs[0].data == b""


SHAPES = [
    ([2**63], IMPOSSIBLE + "[9223372036854775808] contains one or more invalid dimensions"),
    ([0, 2**64 - 1], IMPOSSIBLE + "[0,18446744073709551615] contains one or more invalid dimensions"),
    ([2**62], "byte size overflow for input 'A'"),
    ([2**31], IMPOSSIBLE + "[2147483648] causes total element count to exceed maximum size of 2147483647"),
    ([0, 2**31, 1], IMPOSSIBLE + "[0,2147483648,1] causes total element count to exceed maximum size of 2147483647"),
    (
        [2**40, 2**40],
        IMPOSSIBLE + "[1099511627776,1099511627776] causes total element count to exceed maximum size of 2147483647",
    ),
    ([1] * 17, "invalid shape for input 'A': more than 16 dimensions"),
]


@pytest.mark.parametrize(("shape", "text"), SHAPES)
def test_shapes_no_tensor_has(shape: list[int], text: str) -> None:
    assert refusal({"inputs": [one_input(shape=shape, data=[1])]}) == (INVALID_ARG, text)
    binary = one_input(shape=shape, parameters={"binary_data_size": 0})
    assert refusal({"inputs": [binary]}) == (INVALID_ARG, text)


def test_a_json_input_can_not_promise_more_than_the_limit() -> None:
    code, text = refusal({"inputs": [one_input(shape=[2**30], data=[1])]})
    assert code is INVALID_ARG
    assert text.startswith(
        "JSON input 'A' has a byte_size (4294967296 bytes) that exceeds the maximum allowed value of"
    )


@pytest.mark.parametrize(
    "data", ["[[[1,2],[3]],[[4]]]", "[[1,2],3,[4]]", "[[[1,2],[3]],[4]]", "[[],[1,2,3,4]]", "[[[]],[[1,2],[3,4]]]"]
)
def test_nesting_of_any_form_is_flattened(data: str) -> None:
    assert parse_data("INT32", data, "[4]") == struct.pack("<4i", 1, 2, 3, 4)


@pytest.mark.parametrize(("leaf", "deepest"), [("1", MAX_JSON_DEPTH), ("[],1", MAX_JSON_DEPTH - 1)])
def test_nesting_of_pure_and_mixed_lists_has_one_limit(leaf: str, deepest: int) -> None:
    def nested(depth: int) -> Any:
        return orjson.loads("[" * depth + leaf + "]" * depth)

    assert pack_json_data("X", "INT32", nested(deepest), 1) == struct.pack("<i", 1)
    with pytest.raises(WeirError, match="nesting depth"):
        pack_json_data("X", "INT32", nested(deepest + 1), 1)


def test_strings_are_packed_like_their_bytes() -> None:
    strings = ["", "a", "é€😀", "x" * 70_000]
    assert pack_strings(strings) == pack_bytes(strings)
