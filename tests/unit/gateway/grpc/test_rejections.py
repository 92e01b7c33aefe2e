"""A stock tritonclient against the gRPC frontend: rejections and failures."""

import grpc
import pytest
from tritonclient.grpc import service_pb2

from tests.support.gateway.grpc_frontend import GrpcFrontend, Loop, failure_of, raw_request
from weir.gateway.grpc.options import GrpcOptions
from weir.schemas.core.errors import ErrorCode, WeirError, invalid

REFUSALS = {
    "unknown model": (
        raw_request("unknown", parameters={"sequence_id": {"bool_param": True}}),
        grpc.StatusCode.NOT_FOUND,
        "Request for unknown model: 'unknown' is not found",
    ),
    "unknown version": (
        raw_request("same_FP32", model_version="7"),
        grpc.StatusCode.NOT_FOUND,
        "Request for unknown model: 'same_FP32' version 7 is not found",
    ),
    "decoupled": (
        raw_request("stream"),
        grpc.StatusCode.UNIMPLEMENTED,
        "ModelInfer RPC doesn't support models with decoupled transaction policy",
    ),
    "wrong parameter": (
        raw_request("same_FP32", parameters={"sequence_id": {"bool_param": True}}),
        grpc.StatusCode.INVALID_ARGUMENT,
        "invalid value type for 'sequence_id' parameter, expected int64_param or string_param.",
    ),
    "no data": (
        raw_request("same_FP32", raw_input_contents=[]),
        grpc.StatusCode.INVALID_ARGUMENT,
        "unable to find data for input tensor 'IN' for model 'same_FP32' in request.",
    ),
    "wrong datatype": (
        raw_request("same_INT32"),
        grpc.StatusCode.INVALID_ARGUMENT,
        "[request id: <id_unknown>] inference input 'IN' data-type is 'FP32', but model 'same_INT32' expects 'INT32'",
    ),
    "wrong size": (
        raw_request("same_FP32", id="r7", raw_input_contents=[b"\0" * 4]),
        grpc.StatusCode.INVALID_ARGUMENT,
        "[request id: r7] input byte size mismatch for input 'IN' for model 'same_FP32'. Expected 8, got 4",
    ),
    "missing input": (
        raw_request("add_sub", inputs=[{"name": "A", "datatype": "FP32", "shape": [1, 2]}]),
        grpc.StatusCode.INVALID_ARGUMENT,
        "[request id: <id_unknown>] expected 2 inputs but got 1 inputs for model 'add_sub'. Got input(s) ['A'], but "
        "missing required input(s) ['B']. Please provide all required input(s).",
    ),
    "shared memory": (
        raw_request(
            "same_FP32",
            outputs=[
                {
                    "name": "OUT",
                    "parameters": {
                        "shared_memory_region": {"string_param": "r"},
                        "shared_memory_byte_size": {"int64_param": 8},
                    },
                }
            ],
        ),
        grpc.StatusCode.NOT_FOUND,
        "Unable to find shared memory region: 'r'",
    ),
    "no classes of strings": (
        raw_request(
            "same_BYTES",
            inputs=[{"name": "IN", "datatype": "BYTES", "shape": [1, 2]}],
            outputs=[{"name": "OUT", "parameters": {"classification": {"int64_param": 1}}}],
        ),
        grpc.StatusCode.INVALID_ARGUMENT,
        "class result not available for output due to unsupported type 'BYTES'",
    ),
}


@pytest.mark.parametrize("request_,status,message", REFUSALS.values(), ids=REFUSALS)
def test_rejections(
    frontend: GrpcFrontend, request_: service_pb2.ModelInferRequest, status: grpc.StatusCode, message: str
) -> None:
    assert failure_of(lambda: frontend.stub.ModelInfer(request_)) == (status, message)
    assert frontend.client.is_server_live()


@pytest.mark.parametrize("method", ["ModelInfer", "ModelReady", "ModelConfig"])
def test_malformed_messages_are_rejected(frontend: GrpcFrontend, method: str) -> None:
    call = frontend.channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
    assert failure_of(lambda: call(b"\xff\xff\xff")) == (grpc.StatusCode.INTERNAL, "Unable to parse request")


@pytest.mark.parametrize("code", ErrorCode)
def test_a_models_error_comes_with_tritons_status(frontend: GrpcFrontend, code: ErrorCode) -> None:
    frontend.inference.failure = WeirError(code, "out of luck")
    status, message = failure_of(lambda: frontend.stub.ModelInfer(raw_request("failing")))
    assert (status.value[0], message) == (code.grpc_status, "out of luck")


@pytest.mark.parametrize("character", ["x", "ä", "\n"])
def test_a_long_error_keeps_its_start_and_its_end(frontend: GrpcFrontend, character: str) -> None:
    frontend.inference.failure = invalid("start" + character * 50_000 + "end")
    status, message = failure_of(lambda: frontend.stub.ModelInfer(raw_request("failing")))
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    assert message.startswith("start" + character)
    assert message.endswith(character + "end")


def test_an_unexpected_exception_reveals_nothing_to_the_client(
    frontend: GrpcFrontend, caplog: pytest.LogCaptureFixture
) -> None:
    frontend.inference.failure = RuntimeError("secret detail")
    result = failure_of(lambda: frontend.stub.ModelInfer(raw_request("failing")))
    assert result == (grpc.StatusCode.INTERNAL, "internal server error")
    assert "secret detail" in caplog.text


def test_a_message_above_the_limit_is_rejected(grpc_loop: Loop) -> None:
    frontend = GrpcFrontend(grpc_loop, GrpcOptions(max_receive_bytes=1000))
    try:
        request = raw_request("same_FP32", raw_input_contents=[b"\0" * 1000])
        assert failure_of(lambda: frontend.stub.ModelInfer(request))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    finally:
        frontend.close()
