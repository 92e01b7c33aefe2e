from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.gateway.grpc_streams import TYPED
from weir.gateway.grpc.codec import decode_request, request_from_message, response_pieces
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.request_limits import RequestLimits
from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START, InferRequest, InferResponse, RequestedOutput
from weir.schemas.core.tensors import DATATYPES, Tensor, pack_bytes
from weir.schemas.kserve.triton_messages import messages as triton

Message = triton.ModelInferRequest


def message_of(*inputs: dict, raw: list[bytes] | None = None, **fields: object) -> Any:
    rows = [{"name": f"in{i}", "datatype": "FP32", "shape": [1], **given} for i, given in enumerate(inputs)]
    return Message(**{"model_name": "m", "inputs": rows, "raw_input_contents": raw or [], **fields})


def request_of(message: Any, limits: RequestLimits | None = None) -> InferRequest:
    decoded = decode_request(message.SerializeToString())
    return request_from_message(*decoded) if limits is None else request_from_message(*decoded, limits)


def refusal(message: Any, limits: RequestLimits | None = None) -> tuple[ErrorCode, str]:
    with pytest.raises(WeirError) as caught:
        request_of(message, limits)
    return caught.value.code, caught.value.message


def parameter(value: object, field: str | None = None) -> Any:
    field = field or {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
    return triton.InferParameter(**{field: value})


# Requests: raw contents


def test_raw_contents_are_views_over_the_message() -> None:
    values = np.arange(16, dtype=np.float32)
    data = message_of({"shape": [1, 16]}, raw=[values.tobytes()]).SerializeToString()
    request = request_from_message(*decode_request(data))
    assert np.shares_memory(request.inputs[0].to_numpy(), np.frombuffer(data, np.uint8))
    np.testing.assert_array_equal(request.inputs[0].to_numpy(), values.reshape(1, 16))


def test_a_request_keeps_its_identity_and_outputs() -> None:
    message = message_of({}, raw=[b"1234"], model_version="3", id="abc", outputs=[{"name": "a"}, {"name": "b"}])
    request = request_of(message)
    assert (request.model_name, request.model_version, request.id) == ("m", "3", "abc")
    assert [(output.name, output.binary, output.class_count) for output in request.outputs] == [
        ("a", True, 0),
        ("b", True, 0),
    ]
    assert request.binary_default


contents = st.lists(st.binary(max_size=300), max_size=4)
messages = st.builds(
    lambda raw, id, version, typed: message_of(
        *({"contents": c} for c in typed), raw=raw, id=id, model_version=version
    ),
    contents,
    st.text(max_size=200),
    st.text(max_size=5),
    st.lists(st.builds(lambda values: {"int_contents": values}, st.lists(st.integers(0, 9))), max_size=3),
)


@given(messages, st.binary(max_size=20))
@settings(max_examples=150, deadline=None)
def test_splitting_off_raw_contents_agrees_with_protobuf(message: Any, tail: bytes) -> None:
    assert_agrees_with_protobuf(message.SerializeToString() + tail)


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_read_as_protobuf_reads_them(data: bytes) -> None:
    assert_agrees_with_protobuf(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\x3a",
        b"\x3a\x80",
        b"\x3a\x05abc",
        b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x3a\xff\xff\xff\xff\x0f",
        b"\x3a\x80\x00\x0a\x01m",
        b"\xf8\x07\x01\x3a\x01x",
        b"\x3a\x03abc\x3a\x00\x0a\x01m",
    ],
)
def test_odd_bytes_are_read_as_protobuf_reads_them(data: bytes) -> None:
    assert_agrees_with_protobuf(data)


def assert_agrees_with_protobuf(data: bytes) -> None:
    try:
        expected = Message.FromString(data)
    except DecodeError:
        with pytest.raises(WeirError) as caught:
            decode_request(data)
        assert (caught.value.code, caught.value.message) == (ErrorCode.INTERNAL, "Unable to parse request")
        return
    message, raw = decode_request(data)
    assert [bytes(content) for content in raw] == list(expected.raw_input_contents)
    del message.raw_input_contents[:], expected.raw_input_contents[:]
    assert message == expected


