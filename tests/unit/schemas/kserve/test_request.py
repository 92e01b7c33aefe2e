"""What a KServe v2 body becomes, and how it is refused; texts and codes as a running Triton 2.51 answers them."""

from __future__ import annotations

import struct
from typing import Any

import orjson
import pytest

from tests.support.rejections.kserve_bodies import (
    INTERNAL,
    INVALID_ARG,
    absent,
    access,
    one_input,
    parse,
    parse_data,
    refusal,
)
from tests.support.steps import steps
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.request_limits import RequestLimits
from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START
from weir.schemas.kserve.request import parse_header_length, parse_infer_request

ONE_SOURCE = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. But "
)
NO_SOURCE = ONE_SOURCE + "no field is set"
RESERVED = "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."


def test_a_request_with_everything() -> None:
    body = {
        "id": "r1",
        "model_name": "ignored",
        "parameters": {
            "sequence_id": 7,
            "sequence_start": True,
            "sequence_end": True,
            "priority": 3,
            "timeout": 2500,
            "binary_data_output": True,
            "text": "x",
            "count": 5,
            "ratio": 0.5,
            "flag": False,
            "headers": "h",
        },
        "inputs": [one_input(data=[1, 2]), one_input(name="B", shape=[1, 1], parameters={"binary_data_size": 4})],
        "outputs": [
            {"name": "X", "parameters": {"binary_data": True}},
            {"name": "Y", "parameters": {"classification": 3, "binary_data": False}},
            {"name": "Z"},
        ],
    }
    request = parse(body, b"\0\0\x80\x3f")

    assert (request.model_name, request.model_version, request.id) == ("m", "", "r1")
    assert (request.correlation_id, request.sequence_flags) == (7, SEQUENCE_START | SEQUENCE_END)
    assert (request.priority, request.timeout_us, request.binary_default) == (3, 2500, True)
    assert request.parameters == {"text": "x", "count": 5, "ratio": 0.5, "flag": False, "headers": "h"}
    assert [(t.name, t.datatype, t.shape, bytes(t.data)) for t in request.inputs] == [
        ("A", "FP32", [2], struct.pack("<2f", 1, 2)),
        ("B", "FP32", [1, 1], b"\0\0\x80\x3f"),
    ]
    assert [(o.name, o.binary, o.class_count) for o in request.outputs] == [
        ("X", True, 0),
        ("Y", False, 3),
        ("Z", False, 0),
    ]


def test_a_bare_request_has_the_defaults() -> None:
    request = parse({"inputs": []})
    assert (request.id, request.parameters, request.outputs, request.inputs) == ("", None, [], [])
    assert (request.correlation_id, request.sequence_flags, request.binary_default) == (0, 0, False)


def test_binary_content_is_a_view_over_the_body() -> None:
    header = orjson.dumps({"inputs": [one_input(parameters={"binary_data_size": 8})]})
    body = bytearray(header + struct.pack("<2f", 1, 2))
    request = parse_infer_request("m", "", body, len(header))
    body[-4:] = struct.pack("<f", 9)
    assert request.inputs[0].to_numpy().tolist() == [1.0, 9.0]


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_any_buffer_is_a_body(wrap: type) -> None:
    body = orjson.dumps({"inputs": [one_input(data=[1, 2])]})
    assert len(parse_infer_request("m", "", wrap(body), None).inputs) == 1
    assert len(parse_infer_request("m", "", wrap(body.replace(b"2]}", b"NaN]}")), None).inputs) == 1


def test_string_sequence_ids_and_the_empty_one() -> None:
    assert parse({"inputs": [], "parameters": {"sequence_id": "s"}}).correlation_id == "s"
    assert parse({"inputs": [], "parameters": {"sequence_id": ""}}).correlation_id == ""
    assert parse({"inputs": [], "parameters": {"sequence_id": 2**64 - 1}}).correlation_id == 2**64 - 1


MALFORMED = [
    (b"{", "Missing a name for object member. at 1"),
    (b'{"inputs":', "Invalid value. at 10"),
    (b'{"a":1}x', "The document root must not be followed by other values. at 7"),
    (b'{"a":tru}', "Invalid value. at 8"),
    (b" ", "The document is empty. at 1"),
    (b'{"a":1,}', "Missing a name for object member. at 7"),
    (b'{"a":"\\ud800"}', "The surrogate pair in string is invalid. at 6"),
    (b'{"a":1e999}', "Number too big to be stored in double. at 5"),
    (b'{"a":"x', "Missing a closing quotation mark in string. at 7"),
    (b"[1", "Missing a comma or ']' after an array element. at 2"),
    (b'{"a"}', "Missing a colon after a name of object member. at 4"),
    (b'{"a":"\xff"}', "Invalid encoding in string. at 6"),
    ('{"inputs":[]}'.encode("utf-16"), "Invalid encoding in string. at 0"),
]


