"""What is read or written in two steps, one of them in a helper process, is what is read or written at once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgpack
import numpy as np
import orjson
import pytest

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError
from weir.schemas.core.request_limits import DEFAULT_LIMITS
from weir.schemas.core.requests import InferRequest, InferResponse, RequestedOutput
from weir.schemas.core.tensors import RegionRef, Tensor, pack_bytes
from weir.schemas.kserve import offloaded
from weir.schemas.kserve.generate import build_generate_response, parse_generate_request
from weir.schemas.kserve.json_tensors import json_data, json_pieces
from weir.schemas.kserve.msgpack_documents import build_msgpack_response, parse_msgpack_request
from weir.schemas.kserve.offloaded import BodyPart, Job
from weir.schemas.kserve.request import parse_infer_request, read_document
from weir.schemas.kserve.response import MAX_WRITTEN_BYTES, build_infer_response

LONG = MAX_WRITTEN_BYTES // 4 + 1000


def in_helper(job: Job) -> list[memoryview]:
    """What `weir.runtime.offload` does, without a process."""
    run = getattr(offloaded, job.operation.partition(":")[2])
    result: Iterable[BodyPart | Iterable[BodyPart]] = run([memoryview(bytes(part)) for part in job.parts])
    return [
        memoryview(bytes(part) if isinstance(part, (bytes, bytearray, memoryview)) else b"".join(map(bytes, part)))
        for part in result
    ]


def region(name: str, offset: int, size: int) -> RegionRef:
    return RegionRef(f"real {name}", 7, offset, size)


def facts(request: InferRequest) -> dict[str, Any]:
    """All of a request, in a form that can be compared."""
    found = {name: getattr(request, name) for name in InferRequest.__slots__ if name not in ("inputs", "outputs")}
    contents = (tensor.data if isinstance(tensor.data, tuple) else bytes(tensor.data) for tensor in request.inputs)
    rows = ((tensor.name, tensor.datatype, list(tensor.shape)) for tensor in request.inputs)
    outputs = [{name: getattr(output, name) for name in RequestedOutput.__slots__} for output in request.outputs]
    return {**found, "inputs": list(zip(rows, contents, strict=True)), "outputs": outputs}


def read_both_ways(body: bytes, header_length: int | None = None) -> tuple[Any, Any]:
    """The facts of a request, or its error: read at once, and in two steps."""

    def at_once() -> InferRequest:
        return parse_infer_request("m", "1", body, header_length, DEFAULT_LIMITS, region)

    def in_steps() -> InferRequest:
        length = len(body) if header_length is None else header_length
        content = memoryview(body)[length:]
        job = offloaded.json_job("m", "1", body[:length], len(content), DEFAULT_LIMITS)
        document = offloaded.outline_document(in_helper(job))
        return read_document("m", "1", document, content, DEFAULT_LIMITS, region)

    return outcome(at_once), outcome(in_steps)


def outcome(read: Any) -> Any:
    try:
        return facts(read())
    except WeirError as error:
        return error.code, error.message


def entry(name: str, datatype: str, shape: list[int], **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, **more}


IN_REGION = {"shared_memory_region": "r", "shared_memory_offset": 4, "shared_memory_byte_size": 8}
ALL_KINDS = {
    "id": "seven",
    "junk": [[1, 2], {"a": None}],
    "parameters": {"own": "x", "n": 2**63, "f": 1.5, "sequence_id": "s", "sequence_start": True, "priority": 3},
    "inputs": [
        entry("A", "INT32", [2, 2], data=[[1, 2], [3, 4]], parameters={"junk": {"deep": [1]}}, junk=1),
        entry("B", "FP64", [3], data=[1, 2.5, 1e300]),
        entry("C", "BYTES", [2], data=["ä", "\u0000"]),
        entry("D", "BOOL", [1], data=[True]),
        entry("E", "FP32", [2], parameters=IN_REGION),
        entry("F", "FP32", [2], parameters={"binary_data_size": 8}),
        entry("G", "INT8", [0], data=[]),
    ],
    "outputs": [
        {"name": "X", "parameters": {"binary_data": True, "junk": 1}},
        {"name": "Y", "parameters": {"classification": 2}},
        {"name": "Z", "parameters": IN_REGION},
    ],
}


def test_offloaded_requests_equal_direct_ones() -> None:
    text = orjson.dumps(ALL_KINDS)
    at_once, in_steps = read_both_ways(text + b"12345678", len(text))
    assert at_once == in_steps
    assert at_once["inputs"][4][1] == region("r", 4, 8)
    assert at_once["inputs"][5][1] == b"12345678"
    assert [output["region"] for output in at_once["outputs"]] == [None, None, region("r", 4, 8)]


def changed(**members: Any) -> bytes:
    return json.dumps({**ALL_KINDS, "inputs": [entry("A", "INT32", [1], data=[1])], **members}).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"inputs": [' + b"[" * 200 + b"]" * 200 + b"]}",
        changed(id=3),
        changed(parameters={str(i): i for i in range(65)}),
        changed(parameters={"triton_x": 1}),
        changed(inputs=[{}] * 257),
        changed(inputs=[entry("A", "INT32", [2], data=[1])]),
        changed(inputs=[entry("A", "INT32", [1], data=[1.5])]),
        changed(inputs=[entry("A", "FP16", [1], data=[1.5])]),
        changed(inputs=[entry("A", "INT32", [1], parameters={"binary_data_size": 4})]),
        changed(outputs=[{"name": "X"}, {"name": "X"}]),
        changed(outputs=[{}] * 257),
        b'{"inputs":[{"name":"A","datatype":"FP32","shape":[1],"data":[NaN]}]}',
    ],
)
def test_offloaded_requests_are_rejected_with_the_same_texts(body: bytes) -> None:
    at_once, in_steps = read_both_ways(body)
    assert repr(at_once) == repr(in_steps)


@pytest.mark.parametrize(
    "document",
    [
        {"inputs": [entry("A", "INT32", [2], data=b"12345678"), entry("B", "BYTES", [2], data=["a", b"\xff"])]},
        {"id": "x", "inputs": [entry("A", "INT32", [2], data=[[1], [2]], parameters=IN_REGION | {"x": 1})]},
        {"inputs": [entry("A", "INT32", [1], data=[None])]},
        [1],
    ],
)
def test_msgpack_requests_are_the_same(document: Any) -> None:
    body = msgpack.packb(document)

    def in_steps() -> InferRequest:
        job = offloaded.msgpack_job("m", "1", body, DEFAULT_LIMITS)
        outline = offloaded.outline_document(in_helper(job))
        return read_document("m", "1", outline, memoryview(b""), DEFAULT_LIMITS, region)

    assert outcome(lambda: parse_msgpack_request("m", "1", body, DEFAULT_LIMITS, region)) == outcome(in_steps)


@pytest.mark.parametrize("body", [b'{"text": ["a", "b"], "n": 3, "id": "x"}', b'{"text": [1]}', b"{"])
def test_generate_requests_are_the_same(body: bytes) -> None:
    declared = {"name": "text", "data_type": "TYPE_STRING", "dims": [-1]}
    config = ModelConfig.model_validate({"name": "m", "backend": "python", "max_batch_size": 2, "input": [declared]})

    def in_steps() -> InferRequest:
        parts = in_helper(offloaded.generate_job("m", "1", body, config, DEFAULT_LIMITS))
        return offloaded.outlined_request("m", "1", parts)

    assert outcome(lambda: parse_generate_request("m", "1", body, config)) == outcome(in_steps)


rng = np.random.default_rng(5)
OUTPUTS: Mapping[str, Tensor] = {
    "FP32": Tensor.from_numpy("FP32", rng.standard_normal(LONG).astype(np.float32), "FP32"),
    "FP64": Tensor.from_numpy("FP64", rng.standard_normal(LONG) * 10.0 ** rng.integers(-300, 300, LONG), "FP64"),
    "NAN": Tensor.from_numpy("NAN", np.array([1.5, np.nan, np.inf, -np.inf] * LONG, np.float32), "FP32"),
    "INT8": Tensor.from_numpy("INT8", rng.integers(-128, 127, 5 * LONG).astype(np.int8), "INT8"),
    "UINT64": Tensor.from_numpy("UINT64", rng.integers(0, 2**64 - 1, LONG, dtype=np.uint64), "UINT64"),
    "BOOL": Tensor.from_numpy("BOOL", rng.integers(0, 2, 5 * LONG).astype(bool), "BOOL"),
    "BYTES": Tensor("BYTES", "BYTES", [70_000], pack_bytes([b"", b'"', b"\xff", "ä".encode(), b"abc"] * 14_000)),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_json_in_pieces_is_the_same_json(name: str) -> None:
    tensor = OUTPUTS[name]
    assert isinstance(tensor.data, (bytes, memoryview))
    arguments = tensor.name, tensor.datatype, tensor.shape, tensor.data
    whole = json_data(*arguments)
    assert b"".join(json_pieces(*arguments)) == orjson.dumps(whole)


@pytest.mark.parametrize("datatype", ["INT32", "FP32", "BYTES"])
def test_empty_outputs_in_pieces(datatype: str) -> None:
    assert b"".join(json_pieces("OUT", datatype, [0], b"")) == b"[]"


@pytest.mark.parametrize(("datatype", "shape"), [("FP16", [2]), ("INT32", [3]), ("BYTES", [2])])
def test_outputs_that_can_not_be_json_in_pieces(datatype: str, shape: list[int]) -> None:
    with pytest.raises(WeirError) as whole:
        json_data("OUT", datatype, shape, b"\0\0\0\0")
    with pytest.raises(WeirError) as pieces:
        json_pieces("OUT", datatype, shape, b"\0\0\0\0")
    assert (pieces.value.code, pieces.value.message) == (whole.value.code, whole.value.message)


def labels(_name: str) -> list[str]:
    return ["ant", "bee"]


def answered(request: InferRequest, response: InferResponse, is_msgpack: bool = False) -> Any:
    """The answer by way of a helper process, which must be needed."""
    build: Any = build_msgpack_response if is_msgpack else build_infer_response
    job = offloaded.output_job(request, response, labels, False, is_msgpack)
    assert job is not None
    written = offloaded.written_outputs(in_helper(job))
    return build(request, response, labels, False, written)


def small(name: str) -> Tensor:
    return Tensor(name, "INT32", [2], b"\1\0\0\0\2\0\0\0")


def response_of(*tensors: Tensor) -> InferResponse:
    return InferResponse("m", "1", "id", [*tensors], {"p": 1})


def test_a_response_with_long_outputs_is_the_same() -> None:
    response = response_of(small("A"), OUTPUTS["FP32"], OUTPUTS["BYTES"], small("B"), OUTPUTS["INT8"], OUTPUTS["NAN"])
    wishes = [RequestedOutput(name) for name in ("A", "FP32", "BYTES", "B", "NAN")]
    wishes.append(RequestedOutput("INT8", binary=True))
    request = InferRequest("m", id="id", outputs=wishes)
    chunks, header_length = answered(request, response)
    assert len(chunks) > 2
    whole, whole_length = build_infer_response(request, response, labels, False)
    assert header_length == whole_length
    assert b"".join(chunks) == b"".join(whole)
    without_binary = InferRequest("m", outputs=[RequestedOutput("FP32")])
    chunks, header_length = answered(without_binary, response)
    assert header_length is None
    assert orjson.loads(b"".join(chunks))["outputs"][0]["shape"] == [LONG]


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("is_msgpack", [False, True])
def test_classes_of_long_outputs_are_the_same(binary: bool, is_msgpack: bool) -> None:
    request = InferRequest("m", outputs=[RequestedOutput("FP32", binary, class_count=3), RequestedOutput("A", True)])
    response = response_of(OUTPUTS["FP32"], small("A"))
    found = answered(request, response, is_msgpack)
    build: Any = build_msgpack_response if is_msgpack else build_infer_response
    whole = build(request, response, labels, False)
    if is_msgpack:
        assert b"".join(found) == b"".join(whole)
    else:
        assert (b"".join(found[0]), found[1]) == (b"".join(whole[0]), whole[1])


def test_generate_responses_are_the_same() -> None:
    response = response_of(OUTPUTS["BYTES"], small("A"))
    (text,) = in_helper(offloaded.generate_response_job(response))
    assert bytes(text) == build_generate_response(response)