# Requests: typed contents


@pytest.mark.parametrize("datatype", TYPED)
def test_typed_contents_are_packed_as_raw_ones(datatype: str) -> None:
    field, values = TYPED[datatype]
    tensor = request_of(message_of({"datatype": datatype, "shape": [3], "contents": {field: values}})).inputs[0]
    if datatype == "BYTES":
        assert bytes(tensor.data) == pack_bytes(values)
    else:
        np.testing.assert_array_equal(tensor.to_numpy(), np.array(values, DATATYPES[datatype].numpy))


def test_wide_integers_are_narrowed_to_their_low_bytes() -> None:
    tensor = request_of(message_of({"datatype": "INT8", "contents": {"int_contents": [0x1FF, -129]}})).inputs[0]
    assert bytes(tensor.data) == b"\xff\x7f"


def test_unknown_fields_behind_typed_contents_are_no_content() -> None:
    typed = triton.InferTensorContents(fp32_contents=[1.0, 2.0]).SerializeToString() + b"\xf8\x07\x01"
    message = message_of({"shape": [2], "contents": triton.InferTensorContents.FromString(typed)})
    np.testing.assert_array_equal(request_of(message).inputs[0].to_numpy(), [1.0, 2.0])


def test_typed_contents_without_elements_are_no_bytes() -> None:
    assert request_of(message_of({"shape": [0], "contents": {}})).inputs[0].size_bytes == 0


WRONG_CONTENT = {
    "both typed and raw": (
        message_of({"contents": {"fp32_contents": [1.0]}}, raw=[b"1234"]),
        "contents field must not be specified when using raw_input_contents for 'in0' for model 'm'",
    ),
    "neither": (message_of({}), "unable to find data for input tensor 'in0' for model 'm' in request."),
    "too few raw": (
        message_of({}, {}, raw=[b"1234"]),
        "unable to find data for input tensor 'in1' for model 'm' in request.",
    ),
    "too many raw": (message_of({}, raw=[b"1234", b"5"]), "unexpected additional input data for model 'm'"),
    "wrong field": (
        message_of({"datatype": "FP32", "contents": {"int_contents": [1]}}),
        "unexpected explicit tensor data for input tensor 'in0' for model 'm' of type 'INT32', expected datatype 'FP32'",
    ),
    "FP16 typed": (
        message_of({"datatype": "FP16", "contents": {"fp32_contents": [1.0]}}),
        "unexpected explicit tensor data for input tensor 'in0' for model 'm' of type 'FP32', expected datatype 'FP16'",
    ),
    "unknown datatype": (
        message_of({"datatype": "FP8", "contents": {"fp32_contents": [1.0]}}),
        "unexpected explicit tensor data for input tensor 'in0' for model 'm' of type 'FP32', "
        "expected datatype '<invalid>'",
    ),
    "two fields": (
        message_of({"datatype": "INT32", "contents": {"int_contents": [1], "int64_contents": [1]}}),
        "unexpected explicit tensor data for input tensor 'in0' for model 'm', binary data was already supplied.",
    ),
    "output twice": (
        message_of({}, raw=[b"1234"], outputs=[{"name": "a"}, {"name": "a"}]),
        "[request id: <id_unknown>] output 'a' already exists in request",
    ),
    "elements beyond any tensor": (
        message_of({"shape": [2**40, 0]}, raw=[b""]),
        "invalid shape for input 'in0': shape [1099511627776,0] causes total element count to exceed maximum size of "
        "2147483647",
    ),
}


@pytest.mark.parametrize("message,expected", WRONG_CONTENT.values(), ids=WRONG_CONTENT)
def test_wrong_content_is_rejected_with_tritons_text(message: Any, expected: str) -> None:
    assert refusal(message) == (ErrorCode.INVALID_ARG, expected)


def test_an_unregistered_region_is_not_found() -> None:
    region = {"shared_memory_region": parameter("r"), "shared_memory_byte_size": parameter(4)}
    expected = (ErrorCode.NOT_FOUND, "Unable to find shared memory region: 'r'")
    assert refusal(message_of({"parameters": region})) == expected
    assert refusal(message_of({}, raw=[b"1234"], outputs=[{"name": "o", "parameters": region}])) == expected