@pytest.mark.parametrize(("body", "reason"), MALFORMED, ids=[repr(body) for body, _ in MALFORMED])
def test_malformed_json(body: bytes, reason: str) -> None:
    assert refusal(body) == (INTERNAL, f"failed to parse the request JSON buffer: {reason}")


def test_excessive_nesting_is_rejected_at_once() -> None:
    too_deep = "JSON nesting depth exceeds maximum allowed limit (100)"
    assert refusal(b"[" * 100_000) == (INTERNAL, too_deep)
    assert refusal(b"[NaN," + b"[" * 100_000) == (INTERNAL, too_deep)


@pytest.mark.parametrize(
    "text",
    [
        b'{"inputs":[],"x":' + b"1" * 1_000_000 + b"}",
        b'{"inputs":[{"name":"A","datatype":"INT8","data":[],"shape":['
        + b"9" * 18
        + (b"," + b"9" * 18) * 100_000
        + b"]}]}",
        b"{" + b",".join(b'"%d":0' % key for key in range(200_000)) + b"}",
        b"[" + b"[]," * 100_000 + b"NaN]",
    ],
    ids=["long number", "many dimensions", "many members", "many arrays"],
)
def test_hostile_documents_are_rejected_in_a_step_for_each_byte(text: bytes) -> None:
    def reject() -> None:
        with pytest.raises(WeirError):
            parse(text)

    assert steps(reject) < len(text)


def test_integers_beyond_64_bits_are_floats_in_both_parsers() -> None:
    for literal in (b"1", b"NaN"):
        text = b'{"inputs":[],"parameters":{"own":18446744073709551616,"priority":18446744073709551616},"x":' + literal
        assert refusal(text + b"}") == (INTERNAL, access("priority", "unsigned-integer"))
        own = parse(text.replace(b',"priority":18446744073709551616', b"") + b"}").parameters
        assert own == {"own": 2.0**64}
        assert isinstance(own["own"], float)


def test_not_a_number_does_not_touch_the_numbers_beside_it() -> None:
    assert parse_data("FP64", "[1e-50, 0.1, NaN]", "[3]")[:16] == struct.pack("<2d", 1e-50, 0.1)


@pytest.mark.parametrize("document", [[], None, 1, "x", {}, {"outputs": []}])
def test_a_document_without_inputs(document: Any) -> None:
    assert refusal(document) == (INTERNAL, absent("inputs"))


NOT_A_STRING = [None, True, 1, 1.5, [], {}]
NOT_UNSIGNED = [None, True, -1, 1.5, "1", [], {}]
NOT_AN_ARRAY = [None, True, 1, 1.5, "x", {}]
NOT_A_BOOLEAN = [None, 1, 1.5, "true", [], {}]
NOT_AN_OBJECT = [None, True, 1, 1.5, "x", []]


@pytest.mark.parametrize("value", NOT_A_STRING)
def test_fields_that_must_be_strings(value: Any) -> None:
    assert refusal({"inputs": [], "id": value}) == (INTERNAL, access("id", "string"))
    assert refusal({"inputs": [one_input(data=[1, 2], name=value)]}) == (INTERNAL, access("name", "string"))
    assert refusal({"inputs": [one_input(data=[1, 2], datatype=value)]}) == (INTERNAL, access("datatype", "string"))
    assert refusal({"inputs": [], "outputs": [{"name": value}]}) == (INTERNAL, access("name", "string"))
    region = one_input(parameters={"shared_memory_region": value})
    assert refusal({"inputs": [region]}) == (INTERNAL, access("shared_memory_region", "string"))
    if value != 1:
        expected = (INTERNAL, access("sequence_id", "string"))
        assert refusal({"inputs": [], "parameters": {"sequence_id": value}}) == expected


@pytest.mark.parametrize("value", NOT_UNSIGNED)
def test_fields_that_must_be_unsigned_integers(value: Any) -> None:
    kind = "unsigned-integer"
    assert refusal({"inputs": [], "parameters": {"priority": value}}) == (INTERNAL, access("priority", kind))
    assert refusal({"inputs": [], "parameters": {"timeout": value}}) == (INTERNAL, access("timeout", kind))
    assert refusal({"inputs": [one_input(shape=[value], data=[1])]}) == (INTERNAL, access("shape", kind))
    size = one_input(parameters={"binary_data_size": value})
    assert refusal({"inputs": [size]}) == (INTERNAL, access("binary_data_size", kind))
    offset = one_input(parameters={"shared_memory_region": "r", "shared_memory_offset": value})
    assert refusal({"inputs": [offset]}) == (INTERNAL, access("shared_memory_offset", kind))
    classes = {"name": "X", "parameters": {"classification": value}}
    text = f"Unable to set 'classification': attempt to access JSON non-{kind} as {kind}"
    assert refusal({"inputs": [], "outputs": [classes]}) == (INTERNAL, text)


