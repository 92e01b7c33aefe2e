"""Arrays become requests of the protocol, and responses become arrays."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc.service_pb2 import ModelInferResponse
from tritonclient.utils import serialize_byte_tensor

from weir.inference import InferResult, infer_request, parameter_value
from weir.schemas.core.errors import ErrorCode, WeirError

ARRAYS = [
    (np.array([[True, False]]), "BOOL"),
    *((np.array([1, 2], dtype), dtype.__name__.upper()) for dtype in (np.uint8, np.uint16, np.uint32, np.uint64)),
    *((np.array([1, -2], dtype), dtype.__name__.upper()) for dtype in (np.int8, np.int16, np.int32, np.int64)),
    (np.array([1.5], np.float16), "FP16"),
    (np.array([1.5], np.float32), "FP32"),
    (np.array([1.5], np.float64), "FP64"),
    (np.array([b"a\0b", "ä".encode()], np.object_), "BYTES"),
    (np.zeros((0, 3), np.float32), "FP32"),
    (np.arange(6, dtype=np.int64).reshape(2, 3).T, "INT64"),
]


def echoed(value: Any) -> np.ndarray:
    request = infer_request("m", {"X": value})
    response = ModelInferResponse(model_name="m", raw_output_contents=request.raw_input_contents)
    response.outputs.add(name="X", datatype=request.inputs[0].datatype, shape=request.inputs[0].shape)
    return InferResult(response)["X"]


@pytest.mark.parametrize(("array", "datatype"), ARRAYS)
def test_arrays_go_and_come_as_they_are(array: np.ndarray, datatype: str) -> None:
    request = infer_request("m", {"X": array})
    assert request.inputs[0].datatype == datatype
    received = echoed(array)
    assert received.dtype == array.dtype
    np.testing.assert_array_equal(received, array)


def test_text_is_utf_8() -> None:
    request = infer_request("m", {"X": ["ä", "b\0c"]})
    assert request.inputs[0].datatype == "BYTES"
    assert request.raw_input_contents[0] == serialize_byte_tensor(np.array(["ä", "b\0c"], np.object_)).item()


def test_lists_and_scalars_with_their_datatype() -> None:
    np.testing.assert_array_equal(echoed(([1, 2], "FP32")), np.array([1, 2], np.float32))
    np.testing.assert_array_equal(echoed((7, "INT32")), np.array(7, np.int32))
    assert list(echoed(([b"x", "y"], "BYTES"))) == [b"x", b"y"]


def test_bf16_as_its_bits_as_ml_dtypes_has_it_and_rounded() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.array([1.0, -2.5, np.inf, 3.1415926, 1e-40], np.float32)
    nearest = values.astype(ml_dtypes.bfloat16)
    for given_as in (nearest, (nearest.view(np.uint16), "BF16"), (values, "BF16")):
        assert infer_request("m", {"X": given_as}).inputs[0].datatype == "BF16"
        np.testing.assert_array_equal(echoed(given_as), nearest.astype(np.float32))
    assert np.isnan(echoed((np.array([np.nan], np.float32), "BF16")))


@given(st.floats(width=32))
def test_bf16_is_rounded_as_ml_dtypes_rounds(value: float) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([value], np.float32)
    np.testing.assert_array_equal(echoed((array, "BF16")), array.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (np.array([1j]), "input 'X' is an array of complex128, which is not a datatype of the protocol"),
        (([1], "FP8"), "input 'X' has unknown datatype 'FP8'"),
        ((["a"], "FP32"), "input 'X' can't be an array of FP32: "),
        ([[1], [1, 2]], "input 'X' can't be an array of "),
    ],
)
def test_what_is_no_tensor_is_refused(value: Any, complaint: str) -> None:
    with pytest.raises(WeirError) as refused:
        infer_request("m", {"X": value})
    assert refused.value.code is ErrorCode.INVALID_ARG
    assert refused.value.message.startswith(complaint)


def test_details_of_a_request() -> None:
    request = infer_request(
        "m",
        {},
        ["A", "B"],
        model_version=3,
        request_id="r",
        parameters={"s": "t", "b": True, "i": 1, "f": 0.5},
        sequence_id="q",
        sequence_start=True,
        priority=2,
        timeout_us=5,
    )
    assert (request.model_version, request.id) == ("3", "r")
    assert [output.name for output in request.outputs] == ["A", "B"]
    assert {name: parameter_value(one) for name, one in request.parameters.items()} == {
        "s": "t",
        "b": True,
        "i": 1,
        "f": 0.5,
        "sequence_id": "q",
        "sequence_start": True,
        "sequence_end": False,
        "priority": 2,
        "timeout": 5,
    }
    with pytest.raises(WeirError, match="parameter 'p' must be"):
        infer_request("m", {}, parameters={"p": None})  # type: ignore[dict-item]


def test_classes_in_place_of_an_output() -> None:
    request = infer_request("m", {}, {"A": 3, "B": 0})
    classified, whole = request.outputs
    assert (classified.name, classified.parameters["classification"].int64_param) == ("A", 3)
    assert (whole.name, len(whole.parameters)) == ("B", 0)
