"""A stock tritonclient against the gRPC frontend: what it serves."""

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from tests.support.gateway.grpc_frontend import TIMEOUT_S, GrpcFrontend, failure_of, raw_request, tensor
from tests.support.gateway.grpc_streams import TYPED
from weir.schemas.core.tensors import DATATYPES

# Health and metadata


def test_liveness_and_readiness(frontend: GrpcFrontend) -> None:
    assert frontend.client.is_server_live()
    assert frontend.client.is_server_ready()
    frontend.catalog.ready = False
    assert frontend.client.is_server_live()
    assert not frontend.client.is_server_ready()


def test_readiness_of_an_unknown_model_is_false(frontend: GrpcFrontend) -> None:
    assert frontend.client.is_model_ready("add_sub")
    assert frontend.client.is_model_ready("add_sub", "2")
    assert not frontend.client.is_model_ready("add_sub", "9")
    assert not frontend.client.is_model_ready("unknown")


def test_the_standard_health_check_follows_readiness(frontend: GrpcFrontend) -> None:
    check = frontend.channel.unary_unary("/grpc.health.v1.Health/Check")
    assert check(b"") == b"\x08\x01"
    frontend.catalog.ready = False
    assert check(b"\x0a\x03any") == b"\x08\x02"


def test_server_metadata(frontend: GrpcFrontend) -> None:
    metadata = frontend.client.get_server_metadata()
    assert metadata.name == "test-server"
    assert metadata.version
    assert "binary_tensor_data" in metadata.extensions


def test_model_metadata(frontend: GrpcFrontend) -> None:
    metadata = frontend.client.get_model_metadata("add_sub", as_json=True)
    assert metadata["versions"] == ["1", "2"]
    assert metadata["platform"] == "python"
    assert metadata["inputs"] == [{"name": n, "datatype": "FP32", "shape": ["-1", "-1"]} for n in ("A", "B")]
    assert frontend.client.get_model_metadata("add_sub", "2").versions == ["2"]


def test_model_config(frontend: GrpcFrontend) -> None:
    config = frontend.client.get_model_config("add_sub").config
    assert (config.name, config.backend, config.max_batch_size) == ("add_sub", "python", 8)
    assert [output.name for output in config.output] == ["SUM", "DIFFERENCE"]


@pytest.mark.parametrize("method", ["get_model_metadata", "get_model_config"])
def test_an_unknown_model_is_not_found(frontend: GrpcFrontend, method: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        getattr(frontend.client, method)("unknown")
    assert caught.value.status() == "StatusCode.NOT_FOUND"
    assert caught.value.message() == "Request for unknown model: 'unknown' is not found"


def test_methods_that_are_not_served_are_unimplemented(frontend: GrpcFrontend) -> None:
    unknown = frontend.channel.unary_unary("/inference.GRPCInferenceService/NoSuchMethod")
    assert failure_of(lambda: unknown(b""))[0] is grpc.StatusCode.UNIMPLEMENTED


# Inference


def test_a_response_names_request_and_version(frontend: GrpcFrontend) -> None:
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.full((2, 3), 10, np.float32)
    inputs = [tensor("A", a, "FP32"), tensor("B", b, "FP32")]
    result = frontend.client.infer("add_sub", inputs, request_id="r1", model_version="1", parameters={"k": "v"})
    np.testing.assert_array_equal(result.as_numpy("SUM"), a + b)
    np.testing.assert_array_equal(result.as_numpy("DIFFERENCE"), a - b)
    response = result.get_response()
    assert (response.id, response.model_name, response.model_version) == ("r1", "add_sub", "1")
    assert response.parameters["k"].string_param == "v"


def test_only_requested_outputs_are_returned(frontend: GrpcFrontend) -> None:
    inputs = [tensor(n, np.ones((1, 2), np.float32), "FP32") for n in "AB"]
    result = frontend.client.infer("add_sub", inputs, outputs=[triton.InferRequestedOutput("DIFFERENCE")])
    assert result.as_numpy("SUM") is None
    np.testing.assert_array_equal(result.as_numpy("DIFFERENCE"), [[0, 0]])


@pytest.mark.parametrize("datatype", TYPED)
def test_raw_and_typed_contents_mean_the_same(frontend: GrpcFrontend, datatype: str) -> None:
    field, values = TYPED[datatype]
    array = np.array([values], DATATYPES[datatype].numpy)
    raw = frontend.client.infer(f"same_{datatype}", [tensor("IN", array, datatype)])
    np.testing.assert_array_equal(raw.as_numpy("OUT"), array)
    typed = service_pb2.ModelInferRequest(
        model_name=f"same_{datatype}",
        inputs=[{"name": "IN", "datatype": datatype, "shape": [1, 3], "contents": {field: values}}],
    )
    assert frontend.stub.ModelInfer(typed).raw_output_contents == raw.get_response().raw_output_contents


@pytest.mark.parametrize("datatype,dtype", [("FP16", np.float16), ("BF16", ml_dtypes.bfloat16)])
def test_half_precision_travels_raw(frontend: GrpcFrontend, datatype: str, dtype: type) -> None:
    array = np.array([[0.5, -2.0, 1024.0]], dtype)
    result = frontend.client.infer(f"same_{datatype}", [tensor("IN", array, datatype)])
    np.testing.assert_array_equal(result.as_numpy("OUT"), array)


def test_classification(frontend: GrpcFrontend) -> None:
    array = np.array([[0.5, 2, 1]], np.float32)
    wanted = [triton.InferRequestedOutput("OUT", class_count=2)]
    result = frontend.client.infer("same_FP32", [tensor("IN", array, "FP32")], outputs=wanted)
    assert result.as_numpy("OUT").tolist() == [[b"2.000000:1:dog", b"1.000000:2:cow"]]


def test_messages_larger_than_grpcs_own_default_pass_both_ways(frontend: GrpcFrontend) -> None:
    array = np.arange(1_200_000, dtype=np.float32).reshape(1, -1)
    result = frontend.client.infer("same_FP32", [tensor("IN", array, "FP32")])
    np.testing.assert_array_equal(result.as_numpy("OUT"), array)


def test_concurrent_requests_get_their_own_responses(frontend: GrpcFrontend) -> None:
    calls = [
        frontend.stub.ModelInfer.future(
            raw_request("same_FP32", id=str(i), raw_input_contents=[np.full(2, i, np.float32).tobytes()])
        )
        for i in range(200)
    ]
    for i, call in enumerate(calls):
        response = call.result(TIMEOUT_S)
        assert response.id == str(i)
        assert np.frombuffer(response.raw_output_contents[0], np.float32).tolist() == [i, i]


def test_reserved_parameters_and_the_trace_context_reach_the_request(frontend: GrpcFrontend) -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    frontend.client.infer(
        "same_FP32",
        [tensor("IN", np.zeros((1, 2), np.float32), "FP32")],
        sequence_id=9,
        sequence_start=True,
        priority=3,
        timeout=1000,
        headers={"traceparent": traceparent},
    )
    request = frontend.inference.requests[-1]
    assert (request.correlation_id, request.priority, request.timeout_us) == (9, 3, 1000)
    assert request.traceparent == traceparent