@pytest.mark.parametrize("value", NOT_AN_ARRAY)
def test_fields_that_must_be_arrays(value: Any) -> None:
    assert refusal({"inputs": value}) == (INTERNAL, access("inputs", "array"))
    assert refusal({"inputs": [], "outputs": value}) == (INTERNAL, access("outputs", "array"))
    assert refusal({"inputs": [one_input(shape=value, data=[1])]}) == (INTERNAL, access("shape", "array"))
    assert refusal({"inputs": [one_input(data=value)]}) == (INTERNAL, access("data", "array"))


@pytest.mark.parametrize("value", NOT_A_BOOLEAN)
@pytest.mark.parametrize("key", ["sequence_start", "sequence_end", "binary_data_output"])
def test_parameters_that_must_be_booleans(key: str, value: Any) -> None:
    assert refusal({"inputs": [], "parameters": {key: value}}) == (INTERNAL, access(key, "boolean"))


@pytest.mark.parametrize("value", NOT_A_BOOLEAN)
def test_binary_data_must_be_a_boolean(value: Any) -> None:
    output = {"name": "X", "parameters": {"binary_data": value}}
    assert refusal({"inputs": [], "outputs": [output]}) == (INTERNAL, access("binary_data", "boolean"))


@pytest.mark.parametrize("value", NOT_AN_OBJECT)
def test_values_where_an_object_belongs(value: Any) -> None:
    text = "failed to get request params.: attempt to get members for non-object"
    assert refusal({"inputs": [], "parameters": value}) == (INTERNAL, text)
    assert refusal({"inputs": [value]}) == (INVALID_ARG, NO_SOURCE)
    assert refusal({"inputs": [], "outputs": [value]}) == (INTERNAL, absent("name"))
    assert refusal({"inputs": [one_input(parameters=value)]}) == (INVALID_ARG, NO_SOURCE)
    assert len(parse({"inputs": [one_input(data=[1, 2], parameters=value)]}).inputs) == 1


@pytest.mark.parametrize("field", ["name", "datatype", "shape"])
def test_missing_fields_of_an_input(field: str) -> None:
    members = one_input(data=[1, 2])
    del members[field]
    assert refusal({"inputs": [members]}) == (INTERNAL, absent(field))


@pytest.mark.parametrize("value", [None, [], {}])
@pytest.mark.parametrize("key", ["custom", "headers"])
def test_parameters_hold_scalars(key: str, value: Any) -> None:
    text = f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'."
    assert refusal({"inputs": [], "parameters": {key: value}}) == (INVALID_ARG, text)


@pytest.mark.parametrize("key", ["triton_", "triton_final_response"])
def test_reserved_parameters(key: str) -> None:
    assert refusal({"inputs": [], "parameters": {key: 1}}) == (INVALID_ARG, RESERVED)


@pytest.mark.parametrize(
    ("members", "found"),
    [
        ({}, "no field is set"),
        ({"data": [1], "parameters": {"binary_data_size": 8}}, "set 'data' 'binary_data_size'"),
        ({"data": [1], "parameters": {"shared_memory_region": "r"}}, "set 'data' 'shared_memory_region'"),
        (
            {"data": [1], "parameters": {"binary_data_size": 8, "shared_memory_region": "r"}},
            "set 'data' 'binary_data_size' 'shared_memory_region'",
        ),
    ],
)
def test_an_input_has_one_source(members: dict[str, Any], found: str) -> None:
    assert refusal({"inputs": [one_input(**members)]}) == (INVALID_ARG, ONE_SOURCE + found)


def test_names_are_given_once() -> None:
    twice = [one_input(data=[1, 2])] * 2
    unknown, named = "[request id: <id_unknown>] ", "[request id: r] "
    assert refusal({"inputs": twice}) == (INVALID_ARG, unknown + "input 'A' already exists in request")
    assert refusal({"inputs": twice, "id": "r"}) == (INVALID_ARG, named + "input 'A' already exists in request")
    outputs = [{"name": "X"}, {"name": "X"}]
    text = unknown + "output 'X' already exists in request"
    assert refusal({"inputs": [], "outputs": outputs}) == (INVALID_ARG, text)


