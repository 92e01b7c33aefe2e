from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START
from weir.schemas.core.tensors import BY_CONFIG_NAME, DATATYPES
from weir.schemas.kserve.normalizer import RequestNormalizer
from weir.schemas.kserve.request import parse_infer_request
from weir.schemas.kserve.sample_inputs import (
    MAX_JSON_ELEMENTS,
    SampleInput,
    declared_inputs,
    inputs_of_metadata,
    sample_body,
    sample_tensors,
)

TENSORS = st.fixed_dictionaries(
    {
        "data_type": st.sampled_from(sorted(BY_CONFIG_NAME)),
        "dims": st.lists(st.sampled_from([-1, 1, 2, 5]), min_size=1, max_size=4),
        "optional": st.booleans(),
    }
)


def config(max_batch_size: int, *tensors: dict[str, Any], **more: Any) -> ModelConfig:
    inputs = [{"name": f"IN{place}", **tensor} for place, tensor in enumerate(tensors)]
    outputs = [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [1]}]
    return ModelConfig.model_validate(
        {"name": "m", "max_batch_size": max_batch_size, "input": inputs, "output": outputs, **more}
    )


@given(
    st.sampled_from([0, 1, 8]), st.lists(TENSORS, min_size=1, max_size=3), st.integers(1, 3), st.integers(0, 2**32 - 1)
)
def test_samples_are_valid_requests(max_batch_size: int, tensors: list[Any], size: int, seed: int) -> None:
    made = config(max_batch_size, *tensors)
    body, header_length = sample_body(sample_tensors(declared_inputs(made), 1, variable_size=size, seed=seed))
    request = parse_infer_request("m", "", body, header_length)
    required = [tensor for tensor in made.input if not tensor.optional]
    assert [tensor.name for tensor in request.inputs] == [tensor.name for tensor in required]
    if required:
        RequestNormalizer(made).normalize(request)
    for tensor, declared in zip(request.inputs, required, strict=True):
        dims = [size if dim == -1 else dim for dim in declared.dims]
        assert list(tensor.shape) == ([1, *dims] if max_batch_size else dims)
    has_halves = any(tensor.data_type in ("TYPE_FP16", "TYPE_BF16") for tensor in required)
    assert (header_length is not None) == has_halves


@pytest.mark.parametrize("datatype", sorted(DATATYPES))
def test_values_suit_most_networks(datatype: str) -> None:
    (tensor,) = sample_tensors([SampleInput("IN", datatype, (100,))])
    values = tensor.to_numpy().tolist()
    if datatype == "BYTES":
        assert set(values) == {b"sample"}
    elif datatype == "BF16":
        assert set(values) == {0, 0x3F80}
    elif datatype.startswith("FP"):
        assert min(values) >= 0
        assert max(values) <= 1
        assert len(set(values)) > 10
    elif datatype == "UINT8":
        assert max(values) > 100
    else:
        assert set(values) == {0, 1}


def test_equal_arguments_give_equal_values() -> None:
    rows = [SampleInput("A", "FP32", (4,)), SampleInput("B", "INT64", (4,))]
    first, again, other = (
        [bytes(tensor.data) for tensor in sample_tensors(rows, seed=seed)]  # type: ignore[arg-type]
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_batches_and_shapes_can_be_chosen() -> None:
    rows = [SampleInput("A", "FP32", (-1, -1, 3), batches=True), SampleInput("B", "FP32", (-1,))]
    tensors = sample_tensors(rows, 4, {"A": [7, 3]}, variable_size=5)
    assert [list(tensor.shape) for tensor in tensors] == [[4, 7, 3], [5]]


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ({"A": [7]}, "the shape [7] does not fit input 'A', whose shape without the batch is [-1, 3]"),
        ({"A": [7, 4]}, "the shape [7, 4] does not fit"),
        ({"A": [-2, 3]}, "the shape [-2, 3] does not fit"),
        ({"C": [7, 4]}, "the model has no input 'C', its inputs are: A"),
        ({"A": [2**26, 3]}, "name smaller shapes"),
    ],
)
def test_shapes_that_cannot_be_made_are_refused(shapes: dict[str, list[int]], text: str) -> None:
    with pytest.raises(WeirError) as raised:
        sample_tensors([SampleInput("A", "FP32", (-1, -1, 3), batches=True)], 1, shapes)
    assert raised.value.code is ErrorCode.INVALID_ARG
    assert text in raised.value.message


@pytest.mark.parametrize(("shapes", "batches"), [([[-1, 3], [-1]], True), ([[-1, 3], [3]], False), ([[]], False)])
def test_metadata_is_read(shapes: list[list[int]], batches: bool) -> None:
    rows = [{"name": f"IN{place}", "datatype": "INT32", "shape": shape} for place, shape in enumerate(shapes)]
    found = inputs_of_metadata({"inputs": rows})
    assert found == [SampleInput(f"IN{place}", "INT32", tuple(shape), batches) for place, shape in enumerate(shapes)]


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({}, "no inputs"),
        ({"inputs": [{"name": "A"}]}, "no inputs with name, datatype and shape"),
        ({"inputs": [{"name": "A", "datatype": "FP99", "shape": [1]}]}, "input 'A' has the datatype 'FP99'"),
    ],
)
def test_other_documents_are_refused(metadata: dict[str, Any], text: str) -> None:
    with pytest.raises(WeirError, match=text):
        inputs_of_metadata(metadata)


def test_large_samples_are_binary() -> None:
    for count in (MAX_JSON_ELEMENTS, MAX_JSON_ELEMENTS + 1):
        body, header_length = sample_body(sample_tensors([SampleInput("A", "INT8", (count,))]))
        assert (header_length is None) == (count == MAX_JSON_ELEMENTS)
        assert parse_infer_request("m", "", body, header_length).inputs[0].size_bytes == count


@pytest.mark.parametrize("datatype", ["FP32", "FP16"])
def test_sequences_begin_and_end(datatype: str) -> None:
    body, header_length = sample_body(sample_tensors([SampleInput("A", datatype, (1,))]), is_sequence=True)
    request = parse_infer_request("m", "", body, header_length)
    assert (request.correlation_id, request.sequence_flags) == (1, SEQUENCE_START | SEQUENCE_END)