@pytest.mark.parametrize(
    "message,expected",
    [
        (message_of(*[{}] * 3, raw=[b"1234"] * 3), "request holds more than 2 inputs"),
        (
            message_of({}, raw=[b"1234"], outputs=[{"name": n} for n in "abc"]),
            "request holds more than 2 outputs",
        ),
        (
            message_of({"shape": [1] * 4}, raw=[b"1234"]),
            "invalid shape for input 'in0': shape [1,1,1,1] has more than 3 dimensions",
        ),
        (message_of(parameters={n: parameter(1) for n in "abc"}), "request holds more than 2 parameters"),
        (message_of(id="too long"), "request 'id' cannot be longer than 5 characters"),
    ],
)
def test_limits_hold(message: Any, expected: str) -> None:
    limits = RequestLimits(tensors=2, dims=3, parameters=2, id_length=5)
    assert refusal(message, limits) == (ErrorCode.INVALID_ARG, expected)


def test_a_long_correlation_id_is_not_supported() -> None:
    text = "string correlation ID cannot be longer than 128 characters"
    assert refusal(message_of(parameters={"sequence_id": parameter("x" * 129)})) == (ErrorCode.UNSUPPORTED, text)


# Parameters


def test_reserved_parameters_become_attributes_and_others_stay() -> None:
    request = request_of(
        message_of(
            parameters={
                "sequence_id": parameter(7),
                "sequence_start": parameter(True),
                "sequence_end": parameter(True),
                "priority": parameter(2**64 - 1, "uint64_param"),
                "timeout": parameter(250),
                "triton_enable_empty_final_response": parameter(True),
                "text": parameter("x"),
                "flag": parameter(False),
                "number": parameter(-5),
                "ratio": parameter(0.5),
            }
        )
    )
    assert request.correlation_id == 7
    assert request.sequence_flags == SEQUENCE_START | SEQUENCE_END
    assert (request.priority, request.timeout_us) == (2**64 - 1, 250)
    assert request.parameters == {"text": "x", "flag": False, "number": -5, "ratio": 0.5}


@pytest.mark.parametrize(
    "given_id,expected",
    [(0, 0), (-1, 2**64 - 1), ("seq", "seq"), ("", 0)],
)
def test_correlation_ids(given_id: int | str, expected: int | str) -> None:
    assert request_of(message_of(parameters={"sequence_id": parameter(given_id)})).correlation_id == expected


def test_flags_that_are_false_and_a_negative_timeout_mean_nothing() -> None:
    request = request_of(message_of(parameters={"sequence_start": parameter(False), "timeout": parameter(-1)}))
    assert (request.sequence_flags, request.timeout_us, request.parameters) == (0, 0, None)


RESERVED_START = (
    "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting "
)
WRONG_PARAMETERS = [
    ("sequence_id", True, "invalid value type for 'sequence_id' parameter, expected int64_param or string_param."),
    ("sequence_start", 1, "invalid value type for 'sequence_start' parameter, expected bool_param."),
    ("sequence_end", "x", "invalid value type for 'sequence_end' parameter, expected bool_param."),
    ("priority", -1, "invalid value for 'priority', expected value >= 0."),
    ("priority", "1", "invalid value type for 'priority' parameter, expected int64_param or uint64_param."),
    ("timeout", 1.5, "invalid value type for 'timeout' parameter, expected int64_param."),
    ("triton_other", 1, RESERVED_START + "with 'triton_' are allowed: triton_enable_empty_final_response"),
    (
        "triton_enable_empty_final_response",
        1,
        "invalid value type for 'triton_enable_empty_final_response' parameter, expected bool_param.",
    ),
]


@pytest.mark.parametrize("name,value,expected", WRONG_PARAMETERS)
def test_wrong_parameters_are_rejected_with_tritons_text(name: str, value: object, expected: str) -> None:
    assert refusal(message_of(parameters={name: parameter(value)})) == (ErrorCode.INVALID_ARG, expected)


