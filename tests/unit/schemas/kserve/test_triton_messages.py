"""Triton's messages are those of tritonclient, of any version of which a program may use beside them."""

from __future__ import annotations

import subprocess
import sys
from concurrent import futures
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceServicer, add_GRPCInferenceServiceServicer_to_server

from tests.support.wire.triton_description import installed_description
from weir.schemas.kserve.triton_messages import DESCRIPTION, SERVICE, messages, service_stub


def test_the_description_is_that_of_the_locked_tritonclient() -> None:
    assert DESCRIPTION.read_bytes() == installed_description()


def test_all_messages_are_there_and_read_what_tritonclient_writes() -> None:
    names = set(service_pb2.DESCRIPTOR.message_types_by_name)
    assert names == set(vars(messages))
    theirs = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[b"1"])
    theirs.parameters["a"].int64_param = 7
    ours = messages.ModelInferRequest.FromString(theirs.SerializeToString())
    assert (ours.model_name, ours.raw_input_contents, ours.parameters["a"].int64_param) == ("m", [b"1"], 7)
    assert not isinstance(ours, service_pb2.ModelInferRequest)


OTHER = """
from google.protobuf import descriptor_pb2, descriptor_pool
other = descriptor_pb2.FileDescriptorProto(name="grpc_service.proto", package="inference", syntax="proto3")
other.message_type.add(name="ModelInferRequest")
"""
ADD = "descriptor_pool.Default().Add(other)\n"
IMPORT = "import weir.schemas.kserve.triton_messages\n"


@pytest.mark.parametrize("order", [ADD + IMPORT, IMPORT + ADD])
def test_a_program_may_have_another_version_of_the_messages(order: str) -> None:
    ran = subprocess.run([sys.executable, "-c", OTHER + order], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


class Servicer(GRPCInferenceServiceServicer):
    """A Triton with one model."""

    def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=request.name == "m")

    def ModelStreamInfer(self, requests: Any, context: Any) -> Any:
        for request in requests:
            yield service_pb2.ModelStreamInferResponse(infer_response={"model_name": request.model_name})


def test_the_stub_calls_a_server_made_with_tritonclient() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    add_GRPCInferenceServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = service_stub(channel)
            assert set(vars(stub)) == {method.name for method in SERVICE.methods}
            assert stub.ModelReady(messages.ModelReadyRequest(name="m")).ready
            (reply,) = stub.ModelStreamInfer(iter([messages.ModelInferRequest(model_name="m")]))
            assert reply.infer_response.model_name == "m"
    finally:
        server.stop(None).wait()