def test_an_unregistered_region_is_not_found() -> None:
    unknown = (ErrorCode.NOT_FOUND, "Unable to find shared memory region: 'r'")
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 8}
    assert refusal({"inputs": [one_input(parameters=region)]}) == unknown
    assert refusal({"inputs": [], "outputs": [{"name": "X", "parameters": region}]}) == unknown


@pytest.mark.parametrize(
    ("extra", "other"), [({"classification": 1}, "classification"), ({"binary_data": True}, "binary_data")]
)
def test_shared_memory_outputs_exclude_other_forms(extra: dict[str, Any], other: str) -> None:
    output = {"name": "X", "parameters": {"shared_memory_region": "r"} | extra}
    text = f"Output can't set both 'shared_memory_region' and '{other}'"
    assert refusal({"inputs": [], "outputs": [output]}) == (INVALID_ARG, text)


@pytest.mark.parametrize("length", [-1, 0, 11, 2**70])
def test_header_lengths_outside_the_body(length: int) -> None:
    with pytest.raises(WeirError) as caught:
        parse_infer_request("m", "", b"0123456789", length)
    assert caught.value.code is INVALID_ARG
    assert caught.value.message == f"inference header size should be in range (0, 10), got: {length}"


def test_the_header_length_header() -> None:
    assert [parse_header_length(value) for value in ("123", "0", "-1")] == [123, 0, -1]


@pytest.mark.parametrize("value", ["abc", "", " 1", "1_0", "+1", "1.0", "\u0661", "9" * 5000])
def test_header_lengths_that_are_no_number(value: str) -> None:
    with pytest.raises(WeirError) as caught:
        parse_header_length(value)
    assert caught.value.code is INVALID_ARG
    assert caught.value.message == f"Unable to parse Inference-Header-Content-Length, got: {value[:200]}"


def test_checks_come_in_order() -> None:
    everything = {"id": 1, "parameters": {"triton_x": 1, "priority": -1}, "inputs": [one_input(shape=3)], "outputs": 1}
    assert refusal(everything)[1] == access("id", "string")
    everything["id"] = "r"
    assert refusal(everything) == (INVALID_ARG, RESERVED)
    everything["parameters"] = {}
    assert refusal(everything) == (INVALID_ARG, NO_SOURCE)
    everything["inputs"] = []
    assert refusal(everything)[1] == access("outputs", "array")


LIMITS = RequestLimits(
    input_size=600, json_values=40, tensors=3, dims=2, parameters=2, id_length=5, correlation_id_length=5
)


def documents(count: int) -> dict[str, Any]:
    """Requests with `count` of what a limit counts."""
    return {
        "inputs": {"inputs": [one_input(name=str(i), shape=[1], data=[1]) for i in range(count)]},
        "outputs": {"inputs": [], "outputs": [{"name": str(i)} for i in range(count)]},
        "dims": {"inputs": [one_input(shape=[1] * count, data=[1])]},
        "parameters": {"inputs": [], "parameters": {str(i): i for i in range(count)}},
        "id": {"inputs": [], "id": "x" * count},
        "sequence_id": {"inputs": [], "parameters": {"sequence_id": "x" * count}},
        "values": {"inputs": [], "ignored": [1] * (count - 3)},
        "size": {"inputs": [], "ignored": "x" * (count - len('{"inputs":[],"ignored":""}'))},
    }


@pytest.mark.parametrize(
    ("what", "limit", "text"),
    [
        ("inputs", 3, "request holds more than 3 inputs"),
        ("outputs", 3, "request holds more than 3 outputs"),
        ("dims", 2, "invalid shape for input 'A': more than 2 dimensions"),
        ("parameters", 2, "request holds more than 2 parameters"),
        ("id", 5, "request 'id' cannot be longer than 5 characters"),
        ("sequence_id", 5, "string correlation ID cannot be longer than 5 characters"),
        ("values", 40, "request JSON holds more than 40 values"),
        (
            "size",
            600,
            "request JSON size of 601 bytes exceeds the maximum allowed input size of 600 bytes. "
            "Use --http-max-input-size to increase the limit.",
        ),
    ],
)
def test_limits(what: str, limit: int, text: str) -> None:
    parse(documents(limit - 1)[what], limits=LIMITS)
    parse(documents(limit)[what], limits=LIMITS)
    code = ErrorCode.UNSUPPORTED if what == "sequence_id" else INVALID_ARG
    assert refusal(documents(limit + 1)[what], limits=LIMITS) == (code, text)
