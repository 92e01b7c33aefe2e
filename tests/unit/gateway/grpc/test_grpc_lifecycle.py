"""Calls that are given up, and a gRPC front door that starts and stops."""

import grpc
import numpy as np
import pytest
from grpc_door import TIMEOUT_S, Door, Loop, failure_of, raw_request, tensor, wait_until
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from gateway.grpc.options import GrpcOptions
from gateway.grpc.server import GrpcServer
from gateway.settings import GatewaySettings

# Cancellation


def test_a_cancelled_call_abandons_its_request(door: Door) -> None:
    call = door.stub.ModelInfer.future(raw_request("silent", id="given up"))
    wait_until(lambda: door.inference.requests)
    call.cancel()
    wait_until(lambda: door.inference.abandoned)
    assert [request.id for request in door.inference.abandoned] == ["given up"]
    door.loop.call(door.inference.held[0])  # a late answer disturbs nobody
    assert door.client.is_server_live()


def test_a_deadline_that_passes_abandons_the_request(door: Door) -> None:
    inputs = [tensor("IN", np.zeros((1, 2), np.float32), "FP32")]
    with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
        door.client.infer("silent", inputs, request_id="late", client_timeout=0.1)
    wait_until(lambda: door.inference.abandoned)
    assert [request.id for request in door.inference.abandoned] == ["late"]


def test_a_lost_connection_abandons_all_its_requests(door: Door) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{door.port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        calls = [stub.ModelInfer.future(raw_request("silent", id=str(i))) for i in range(10)]
        wait_until(lambda: len(door.inference.requests) == len(calls))
    wait_until(lambda: len(door.inference.abandoned) == len(calls))
    assert {request.id for request in door.inference.abandoned} == {str(i) for i in range(10)}


# Start and stop


def test_a_taken_port_is_an_error(door: Door) -> None:
    async def start_another() -> None:
        await GrpcServer(door.doors).start("127.0.0.1", door.port)

    with pytest.raises(OSError, match=f"gRPC can't listen on 127.0.0.1:{door.port}"):
        door.loop.run(start_another())


def test_a_stopping_server_answers_open_calls_and_refuses_new_ones(own_door: Door) -> None:
    open_call = own_door.stub.ModelInfer.future(raw_request("silent", id="open"))
    wait_until(lambda: own_door.inference.held)
    stopped = own_door.loop.spawn(own_door.server.stop(TIMEOUT_S))
    check_health = own_door.channel.unary_unary("/grpc.health.v1.Health/Check")
    wait_until(lambda: check_health(b"") == b"\x08\x02")
    refusal = (
        grpc.StatusCode.UNAVAILABLE,
        "GRPC server is shutting down and has stopped accepting new requests.",
    )
    assert failure_of(lambda: own_door.stub.ServerReady(service_pb2.ServerReadyRequest())) == refusal
    assert failure_of(lambda: own_door.stub.ModelInfer(raw_request("same_FP32"))) == refusal
    assert not stopped.done()
    own_door.loop.call(own_door.inference.held[0])
    assert open_call.result(TIMEOUT_S).id == "open"
    stopped.result(TIMEOUT_S)


def test_calls_still_open_after_the_grace_are_cancelled_and_abandoned(own_door: Door) -> None:
    open_call = own_door.stub.ModelInfer.future(raw_request("silent", id="open"))
    wait_until(lambda: own_door.inference.held)
    own_door.loop.run(own_door.server.stop(0.05))
    assert open_call.exception(TIMEOUT_S) is not None
    wait_until(lambda: own_door.inference.abandoned)
    assert [request.id for request in own_door.inference.abandoned] == ["open"]


def test_options_reach_the_connections_in_seconds() -> None:
    plain = GrpcOptions().http2()
    assert (plain.keepalive_time_s, plain.keepalive_timeout_s, plain.max_age_s) == (7200, 20, 0)
    aged = GrpcOptions(max_connection_age=5000, max_connection_age_grace=100).http2()
    assert (aged.max_age_s, aged.max_age_grace_s) == (5, 0.1)


def test_a_gateways_settings_are_the_options_of_its_grpc_door() -> None:
    assert GrpcOptions.of(GatewaySettings(nats_url="")) == GrpcOptions()
    settings = GatewaySettings(
        nats_url="",
        reuse_grpc_port=True,
        grpc_use_ssl=True,
        grpc_server_cert="cert",
        grpc_keepalive_time=5,
        grpc_http2_max_ping_strikes=7,
        grpc_max_connection_age_grace=9,
        grpc_infer_response_compression_level="high",
    )
    options = GrpcOptions.of(settings)
    assert (options.reuse_port, options.use_ssl, options.server_cert) == (True, True, "cert")
    assert (options.keepalive_time, options.http2_max_ping_strikes, options.max_connection_age_grace) == (5, 7, 9)
    assert options.compression_level == 9


def test_two_servers_may_share_a_port_if_both_want_to(grpc_loop: Loop) -> None:
    first = Door(grpc_loop, GrpcOptions(reuse_port=True))

    async def start_another() -> GrpcServer:
        another = GrpcServer(first.doors, GrpcOptions(reuse_port=True))
        await another.start("127.0.0.1", first.port)
        return another

    another = grpc_loop.run(start_another())
    grpc_loop.run(another.stop(0))
    first.close()
