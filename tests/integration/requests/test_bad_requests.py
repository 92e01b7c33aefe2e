"""Invalid requests: each gets Triton's status and text, and the next valid request is answered as usual."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import grpc as grpcio
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.clients.stock import Answer, RawConnection, post
from tests.support.servers.weir_server import Server

PATH = "/v2/models/add_sub/infer"
ROW = np.array([1, 2, 3, 4], np.int32)


def inputs(**changes: Any) -> list[dict[str, Any]]:
    """The two inputs of add_sub as JSON; `changes` go to the first."""
    rows = [{"name": name, "shape": [1, 4], "datatype": "INT32", "data": ROW.tolist()} for name in ("A", "B")]
    rows[0] |= changes
    return rows


def body(rows: list[dict[str, Any]] | None = None, **more: Any) -> bytes:
    return json.dumps({"inputs": inputs() if rows is None else rows, **more}).encode()


def binary(rows: list[dict[str, Any]], content: bytes, length: int | str | None = None) -> tuple[bytes, str]:
    """(body, its header-length line) of a request whose inputs are binary."""
    text = json.dumps({"inputs": rows}).encode()
    return text + content, f"Inference-Header-Content-Length: {len(text) if length is None else length}"


def binary_inputs(*sizes: int) -> list[dict[str, Any]]:
    return [
        {"name": name, "shape": [1, 4], "datatype": "INT32", "parameters": {"binary_data_size": size}}
        for name, size in zip("AB", sizes, strict=True)
    ]


def is_right(answer: Answer | None) -> bool:
    if answer is None or answer.status != 200:
        return False
    return answer.document["outputs"][0]["data"] == [2, 4, 6, 8]


@pytest.fixture
def refused(server: Server) -> Iterator[Callable[[bytes], Answer]]:
    """Sends a bad request and returns its answer; the same connection and a new one then serve a good request."""

    def ask(request: bytes) -> Answer:
        with RawConnection(server.port) as connection:
            answer = connection.ask(request)
            assert answer is not None
            assert answer.headers["content-type"] == "application/json"
            assert is_right(connection.ask(post(PATH, body())))
        with RawConnection(server.port) as connection:
            assert is_right(connection.ask(post(PATH, body())))
        return answer

    yield ask
    assert server.in_flight() == 0


BAD_BODIES: dict[str, tuple[bytes, int, str]] = {
    "too few inputs": (
        body(inputs()[:1]),
        400,
        "expected 2 inputs but got 1 inputs for model 'add_sub'. Got input(s) ['A'], "
        "but missing required input(s) ['B']. Please provide all required input(s).",
    ),
    "wrong name": (body(inputs(name="C")), 400, "unexpected inference input 'C' for model 'add_sub'"),
    "input twice": (body(inputs(name="B")), 400, "input 'B' already exists in request"),
    "wrong dtype": (
        body(inputs(datatype="FP32")),
        400,
        "inference input 'A' data-type is 'FP32', but model 'add_sub' expects 'INT32'",
    ),
    "no dtype at all": (body(inputs(datatype="INT33")), 400, "invalid datatype for input A"),
    "wrong shape": (
        body(inputs(shape=[1, 2], data=[1, 2])),
        400,
        "unexpected shape for input 'A' for model 'add_sub'. Expected [-1,4], got [1,2]. NOTE: Setting a non-zero "
        "max_batch_size in the model config requires a batch dimension to be prepended to each input shape.",
    ),
    "no batch dimension": (body(inputs(shape=[4])), 400, "batch size does not match other inputs for 'add_sub'"),
    "no shape": (
        body(inputs(shape=[], data=[1])),
        400,
        "input 'A' has no shape but model requires batch dimension for 'add_sub'",
    ),
    "negative dim": (body(inputs(shape=[-1, 4])), 500, "Unable to parse 'shape'"),
    "batch over the limit": (
        body([{**row, "shape": [9, 4], "data": ROW.tolist() * 9} for row in inputs()]),
        400,
        "inference request batch-size must be <= 8 for 'add_sub'",
    ),
    "too much data": (
        body(inputs(data=[1, 2, 3, 4, 5])),
        500,
        "Unable to parse 'data': Shape does not match true shape of 'data' field",
    ),
    "too little data": (body(inputs(data=[1])), 500, "Shape does not match true shape of 'data' field"),
    "wrong type of data": (body(inputs(data=["a", "b", "c", "d"])), 500, "Unable to parse 'data'"),
    "no data": (
        body([{"name": "A", "shape": [1, 4], "datatype": "INT32"}]),
        400,
        "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
        "'shared_memory_region' in 'parameters'. But no field is set",
    ),
    "unknown output": (body(outputs=[{"name": "X"}]), 400, "unexpected inference output 'X' for model 'add_sub'"),
    "output twice": (body(outputs=[{"name": "SUM"}, {"name": "SUM"}]), 400, "output 'SUM' already exists in request"),
    "reserved parameter": (
        body(parameters={"triton_x": 1}),
        400,
        "parameter keys starting with 'triton_' are reserved",
    ),
    "list parameter": (body(parameters={"x": [1]}), 400, "parameter 'x' has invalid type"),
    "id of another type": (body(id=7), 500, "Unable to parse 'id'"),
    "not JSON": (b"{'inputs': 1}", 500, "failed to parse the request JSON buffer"),
    "half a document": (body()[:-20], 500, "failed to parse the request JSON buffer"),
    "no document": (b"", 400, "Raw request must only have 1 input"),
    "a number": (b"7", 500, "'inputs'"),
    "no inputs": (b"{}", 500, "attempt to access non-existing object member 'inputs'"),
    "not UTF-8": (b'{"inputs": [], "id": "\xff"}', 500, "failed to parse the request JSON buffer"),
    "deep": (b'{"inputs":' + b"[" * 5000 + b"]" * 5000 + b"}", 500, ""),
    "deep data": (
        body(inputs(data=0)).replace(b'"data": 0', b'"data":' + b"[" * 101 + b"]" * 101),
        500,
        "nesting depth",
    ),
}


@pytest.mark.parametrize("case", BAD_BODIES)
def test_bad_body(refused: Callable[[bytes], Answer], case: str) -> None:
    given, status, text = BAD_BODIES[case]
    answer = refused(post(PATH, given))
    assert answer.status == status
    assert text in answer.error


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/v2/models/nowhere/infer", 404, "Request for unknown model: 'nowhere' is not found"),
        ("/v2/models/add_sub/versions/9/infer", 404, "Request for unknown model: 'add_sub' version 9 is not found"),
        ("/v2/models/add_sub/versions/x/infer", 404, "Not Found"),
        ("/v2/models/%2e%2e%2f/infer", 404, "is not found"),
        ("/v2/models/a%00b/infer", 404, "is not found"),
        (f"/v2/models/{'m' * 10_000}/infer", 404, "is not found"),
    ],
)
def test_bad_path(refused: Callable[[bytes], Answer], path: str, status: int, text: str) -> None:
    answer = refused(post(path, body()))
    assert answer.status == status
    assert text in answer.error


CONTENT = ROW.tobytes() * 2

BAD_BINARIES: dict[str, tuple[tuple[bytes, str], str]] = {
    "too short": (
        binary(binary_inputs(16, 16), CONTENT[:-4]),
        "unexpected size for input 'B', expecting 4 additional bytes for model 'add_sub'",
    ),
    "too long": (
        binary(binary_inputs(16, 16), CONTENT + b"x"),
        "unexpected additional input data for model 'add_sub'",
    ),
    "wrong byte count": (
        binary(binary_inputs(12, 16), CONTENT[:28]),
        "input byte size mismatch for input 'A' for model 'add_sub'. Expected 16, got 12",
    ),
    "length past the end": (
        binary(binary_inputs(16, 16), CONTENT, 9999),
        "inference header size should be in range (0, ",
    ),
    "negative length": (binary(binary_inputs(16, 16), CONTENT, -1), "inference header size should be in range (0, "),
    "length that is no number": (
        binary(binary_inputs(16, 16), CONTENT, "ten"),
        "Unable to parse Inference-Header-Content-Length, got: ten",
    ),
    "length of zero": (binary(binary_inputs(16, 16), CONTENT, 0), "Raw request must only have 1 input"),
}


@pytest.mark.parametrize("case", BAD_BINARIES)
def test_bad_binary(refused: Callable[[bytes], Answer], case: str) -> None:
    (given, header), text = BAD_BINARIES[case]
    answer = refused(post(PATH, given, header))
    assert answer.status == 400
    assert text in answer.error


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\x03\0\0\0abc", "expected 2 string elements for inference input 'IN' for model 'identity_BYTES', got 1"),
        (b"\0\0\0\0" * 3, "unexpected number of string elements 3 for inference input 'IN'"),
        (b"\0\0\0\0\0\0", "incomplete string length indicator for inference input 'IN'"),
        (b"\0\0\0\0\xff\xff\xff\x7fabc", "incomplete string data for inference input 'IN'"),
    ],
)
def test_bad_strings(refused: Callable[[bytes], Answer], content: bytes, text: str) -> None:
    row = {"name": "IN", "shape": [1, 2], "datatype": "BYTES", "parameters": {"binary_data_size": len(content)}}
    given, header = binary([row], content)
    answer = refused(post("/v2/models/identity_BYTES/infer", given, header))
    assert answer.status == 400
    assert text in answer.error


def test_strings_that_are_not_utf8_are_named(refused: Callable[[bytes], Answer]) -> None:
    content = b"\x01\0\0\0\xff"
    row = {"name": "IN", "shape": [1, 1], "datatype": "BYTES", "parameters": {"binary_data_size": len(content)}}
    given, header = binary([row], content)
    answer = refused(post("/v2/models/identity_BYTES/infer", given, header))
    assert (answer.status, answer.error) == (400, "input 'IN' holds a string that is not UTF-8")


def test_large_bad_strings_in_shared_memory_are_refused(refused: Callable[[bytes], Answer]) -> None:
    content = b"\xff\xff\xff\x7f" + b"x" * 200_000
    row = {"name": "IN", "shape": [1, 1], "datatype": "BYTES", "parameters": {"binary_data_size": len(content)}}
    given, header = binary([row], content)
    answer = refused(post("/v2/models/identity_BYTES/infer", given, header))
    assert answer.status in (400, 500)
    assert "'IN'" in answer.error


def test_a_body_in_a_coding_that_is_not_known(refused: Callable[[bytes], Answer]) -> None:
    answer = refused(post(PATH, body(), "Content-Encoding: br"))
    assert (answer.status, answer.error) == (501, "Unsupported compression type")
    assert answer.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize("stated", [True, False], ids=["content-length", "chunked"])
def test_a_body_over_the_limit(server: Server, stated: bool) -> None:
    limit = 64 << 20
    with RawConnection(server.port) as connection:
        if stated:
            connection.send(post(PATH, b"", length=limit + 1))
        else:
            connection.send(b"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % PATH.encode())
            try:
                for _ in range(65):
                    connection.send(b"%x\r\n%b\r\n" % (1 << 20, bytes(1 << 20)))
            except (BrokenPipeError, ConnectionResetError):
                pass  # it was told enough
        answer = connection.answer()
        if answer is not None:  # a reset may have overtaken it
            assert answer.status == 400
            assert "exceeds the maximum allowed input size of 67108864 bytes" in answer.error
        assert answer is not None or not stated
        assert connection.is_closed()
    with RawConnection(server.port) as connection:
        assert is_right(connection.ask(post(PATH, body())))
    assert server.in_flight() == 0


@pytest.mark.parametrize("length", [1_000, 1_000_000], ids=["small", "large"])
def test_a_truncated_body(server: Server, length: int) -> None:
    header = "Inference-Header-Content-Length: 100"
    with RawConnection(server.port) as connection:
        connection.send(post(PATH, b"{" * (length // 2), header, length=length))
    with RawConnection(server.port) as connection:
        assert is_right(connection.ask(post(PATH, body())))
    assert server.in_flight() == 0


# gRPC


def message(**changes: Any) -> service_pb2.ModelInferRequest:
    fields: dict[str, Any] = {
        "model_name": "add_sub",
        "inputs": [{"name": name, "datatype": "INT32", "shape": [1, 4]} for name in "AB"],
        "raw_input_contents": [ROW.tobytes()] * 2,
    }
    return service_pb2.ModelInferRequest(**{**fields, **changes})


def first_input(**changes: Any) -> list[dict[str, Any]]:
    first, second = ({"name": name, "datatype": "INT32", "shape": [1, 4]} for name in "AB")
    return [{**first, **changes}, second]


BAD_MESSAGES: dict[str, tuple[service_pb2.ModelInferRequest, str, str]] = {
    "unknown model": (message(model_name="nowhere"), "NOT_FOUND", "unknown model: 'nowhere' is not found"),
    "unknown version": (message(model_version="9"), "NOT_FOUND", "'add_sub' version 9 is not found"),
    "version that is no number": (
        message(model_version="x"),
        "INVALID_ARGUMENT",
        "failed to get model version from specified version string 'x'",
    ),
    "wrong name": (message(inputs=first_input(name="C")), "INVALID_ARGUMENT", "unexpected inference input 'C'"),
    "wrong dtype": (message(inputs=first_input(datatype="INT64")), "INVALID_ARGUMENT", "data-type is 'INT64'"),
    "wrong shape": (message(inputs=first_input(shape=[1, 3])), "INVALID_ARGUMENT", "Expected [-1,4], got [1,3]"),
    "negative dim": (
        message(inputs=first_input(shape=[1, -4])),
        "INVALID_ARGUMENT",
        "All input dimensions should be specified for input 'A' for model 'add_sub', got [1,-4]",
    ),
    "wrong byte count": (
        message(raw_input_contents=[ROW.tobytes()[:-1], ROW.tobytes()]),
        "INVALID_ARGUMENT",
        "input byte size mismatch for input 'A' for model 'add_sub'. Expected 16, got 15",
    ),
    "too few raw contents": (message(raw_input_contents=[ROW.tobytes()]), "INVALID_ARGUMENT", ""),
    "no contents": (message(raw_input_contents=[]), "INVALID_ARGUMENT", ""),
    "raw and typed contents": (
        message(inputs=first_input(contents={"int_contents": [1, 2, 3, 4]})),
        "INVALID_ARGUMENT",
        "",
    ),
    "batch over the limit": (
        message(
            inputs=[{"name": name, "datatype": "INT32", "shape": [9, 4]} for name in "AB"],
            raw_input_contents=[ROW.tobytes() * 9] * 2,
        ),
        "INVALID_ARGUMENT",
        "inference request batch-size must be <= 8 for 'add_sub'",
    ),
    "unknown output": (message(outputs=[{"name": "X"}]), "INVALID_ARGUMENT", "unexpected inference output 'X'"),
}


@pytest.mark.parametrize("case", BAD_MESSAGES)
def test_bad_message(server: Server, case: str) -> None:
    given, code, text = BAD_MESSAGES[case]
    with grpcio.insecure_channel(server.grpc_place) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpcio.RpcError) as refusal:
            stub.ModelInfer(given, timeout=10)
        assert refusal.value.code().name == code
        assert text in refusal.value.details()
        good = stub.ModelInfer(message(), timeout=10)
    assert np.frombuffer(good.raw_output_contents[0], np.int32).tolist() == [2, 4, 6, 8]
    assert server.in_flight() == 0


@pytest.mark.parametrize("junk", [b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x0f", b"\x3a\x05ab"])
def test_bytes_that_are_no_message(server: Server, junk: bytes) -> None:
    with grpcio.insecure_channel(server.grpc_place) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpcio.RpcError) as refusal:
            infer(junk, timeout=10)
        assert refusal.value.code().name == "INTERNAL"
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ModelInfer(message(), timeout=10).model_name == "add_sub"


def test_a_method_that_is_not_there(server: Server) -> None:
    with grpcio.insecure_channel(server.grpc_place) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/Nothing")
        with pytest.raises(grpcio.RpcError) as refusal:
            call(b"", timeout=10)
        assert refusal.value.code().name == "UNIMPLEMENTED"
