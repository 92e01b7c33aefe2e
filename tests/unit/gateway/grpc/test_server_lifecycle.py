"""Cancelled calls, and the start and stop of a gRPC frontend."""

import socket
import threading

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.support.gateway.grpc_frontend import TIMEOUT_S, GrpcFrontend, Loop, failure_of, raw_request, tensor
from tests.support.waiting import running, wait_until
from weir.gateway.grpc.options import GrpcOptions
from weir.gateway.grpc.server import GrpcServer
from weir.gateway.http2.frames import Flag, FrameType, frame_head
from weir.gateway.settings import GatewaySettings

# Cancellation


def test_a_cancelled_call_cancels_its_request(frontend: GrpcFrontend) -> None:
    call = frontend.stub.ModelInfer.future(raw_request("silent", id="given up"))
    wait_until(lambda: frontend.inference.requests)
    call.cancel()
    wait_until(lambda: frontend.inference.cancelled)
    assert [request.id for request in frontend.inference.cancelled] == ["given up"]
    frontend.loop.call(frontend.inference.held[0])  # a late response is dropped
    assert frontend.client.is_server_live()


def test_a_deadline_that_passes_cancels_the_request(frontend: GrpcFrontend) -> None:
    inputs = [tensor("IN", np.zeros((1, 2), np.float32), "FP32")]
    with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
        frontend.client.infer("silent", inputs, request_id="late", client_timeout=0.1)
    wait_until(lambda: frontend.inference.cancelled)
    assert [request.id for request in frontend.inference.cancelled] == ["late"]


def test_a_lost_connection_cancels_all_its_requests(frontend: GrpcFrontend) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{frontend.port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        calls = [stub.ModelInfer.future(raw_request("silent", id=str(i))) for i in range(10)]
        wait_until(lambda: len(frontend.inference.requests) == len(calls))
    wait_until(lambda: len(frontend.inference.cancelled) == len(calls))
    assert {request.id for request in frontend.inference.cancelled} == {str(i) for i in range(10)}


# Start and stop


def test_a_taken_port_is_an_error(frontend: GrpcFrontend) -> None:
    async def start_another() -> None:
        await GrpcServer(frontend.context).start("127.0.0.1", frontend.port)

    with pytest.raises(OSError, match=f"gRPC can't listen on 127.0.0.1:{frontend.port}"):
        frontend.loop.run(start_another())


def test_a_stopping_server_finishes_open_calls_and_rejects_new_ones(own_frontend: GrpcFrontend) -> None:
    open_call = own_frontend.stub.ModelInfer.future(raw_request("silent", id="open"))
    wait_until(lambda: own_frontend.inference.held)
    stopped = own_frontend.loop.spawn(own_frontend.server.stop(TIMEOUT_S))
    check_health = own_frontend.channel.unary_unary("/grpc.health.v1.Health/Check")
    wait_until(lambda: check_health(b"") == b"\x08\x02")
    refusal = (
        grpc.StatusCode.UNAVAILABLE,
        "GRPC server is shutting down and has stopped accepting new requests.",
    )
    assert failure_of(lambda: own_frontend.stub.ServerReady(service_pb2.ServerReadyRequest())) == refusal
    assert failure_of(lambda: own_frontend.stub.ModelInfer(raw_request("same_FP32"))) == refusal
    assert not stopped.done()
    own_frontend.loop.call(own_frontend.inference.held[0])
    assert open_call.result(TIMEOUT_S).id == "open"
    stopped.result(TIMEOUT_S)


def test_no_call_fails_when_a_server_leaves_its_clients_to_another(grpc_loop: Loop) -> None:
    """As when gateways are replaced one by one behind one address; here the kernel spreads the connections."""
    first = GrpcFrontend(grpc_loop, GrpcOptions(reuse_port=True))
    # One call takes long: so long as it runs, the server is there to be called.
    open_call = first.stub.ModelInfer.future(raw_request("silent", id="open"))
    wait_until(lambda: first.inference.held)
    second = GrpcServer(first.context, GrpcOptions(reuse_port=True))
    grpc_loop.run(_start(second, first.port))
    answered, failed, is_over = [], [], threading.Event()

    def keep_calling(number: int) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{first.port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            while not (is_over.is_set() or failed):
                try:
                    stub.ModelInfer(raw_request("same_FP32"), timeout=TIMEOUT_S)
                    answered.append(number)
                except grpc.RpcError as error:
                    failed.append(error)

    threads = [threading.Thread(target=keep_calling, args=(number,)) for number in range(16)]
    with running(threads, is_over):
        wait_until(lambda: len(set(answered)) == len(threads))
        assert len(first.server.connections) > 1
        grpc_loop.run(first.server.leave(TIMEOUT_S))
        stopped = grpc_loop.spawn(first.server.stop(TIMEOUT_S))
        answered.clear()
        wait_until(lambda: len(set(answered)) == len(threads) or failed)
        assert not stopped.done()
        grpc_loop.call(first.inference.held[0])
        assert open_call.result(TIMEOUT_S).id == "open"
        stopped.result(TIMEOUT_S)
    assert [error.details() for error in failed] == []
    grpc_loop.run(second.stop(0))
    first.close()


async def _start(server: GrpcServer, port: int) -> None:
    await server.start("127.0.0.1", port)


def test_a_server_does_not_wait_long_for_clients_that_do_not_notice(own_frontend: GrpcFrontend) -> None:
    with socket.create_connection(("127.0.0.1", own_frontend.port)) as silent:
        silent.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame_head(0, FrameType.SETTINGS, Flag.NONE, 0))
        wait_until(lambda: own_frontend.server.connections)
        own_frontend.loop.run(own_frontend.server.leave(0.1))
        own_frontend.loop.run(own_frontend.server.stop(0.1))


def test_calls_still_open_after_the_grace_period_are_cancelled(own_frontend: GrpcFrontend) -> None:
    open_call = own_frontend.stub.ModelInfer.future(raw_request("silent", id="open"))
    wait_until(lambda: own_frontend.inference.held)
    own_frontend.loop.run(own_frontend.server.stop(0.05))
    assert open_call.exception(TIMEOUT_S) is not None
    wait_until(lambda: own_frontend.inference.cancelled)
    assert [request.id for request in own_frontend.inference.cancelled] == ["open"]


def test_options_reach_the_connections_in_seconds() -> None:
    plain = GrpcOptions().http2()
    assert (plain.keepalive_time_s, plain.keepalive_timeout_s, plain.max_age_s) == (7200, 20, 0)
    aged = GrpcOptions(max_connection_age=5000, max_connection_age_grace=100).http2()
    assert (aged.max_age_s, aged.max_age_grace_s) == (5, 0.1)


def test_a_gateways_settings_are_the_options_of_its_grpc_server() -> None:
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
    first = GrpcFrontend(grpc_loop, GrpcOptions(reuse_port=True))

    async def start_another() -> GrpcServer:
        another = GrpcServer(first.context, GrpcOptions(reuse_port=True))
        await another.start("127.0.0.1", first.port)
        return another

    another = grpc_loop.run(start_another())
    grpc_loop.run(another.stop(0))
    first.close()