@pytest.mark.parametrize("wrong", [triton.InferParameter(), parameter(1, "uint64_param")])
def test_custom_parameters_without_a_usable_value_are_rejected(wrong: triton.InferParameter) -> None:
    assert refusal(message_of(parameters={"mine": wrong})) == (
        ErrorCode.INVALID_ARG,
        "invalid value type for 'mine' parameter, expected int64_param, bool_param, or string_param.",
    )


@pytest.mark.parametrize(
    "parameters,expected",
    [
        ({"classification": parameter("2")}, "invalid value type for 'classification' parameter, expected int64_param"),
        ({"classification": parameter(0)}, "invalid value for 'classification' parameter, expected >= 0"),
        (
            {"classification": parameter(2), "shared_memory_region": parameter("r")},
            "output can't set both 'shared_memory_region' and 'classification'",
        ),
    ],
)
def test_wrong_classification_is_rejected_with_tritons_text(parameters: dict, expected: str) -> None:
    message = message_of({}, raw=[b"1234"], outputs=[{"name": "o", "parameters": parameters}])
    assert refusal(message) == (ErrorCode.INVALID_ARG, expected)


# Responses


def encoded(outputs: list[Tensor], request: InferRequest | None = None, **fields: object) -> triton.ModelInferResponse:
    response = InferResponse("m", "2", outputs=outputs, **fields)
    data = b"".join(response_pieces(request or InferRequest("m"), response, {"scores": ["cat", "dog", "cow"]}, True))
    return triton.ModelInferResponse.FromString(data)


@given(st.lists(st.integers(0, 40_000), max_size=4))
@settings(max_examples=30, deadline=None)
def test_outputs_travel_raw_whatever_their_size(sizes: list[int]) -> None:
    arrays = [np.arange(size, dtype=np.uint8) for size in sizes]
    message = encoded([Tensor.from_numpy(f"o{i}", array, "UINT8") for i, array in enumerate(arrays)])
    assert [(o.name, o.datatype, list(o.shape)) for o in message.outputs] == [
        (f"o{i}", "UINT8", [size]) for i, size in enumerate(sizes)
    ]
    assert list(message.raw_output_contents) == [array.tobytes() for array in arrays]


def test_a_response_names_its_model_request_and_parameters() -> None:
    parameters = {"flag": True, "number": -3, "large": 2**64 - 1, "ratio": 0.25, "text": "x"}
    message = encoded([], id="abc", parameters=parameters)
    assert (message.model_name, message.model_version, message.id) == ("m", "2", "abc")
    assert {name: value.WhichOneof("parameter_choice") for name, value in message.parameters.items()} == {
        "flag": "bool_param",
        "number": "int64_param",
        "large": "uint64_param",
        "ratio": "double_param",
        "text": "string_param",
    }
    values = {name: getattr(v, v.WhichOneof("parameter_choice")) for name, v in message.parameters.items()}
    assert values == parameters


def test_only_requested_outputs_are_sent() -> None:
    request = InferRequest("m", outputs=[RequestedOutput("b", binary=True)])
    message = encoded([Tensor("a", "INT8", [1], b"1"), Tensor("b", "INT8", [1], b"2")], request)
    assert [output.name for output in message.outputs] == ["b"]
    assert list(message.raw_output_contents) == [b"2"]


def test_classification_replaces_an_output_by_its_highest_classes() -> None:
    request = InferRequest("m", outputs=[RequestedOutput("scores", class_count=2)])
    message = encoded([Tensor.from_numpy("scores", np.array([[0.5, 2, 1]], np.float32), "FP32")], request)
    assert (message.outputs[0].datatype, list(message.outputs[0].shape)) == ("BYTES", [1, 2])
    assert message.raw_output_contents[0] == pack_bytes([b"2.000000:1:dog", b"1.000000:2:cow"])


def test_a_response_that_grpc_cannot_carry_is_rejected_with_tritons_text() -> None:
    untouched = memoryview(np.zeros(2**31, np.uint8)).cast("B")
    with pytest.raises(
        WeirError, match=r"^INVALID_ARG: Response has byte size \d+ which exceeds gRPC's byte size limit 2147483647\.$"
    ):
        encoded([Tensor("o", "UINT8", [2**31], untouched)])
