"""Which requests fit a model, and what is said to those that don't: as a running Triton 2.51 says it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.requests import InferRequest, RequestedOutput
from weir.schemas.core.tensors import DATATYPES, MAX_WALKED_BYTES, PayloadRef, Tensor, pack_bytes
from weir.schemas.kserve.normalizer import RequestNormalizer

UNKNOWN = "[request id: <id_unknown>] "
NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)
ONE_BUFFER = ". Please make sure the string length indicator is in one buffer."


def declared(name: str, dims: list[int], data_type: str = "TYPE_FP32", **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": data_type, "dims": dims} | more


def normalizer(*inputs: dict[str, Any], max_batch_size: int = 8, **more: Any) -> RequestNormalizer:
    outputs = [declared("X", [1]), declared("Y", [1])]
    fields = {"name": "m", "max_batch_size": max_batch_size, "input": list(inputs), "output": outputs}
    return RequestNormalizer(ModelConfig.model_validate(fields | more))


def tensor(name: str, shape: list[int], datatype: str = "FP32", size: int | None = None) -> Tensor:
    if size is None:
        size = math.prod(shape) * DATATYPES[datatype].size_bytes
    return Tensor(name, datatype, shape, bytes(size))


def request(*inputs: Tensor, id: str = "", outputs: list[str] | None = None) -> InferRequest:
    return InferRequest("m", id=id, inputs=list(inputs), outputs=[RequestedOutput(name) for name in outputs or []])


def refusal(rules: RequestNormalizer, asked: InferRequest) -> str:
    with pytest.raises(WeirError) as caught:
        rules.normalize(asked)
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value.message


def normalized(rules: RequestNormalizer, *inputs: Tensor) -> tuple[int, str]:
    asked = request(*inputs)
    rules.normalize(asked)
    return asked.batch_size, asked.shape_key


A4, B4 = declared("A", [4]), declared("B", [4])
TWO = normalizer(A4, B4)
OPTIONAL = normalizer(A4, declared("B", [4], optional=True))
VARIABLE = normalizer(declared("A", [-1, 3]))
UNBATCHED = normalizer(declared("A", [-1]), max_batch_size=0)


def test_requests_that_fit() -> None:
    assert normalized(TWO, tensor("B", [8, 4]), tensor("A", [8, 4])) == (8, "")
    assert normalized(OPTIONAL, tensor("A", [1, 4])) == (1, "0")
    assert normalized(VARIABLE, tensor("A", [2, 5, 3])) == (2, "0:5,3")
    assert normalized(VARIABLE, tensor("A", [2, 0, 3])) == (2, "0:0,3")
    assert normalized(UNBATCHED, tensor("A", [5])) == (1, "")
    assert normalized(UNBATCHED, tensor("A", [0])) == (1, "")


def test_shapes_may_be_tuples() -> None:
    assert normalized(VARIABLE, Tensor("A", "FP32", (2, 5, 3), bytes(120))) == (2, "0:5,3")


@pytest.mark.parametrize(
    ("inputs", "outputs", "id", "text"),
    [
        ([], ["Z", "X", "Q"], "r", "unexpected inference output 'Q' for model 'm'"),
        (
            [],
            [],
            "",
            UNKNOWN
            + "expected 2 inputs but got 0 inputs for model 'm'. Got input(s) [], but missing required input(s) "
            "['A','B']. Please provide all required input(s).",
        ),
        (
            [tensor("B", [1, 4])],
            ["X"],
            "r",
            "[request id: r] expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['B'], but missing required "
            "input(s) ['A']. Please provide all required input(s).",
        ),
        (
            [tensor("Z", [1, 4]), tensor("B", [1, 4]), tensor("Q", [1, 4])],
            [],
            "",
            UNKNOWN + "expected 2 inputs but got 3 inputs for model 'm'. Got input(s) ['Q','B','Z'], but missing "
            "required input(s) ['A']. Please provide all required input(s).",
        ),
        ([tensor("A", [1, 4]), tensor("Z", [1, 4])], [], "r", "unexpected inference input 'Z' for model 'm'"),
        ([tensor("A", [1, 4])] * 2, [], "", UNKNOWN + "input 'A' already exists in request"),
        (
            [tensor("A", []), tensor("B", [])],
            [],
            "",
            UNKNOWN + "input 'B' has no shape but model requires batch dimension for 'm'",
        ),
        (
            [tensor("A", [1, 4]), tensor("B", [2, 4])],
            [],
            "",
            UNKNOWN + "input 'A' batch size does not match other inputs for 'm'",
        ),
        (
            [tensor("A", [9, 4]), tensor("B", [9, 4])],
            [],
            'r"1',
            "[request id: r\"1] inference request batch-size must be <= 8 for 'm'",
        ),
        (
            [tensor("A", [0, 4]), tensor("B", [0, 4])],
            [],
            "",
            UNKNOWN + "input byte size mismatch for input 'B' for model 'm'. Expected 16, got 0",
        ),
        (
            [tensor("A", [1, 5], "INT32"), tensor("B", [1, 4])],
            [],
            "",
            UNKNOWN + "inference input 'A' data-type is 'INT32', but model 'm' expects 'FP32'",
        ),
        (
            [tensor("A", [1, 4], "FLOAT", size=16), tensor("B", [1, 4])],
            [],
            "",
            UNKNOWN + "inference input 'A' data-type is '<invalid>', but model 'm' expects 'FP32'",
        ),
        (
            [tensor("A", [1, 5]), tensor("B", [1, 4])],
            [],
            "r",
            f"[request id: r] unexpected shape for input 'A' for model 'm'. Expected [-1,4], got [1,5]. {NOTE}",
        ),
        (
            [tensor("A", [1, 4]), tensor("B", [1, 4, 1])],
            [],
            "",
            UNKNOWN + f"unexpected shape for input 'B' for model 'm'. Expected [-1,4], got [1,4,1]. {NOTE}",
        ),
        (
            [tensor("A", [1, -1], size=16), tensor("B", [1, 4])],
            [],
            "",
            UNKNOWN + "All input dimensions should be specified for input 'A' for model 'm', got [1,-1]",
        ),
        (
            [tensor("A", [-1, 4], size=16), tensor("B", [-1, 4], size=16)],
            [],
            "",
            UNKNOWN + "All input dimensions should be specified for input 'B' for model 'm', got [-1,4]",
        ),
        (
            [tensor("A", [2, 4], size=16), tensor("B", [2, 4])],
            [],
            "",
            UNKNOWN + "input byte size mismatch for input 'A' for model 'm'. Expected 32, got 16",
        ),
    ],
)
def test_requests_that_do_not_fit(inputs: list[Tensor], outputs: list[str], id: str, text: str) -> None:
    assert refusal(TWO, request(*inputs, id=id, outputs=outputs)) == text


def test_errors_of_models_with_optional_inputs_name_the_range() -> None:
    expected = UNKNOWN + (
        "expected number of inputs between 1 and 2 but got {} inputs for model 'm'. Got input(s) {}, but missing "
        "required input(s) {}. Please provide all required input(s)."
    )
    assert refusal(OPTIONAL, request()) == expected.format(0, "[]", "['A']")
    assert refusal(OPTIONAL, request(tensor("B", [1, 4]))) == expected.format(1, "['B']", "['A']")
    three = [tensor(name, [1, 4]) for name in "ABC"]
    assert refusal(OPTIONAL, request(*three)) == expected.format(3, "['C','B','A']", "[]")


def test_models_without_batching_expect_their_dims() -> None:
    text = UNKNOWN + "unexpected shape for input 'A' for model 'm'. Expected [-1], got {}. "
    assert refusal(UNBATCHED, request(tensor("A", []))) == text.format("[]")
    assert refusal(UNBATCHED, request(tensor("A", [1, 2]))) == text.format("[1,2]")
    negative = request(tensor("A", [-2], size=8))
    assert "All input dimensions should be specified" in refusal(UNBATCHED, negative)


def test_two_negative_dims_are_not_a_size() -> None:
    rules = normalizer(declared("A", [-1, -1]))
    assert "All input dimensions should be specified" in refusal(rules, request(tensor("A", [1, -2, -3], size=24)))


def test_an_empty_batch_of_empty_rows() -> None:
    text = UNKNOWN + "inference request batch-size must be >= 1 for 'm'"
    assert refusal(VARIABLE, request(tensor("A", [0, 0, 3]))) == text


def test_reshape_does_not_change_the_request() -> None:
    rules = normalizer(declared("A", [4], reshape={"shape": [2, 2]}))
    assert normalized(rules, tensor("A", [2, 4])) == (2, "")
    assert "Expected [-1,4]" in refusal(rules, request(tensor("A", [2, 2, 2])))


STRINGS = normalizer(declared("A", [-1], "TYPE_STRING"))
WHERE = "for inference input 'A' for model 'm', "


@pytest.mark.parametrize(
    ("data", "shape", "text"),
    [
        (pack_bytes([b"a", b"bc"]), [1, 3], UNKNOWN + f"expected 3 string elements {WHERE}got 2"),
        (b"", [1, 1], UNKNOWN + f"expected 1 string elements {WHERE}got 0"),
        (pack_bytes([b"a"] * 3), [1, 1], UNKNOWN + f"unexpected number of string elements 2 {WHERE}expecting 1"),
        (pack_bytes([b"a"]), [1, 0], UNKNOWN + f"unexpected number of string elements 1 {WHERE}expecting 0"),
        (
            pack_bytes([b"a"]) + b"\1\0",
            [1, 1],
            UNKNOWN
            + f"incomplete string length indicator {WHERE}expecting 4 bytes but only 2 bytes available"
            + ONE_BUFFER,
        ),
        (b"\5\0\0\0ab", [1, 2], UNKNOWN + f"expected 2 string elements {WHERE}got 1"),
        (
            b"\5\0\0\0ab",
            [1, 1],
            "incomplete string data for inference input 'A', expecting string of length 5 but only 2 bytes available",
        ),
        (
            b"\xff\xff\xff\xff",
            [1, 1],
            "incomplete string data for inference input 'A', expecting string of length 4294967295 but only 0 bytes "
            "available",
        ),
    ],
)
def test_strings_that_do_not_fit(data: bytes, shape: list[int], text: str) -> None:
    assert refusal(STRINGS, request(Tensor("A", "BYTES", shape, data))) == text
    assert refusal(STRINGS, request(Tensor("A", "BYTES", shape, memoryview(data)))) == text


def test_strings_that_fit() -> None:
    assert normalized(STRINGS, Tensor("A", "BYTES", [2, 1], pack_bytes([b"", b"abc"]))) == (2, "0:1")
    assert normalized(STRINGS, Tensor("A", "BYTES", [1, 0], b"")) == (1, "0:0")


def test_references_are_checked_for_size() -> None:
    whole = PayloadRef("segment", 0, 1, 0, 60)
    assert normalized(VARIABLE, Tensor("A", "FP32", [1, 5, 3], whole)) == (1, "0:5,3")
    part = Tensor("A", "FP32", [1, 5, 3], whole._replace(size=56))
    assert refusal(VARIABLE, request(part)).endswith("Expected 60, got 56")
    assert normalized(STRINGS, Tensor("A", "BYTES", [1, 9], whole)) == (1, "0:9")


def test_shape_keys_tell_apart_what_can_not_share_a_batch() -> None:
    rules = normalizer(declared("A", [-1]), declared("B", [-1]), declared("C", [2]))
    c = tensor("C", [1, 2])
    _, key = normalized(rules, tensor("A", [1, 2]), tensor("B", [1, 12]), c)
    assert normalized(rules, c, tensor("B", [1, 12]), tensor("A", [1, 2])) == (1, key)
    assert normalized(rules, tensor("A", [1, 12]), tensor("B", [1, 2]), c) != (1, key)

    both = normalized(OPTIONAL, tensor("A", [1, 4]), tensor("B", [1, 4]))
    assert both != normalized(OPTIONAL, tensor("A", [1, 4]))


@pytest.mark.parametrize("backend", ["python", "onnxruntime"])
def test_ragged_inputs_do_not_affect_shape_keys(backend: str) -> None:
    rules = normalizer(declared("A", [-1], allow_ragged_batch=True), declared("B", [-1]), backend=backend)
    b = tensor("B", [1, 2])
    assert normalized(rules, tensor("A", [1, 2]), b) == normalized(rules, tensor("A", [1, 5]), b)
    assert normalized(rules, tensor("A", [1, 2]), b) != normalized(rules, tensor("A", [1, 2]), tensor("B", [1, 3]))
    only = normalizer(declared("A", [-1], allow_ragged_batch=True), backend=backend)
    assert normalized(only, tensor("A", [1, 2])) == normalized(only, tensor("A", [1, 5])) == (1, "")


@pytest.mark.parametrize(("sequences", "together"), [({"direct": {}}, False), ({"oldest": {}}, True), ({}, False)])
def test_rows_of_direct_sequences_are_never_ragged(sequences: dict[str, Any], together: bool) -> None:
    rules = normalizer(declared("A", [-1], allow_ragged_batch=True), sequence_batching=sequences)
    keys = []
    for length in (2, 5):
        sent = request(tensor("A", [1, length]))
        sent.correlation_id = 7
        rules.normalize(sent)
        keys.append(sent.shape_key)
    assert (keys[0] == keys[1]) == together


def test_shape_tensors_have_no_batch_and_their_values_matter() -> None:
    rules = normalizer(declared("A", [4]), declared("S", [2], "TYPE_INT32", is_shape_tensor=True))

    def with_shape(values: bytes) -> tuple[int, str]:
        return normalized(rules, tensor("A", [3, 4]), Tensor("S", "INT32", [2], values))

    assert with_shape(b"\1\0\0\0\2\0\0\0") == with_shape(b"\1\0\0\0\2\0\0\0")
    assert with_shape(b"\1\0\0\0\2\0\0\0") != with_shape(b"\1\0\0\0\3\0\0\0")
    assert with_shape(bytes(8))[0] == 3


def sequences(data_type: str) -> RequestNormalizer:
    control = {"name": "ID", "control": [{"kind": "CONTROL_SEQUENCE_CORRID", "data_type": data_type}]}
    return normalizer(A4, sequence_batching={"control_input": [control]})


@pytest.mark.parametrize(
    ("data_type", "correlation_id", "given", "wanted"),
    [
        ("TYPE_UINT64", "s", "BYTES", "UINT64"),
        ("TYPE_INT32", "s", "BYTES", "INT32"),
        ("TYPE_STRING", 5, "UINT64", "BYTES"),
    ],
)
def test_correlation_ids_of_the_wrong_type(data_type: str, correlation_id: int | str, given: str, wanted: str) -> None:
    asked = request(tensor("A", [1, 4]))
    asked.correlation_id = correlation_id
    assert refusal(sequences(data_type), asked) == UNKNOWN + (
        f"sequence batching control 'ID' data-type is '{given}', but model 'm' expects '{wanted}'"
    )


@pytest.mark.parametrize(
    ("data_type", "correlation_id"),
    [("TYPE_UINT64", 5), ("TYPE_INT32", 5), ("TYPE_STRING", "s")],
)
def test_correlation_ids_that_fit(data_type: str, correlation_id: int | str) -> None:
    asked = request(tensor("A", [1, 4]))
    asked.correlation_id = correlation_id
    sequences(data_type).normalize(asked)
    without_control = request(tensor("A", [1, 4]), tensor("B", [1, 4]))
    without_control.correlation_id = correlation_id
    TWO.normalize(without_control)


@pytest.mark.parametrize("correlation_id", [0, ""])
def test_a_sequence_must_be_named(correlation_id: int | str) -> None:
    asked = request(tensor("A", [1, 4]))
    asked.correlation_id = correlation_id
    with pytest.raises(
        WeirError, match=r"^INVALID_ARG: inference request to model .* must specify a non-zero or non-empty correl"
    ):
        sequences("TYPE_UINT64").normalize(asked)


def test_a_sequence_takes_one_row_at_a_time() -> None:
    for correlation_id in (5, 0):  # Triton looks at the rows first
        asked = request(tensor("A", [2, 4]))
        asked.correlation_id = correlation_id
        with pytest.raises(
            WeirError, match=r"^INVALID_ARG: inference request to model .* must specify batch-size 1 due to requi"
        ):
            sequences("TYPE_UINT64").normalize(asked)


@pytest.mark.parametrize("is_reference", [False, True])
def test_only_the_size_of_long_strings_is_checked(is_reference: bool) -> None:
    count = MAX_WALKED_BYTES // 4 + 1
    content = bytes(4 * count)
    data = PayloadRef("segment", 0, 1, 0, len(content)) if is_reference else memoryview(content)
    assert normalized(STRINGS, Tensor("A", "BYTES", [1, count], data)) == (1, f"0:{count}")
    # Whether there are fewer strings than this is for the worker to find out.
    assert normalized(STRINGS, Tensor("A", "BYTES", [1, 2], data)) == (1, "0:2")
    text = f"expected {count + 1} string elements {WHERE}got at most {count}"
    assert refusal(STRINGS, request(Tensor("A", "BYTES", [1, count + 1], data))) == UNKNOWN + text
    text = f"unexpected number of string elements 1 {WHERE}expecting 0"
    assert refusal(STRINGS, request(Tensor("A", "BYTES", [1, 0], data))) == UNKNOWN + text
