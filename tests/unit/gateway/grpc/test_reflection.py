"""Server reflection, queried by grpcio-reflection's own client, and health checks."""

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

from tests.support.gateway.grpc_frontend import GrpcFrontend, failure_of


def test_services_and_their_messages_can_be_looked_up(frontend: GrpcFrontend) -> None:
    database = ProtoReflectionDescriptorDatabase(frontend.channel)
    assert set(database.get_services()) == {
        "inference.GRPCInferenceService",
        "weir.v1.TrafficService",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    service = DescriptorPool(database).FindServiceByName("inference.GRPCInferenceService")
    infer = service.methods_by_name["ModelStreamInfer"]
    assert (infer.input_type.full_name, infer.client_streaming, infer.server_streaming) == (
        "inference.ModelInferRequest",
        True,
        True,
    )


def test_many_requests_on_one_stream_are_answered_in_order(frontend: GrpcFrontend) -> None:
    ask = frontend.channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    symbols = ["inference.ModelInferRequest", "unknown.Thing"] * 50
    questions = [ServerReflectionRequest(file_containing_symbol=name).SerializeToString() for name in symbols]
    answers = [ServerReflectionResponse.FromString(answer) for answer in ask(iter(questions), timeout=10)]
    assert [answer.original_request.file_containing_symbol for answer in answers] == symbols
    assert {answer.error_response.error_code for answer in answers[1::2]} == {grpc.StatusCode.NOT_FOUND.value[0]}
    assert not any(answer.HasField("error_response") for answer in answers[::2])


def test_malformed_requests_end_the_stream(frontend: GrpcFrontend) -> None:
    ask = frontend.channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    result = failure_of(lambda: list(ask(iter([b"\xff\xff"]), timeout=10)))
    assert result == (grpc.StatusCode.INTERNAL, "Unable to parse request")


@pytest.mark.parametrize("method", ["/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/List"])
def test_other_health_checks_are_unimplemented_as_in_triton(frontend: GrpcFrontend, method: str) -> None:
    watch = frontend.channel.unary_stream(method)
    assert failure_of(lambda: list(watch(b"", timeout=10)))[0] is grpc.StatusCode.UNIMPLEMENTED
