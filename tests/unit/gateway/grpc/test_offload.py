"""A long gRPC request is the same whether a helper process or the gateway parses it."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from tritonclient.grpc import service_pb2

from weir.gateway.grpc import offload
from weir.gateway.grpc.codec import MAX_FIELDS, decode_request, decode_split, request_from_message, split_request
from weir.gateway.grpc.offload import LONG_BYTES, offloaded_message, read_job, read_request
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.request_limits import DEFAULT_LIMITS
from weir.schemas.core.requests import InferRequest, RequestedOutput
from weir.schemas.core.tensors import RegionRef

Message = service_pb2.ModelInferRequest
UNKNOWN_FIELD = b"\xfa\x01\x03abc"  # number 31


def region(name: str, offset: int, size: int) -> RegionRef:
    return RegionRef(f"real {name}", 7, offset, size)


def facts(request: InferRequest) -> dict[str, Any]:
    found = {name: getattr(request, name) for name in InferRequest.__slots__ if name not in ("inputs", "outputs")}
    contents = [tensor.data if isinstance(tensor.data, tuple) else bytes(tensor.data) for tensor in request.inputs]
    rows = [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in request.inputs]
    outputs = [{name: getattr(output, name) for name in RequestedOutput.__slots__} for output in request.outputs]
    return {**found, "rows": rows, "contents": contents, "outputs": outputs}


def read_both_ways(data: bytes) -> tuple[Any, Any]:
    """The fields of a request, or its error: parsed here, and in a helper process."""

    def at_once() -> InferRequest:
        return request_from_message(*decode_request(data), DEFAULT_LIMITS, region)

    def in_steps() -> InferRequest:
        split = split_request(data)
        with patch.object(offload, "LONG_BYTES", -1):
            job = read_job(split)
        assert job is not None
        parts = read_request([memoryview(part) for part in job.parts])
        return request_from_message(*offloaded_message(split, list(map(memoryview, parts))), DEFAULT_LIMITS, region)

    return outcome(at_once), outcome(in_steps)


def outcome(read: Any) -> Any:
    try:
        return facts(read())
    except WeirError as error:
        return error.code, error.message


def message(**fields: Any) -> Any:
    return Message(model_name="m", id="7", outputs=[{"name": "OUT"}], **fields)


def typed(name: str, datatype: str, shape: list[int], **contents: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "contents": contents}


def in_region(name: str) -> dict[str, Any]:
    parameters = {
        "shared_memory_region": {"string_param": "r"},
        "shared_memory_offset": {"int64_param": 4},
        "shared_memory_byte_size": {"int64_param": 8},
        "junk": {"string_param": "x" * 1000},
    }
    return {"name": name, "datatype": "FP32", "shape": [2], "parameters": parameters}


RAW = {"name": "R", "datatype": "INT32", "shape": [2]}


@pytest.mark.parametrize("more", [b"", UNKNOWN_FIELD], ids=["known fields", "an unknown field"])
@pytest.mark.parametrize(
    "request_message",
    [
        message(inputs=[typed("A", "INT8", [2], int_contents=[1, -1]), in_region("B"),
                        typed("C", "BYTES", [2], bytes_contents=[b"", b"\xff"]),
                        typed("D", "FP64", [1], fp64_contents=[1.5])],
                parameters={"own": {"int64_param": 3}, "sequence_id": {"string_param": "s"}}),
        message(inputs=[RAW, in_region("B"), RAW | {"name": "S"}], raw_input_contents=[b"12345678", b"abcdefgh"]),
        message(inputs=[typed("A", "INT32", [1], int_contents=[1]), RAW], raw_input_contents=[b"12345678"]),
        message(inputs=[RAW]),
        message(inputs=[RAW], raw_input_contents=[b"12345678"] * 2),
        message(inputs=[RAW, RAW], raw_input_contents=[b"12345678"] * 2),
        message(inputs=[typed("A", "INT32", [1])]),
        message(inputs=[RAW], raw_input_contents=[b"1"], parameters={str(i): {"int64_param": 1} for i in range(65)}),
    ],
)  # fmt: skip
def test_requests_and_rejections_are_the_same(request_message: Any, more: bytes) -> None:
    at_once, in_steps = read_both_ways(request_message.SerializeToString() + more)
    assert at_once == in_steps


def test_what_is_long() -> None:
    raw = message(inputs=[RAW], raw_input_contents=[bytes(4 * LONG_BYTES)])
    assert read_job(split_request(raw.SerializeToString())) is None
    ints = message(inputs=[typed("A", "INT32", [LONG_BYTES], int_contents=[1] * LONG_BYTES)])
    assert read_job(split_request(ints.SerializeToString())) is not None


def test_far_too_many_fields_are_rejected_before_they_are_parsed() -> None:
    data = message().SerializeToString() + b"\x2a\x00" * MAX_FIELDS
    with pytest.raises(WeirError) as caught:
        split_request(data)
    assert caught.value.code is ErrorCode.INVALID_ARG
    data = message().SerializeToString() + b"\x2a\x00" * 1000
    assert len(decode_split(split_request(data))[0].inputs) == 1000
