"""gRPC calls frame by frame: what stock clients never send, or never show."""

import gzip
import time
import zlib
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2

from tests.support.gateway.grpc_frontend import TIMEOUT_S, GrpcFrontend, Loop, raw_request, tensor
from tests.support.gateway.http2_peer import REQUEST, Wire, data, frame, headers, uint32
from tests.support.waiting import wait_until
from weir.gateway.grpc.messages import MAX_EXPANDED_BYTES
from weir.gateway.grpc.options import GrpcOptions
from weir.gateway.http2.frames import FrameType, Http2ErrorCode
from weir.http_server.connection_memory import no_memory

READY = service_pb2.ModelReadyRequest(name="add_sub").SerializeToString()


def head(method: str = "ModelReady", *more: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    path = f"/inference.GRPCInferenceService/{method}".encode()
    return [*REQUEST[:2], (b":path", path), *REQUEST[3:], *more]


def message(content: bytes, flag: int = 0) -> bytes:
    return bytes([flag]) + len(content).to_bytes(4, "big") + content


@pytest.fixture
def wire(frontend: GrpcFrontend) -> Iterator[Wire]:
    with Wire(frontend.port) as wire:
        yield wire


def call(wire: Wire, body: bytes, fields: list[tuple[bytes, bytes]] | None = None) -> tuple[dict[bytes, bytes], bytes]:
    wire.send(headers(1, head() if fields is None else fields), data(1, body, end=True))
    return wire.response(1)


def status(answer: tuple[dict[bytes, bytes], bytes]) -> tuple[int, str]:
    return int(answer[0][b"grpc-status"]), answer[0].get(b"grpc-message", b"").decode()


def test_a_response_is_headers_a_message_and_trailers(wire: Wire) -> None:
    fields, body = call(wire, message(READY))
    assert fields == {b":status": b"200", b"content-type": b"application/grpc", b"grpc-status": b"0"}
    assert body == message(service_pb2.ModelReadyResponse(ready=True).SerializeToString())


@pytest.mark.parametrize("cut", [1, 4, 5, 6])
def test_a_message_may_come_in_pieces(wire: Wire, cut: int) -> None:
    body = message(READY)
    wire.send(headers(1, head()), data(1, body[:cut]), data(1, body[cut:]), data(1, b"", end=True))
    assert status(wire.response(1)) == (0, "")


@pytest.mark.parametrize("content_type", [b"application/grpc", b"application/grpc+proto", b"application/grpc;a=b"])
def test_content_types_of_grpc(wire: Wire, content_type: bytes) -> None:
    fields = [*head()[:4], (b"content-type", content_type)]
    assert status(call(wire, message(READY), fields)) == (0, "")


@pytest.mark.parametrize("content_type", [b"application/json", b"application/grpcx", b""])
def test_other_content_types_are_unsupported_media(wire: Wire, content_type: bytes) -> None:
    assert call(wire, b"{}", [*head()[:4], (b"content-type", content_type)]) == ({b":status": b"415"}, b"")


def test_other_http_methods_are_not_allowed(wire: Wire) -> None:
    wire.send(headers(1, [(b":method", b"GET"), *head()[1:]], end=True))
    assert wire.response(1) == ({b":status": b"405"}, b"")


@pytest.mark.parametrize("path", [b"/", b"/inference.GRPCInferenceService/Nothing", b"/other/ModelInfer", b"*"])
def test_unknown_methods_are_unimplemented_at_once(wire: Wire, path: bytes) -> None:
    wire.send(headers(1, [*head()[:2], (b":path", path), *head()[3:]]))  # a stream's client waits for the response
    assert status(wire.response(1))[0] == 12


@pytest.mark.parametrize("body", [b"", message(READY)[:-1], message(READY) * 2, message(READY) + b"\0"])
def test_a_unary_call_takes_exactly_one_message(wire: Wire, body: bytes) -> None:
    assert status(call(wire, body)) == (12, "the method takes exactly one message")


def test_metadata_above_the_limit_is_rejected_and_the_connection_stays_open(wire: Wire) -> None:
    fields = head("ModelReady", *[(b"x-%d" % number, bytes(b"y" * 115)) for number in range(110)])
    assert status(call(wire, message(READY), fields))[0] == 8
    wire.send(headers(3, head()), data(3, message(READY), end=True))
    assert status(wire.response(3)) == (0, "")


def test_a_status_message_is_percent_encoded(frontend: GrpcFrontend, wire: Wire) -> None:
    wanted = raw_request("ä%\n").SerializeToString()
    answer = call(wire, message(wanted), head("ModelInfer"))
    assert status(answer) == (5, "Request for unknown model: '%C3%A4%25%0A' is not found")


# Compression


@pytest.mark.parametrize("encoding,compress", [(b"gzip", gzip.compress), (b"deflate", zlib.compress)])
def test_requests_may_be_compressed(wire: Wire, encoding: bytes, compress: type) -> None:
    fields = head("ModelReady", (b"grpc-encoding", encoding))
    assert status(call(wire, message(compress(READY), 1), fields)) == (0, "")


def test_a_call_with_compression_may_leave_a_message_as_it_is(wire: Wire) -> None:
    assert status(call(wire, message(READY), head("ModelReady", (b"grpc-encoding", b"gzip")))) == (0, "")


@pytest.mark.parametrize(
    "body,encoding",
    [
        (message(gzip.compress(READY, mtime=0), 1), b"identity"),
        (message(gzip.compress(READY, mtime=0), 2), b"gzip"),
        (message(b"no gzip", 1), b"gzip"),
        (message(gzip.compress(READY, mtime=0)[:-1], 1), b"gzip"),
        (message(gzip.compress(READY, mtime=0) + b"x", 1), b"gzip"),
    ],
)
def test_messages_that_cannot_be_decompressed_are_internal_errors(wire: Wire, body: bytes, encoding: bytes) -> None:
    assert status(call(wire, body, head("ModelReady", (b"grpc-encoding", encoding))))[0] == 13


def test_an_unknown_compression_is_unimplemented_and_the_supported_ones_are_listed(wire: Wire) -> None:
    answer = call(wire, message(READY, 1), head("ModelReady", (b"grpc-encoding", b"snappy")))
    assert status(answer)[0] == 12
    assert answer[0][b"grpc-accept-encoding"] == b"identity,deflate,gzip"


def test_what_a_message_may_expand_to_is_bounded(grpc_loop: Loop) -> None:
    frontend = GrpcFrontend(grpc_loop, GrpcOptions(max_receive_bytes=100_000))
    assert MAX_EXPANDED_BYTES > 100_000
    try:
        for size, expected in [(99_000, 13), (100_001, 8), (10_000_000, 8)]:
            with Wire(frontend.port) as wire:
                body = message(gzip.compress(b"\xff" * size), 1)
                assert status(call(wire, body, head("ModelReady", (b"grpc-encoding", b"gzip"))))[0] == expected
    finally:
        frontend.close()


def test_a_stock_client_may_compress(frontend: GrpcFrontend) -> None:
    inputs = [tensor("IN", np.zeros((1, 1000), np.float32), "FP32")]
    for algorithm in ("gzip", "deflate"):
        result = frontend.client.infer("same_FP32", inputs, compression_algorithm=algorithm)
        assert result.as_numpy("OUT").shape == (1, 1000)


# Deadlines and cancellation


@pytest.mark.parametrize("timeout,seconds", [(b"50m", 0.05), (b"50000u", 0.05), (b"1n", 0), (b"0S", 0)])
def test_a_call_ends_at_its_deadline(frontend: GrpcFrontend, wire: Wire, timeout: bytes, seconds: float) -> None:
    wanted = raw_request("silent", id="late").SerializeToString()
    started = time.monotonic()
    answer = call(wire, message(wanted), head("ModelInfer", (b"grpc-timeout", timeout)))
    assert status(answer) == (4, "Deadline Exceeded")
    assert seconds * 0.9 <= time.monotonic() - started
    wait_until(lambda: len(frontend.inference.cancelled) == len(frontend.inference.requests))


def test_a_call_that_is_answered_in_time_has_no_deadline_left(wire: Wire) -> None:
    assert status(call(wire, message(READY), head("ModelReady", (b"grpc-timeout", b"99999999H")))) == (0, "")


@pytest.mark.parametrize("timeout", [b"", b"5", b"S", b"-1S", b"123456789S", b"1.5S", b"5x"])
def test_a_malformed_deadline_is_rejected(wire: Wire, timeout: bytes) -> None:
    answer = call(wire, message(READY), head("ModelReady", (b"grpc-timeout", timeout)))
    assert status(answer) == (13, "malformed grpc-timeout")


def test_a_reset_stream_cancels_its_request_and_no_other(frontend: GrpcFrontend, wire: Wire) -> None:
    for stream_id in (1, 3):
        wanted = raw_request("silent", id=str(stream_id)).SerializeToString()
        wire.send(headers(stream_id, head("ModelInfer")), data(stream_id, message(wanted), end=True))
    wait_until(lambda: len(frontend.inference.requests) == 2)
    wire.send(frame(FrameType.RST_STREAM, 0, 1, uint32(Http2ErrorCode.CANCEL)))
    wait_until(lambda: frontend.inference.cancelled)
    for answer in frontend.inference.held:
        frontend.loop.call(answer)
    assert status(wire.response(3)) == (0, "")
    assert [request.id for request in frontend.inference.cancelled] == ["1"]


# Bounds and the end


def test_unfinished_requests_of_a_connection_are_bounded(grpc_loop: Loop) -> None:
    frontend = GrpcFrontend(grpc_loop, GrpcOptions(max_receive_bytes=60_000_000))
    half = message(bytes(40_000_000))[:100]
    try:
        with Wire(frontend.port) as wire:
            wire.send(headers(1, head()), data(1, half), headers(3, head()), data(3, half))
            assert status(wire.response(3)) == (8, "too many unfinished requests on this connection")
            wire.send(frame(FrameType.RST_STREAM, 0, 1, uint32(Http2ErrorCode.CANCEL)))
            wire.send(headers(5, head()), data(5, half), headers(7, head()), data(7, message(READY), end=True))
            assert status(wire.response(7)) == (0, "")
    finally:
        frontend.close()


def test_unfinished_requests_of_all_connections_of_a_client_are_bounded(
    grpc_loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend = GrpcFrontend(grpc_loop, GrpcOptions(max_receive_bytes=60_000_000))
    monkeypatch.setattr(frontend.server.ledger, "limit_bytes", 8_000_000)
    part = message(bytes(3_800_000))[:3_600_000]  # of 6 MB that one client may hold

    frames = [part[at : at + 16384] for at in range(0, len(part), 16384)]

    def begin(wire: Wire, stream_id: int) -> None:
        wire.send(headers(stream_id, head()), *(data(stream_id, each) for each in frames))

    try:
        with Wire(frontend.port) as first, Wire(frontend.port) as second:
            begin(first, 1)
            first.send(headers(3, head()), data(3, message(READY), end=True))
            assert status(first.response(3)) == (0, "")
            begin(second, 1)
            code, details = status(second.response(1))
            assert (code, details) == (8, no_memory().message)
            first.send(frame(FrameType.RST_STREAM, 0, 1, uint32(Http2ErrorCode.CANCEL)))
            first.send(headers(5, head()), data(5, message(READY), end=True))
            assert status(first.response(5)) == (0, "")
            begin(second, 3)
            second.send(headers(5, head()), data(5, message(READY), end=True))
            assert status(second.response(5)) == (0, "")
            assert frontend.server.ledger.refused == {"grpc": 1}
        wait_until(lambda: not frontend.server.ledger.total_bytes)
    finally:
        frontend.close()


def test_announced_messages_hold_nothing_before_they_arrive(grpc_loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    frontend = GrpcFrontend(grpc_loop, GrpcOptions(max_receive_bytes=60_000_000))
    monkeypatch.setattr(frontend.server.ledger, "limit_bytes", 128_000_000)
    wires = [Wire(frontend.port) for _ in range(8)]
    try:
        for wire in wires:
            wire.send(headers(1, head()), data(1, message(bytes(30_000_000))[:6]))
            wire.send(headers(3, head()), data(3, message(READY), end=True))
            assert status(wire.response(3)) == (0, "")
        # One huge page each, which the first byte may occupy.
        assert frontend.server.ledger.total_bytes == len(wires) * (2 << 20)
    finally:
        for wire in wires:
            wire.socket.close()
        frontend.close()


def test_a_stopped_server_sends_goaway(grpc_loop: Loop) -> None:
    frontend = GrpcFrontend(grpc_loop)
    with Wire(frontend.port) as wire:
        assert status(call(wire, message(READY))) == (0, "")
        frontend.close()
        assert [payload[:8] for kind, _, _, payload in wire.read_until(FrameType.GOAWAY)] == [uint32(1) + uint32(0)]
        assert wire.is_closed()


def test_a_call_that_is_cut_off_by_the_stop_has_a_status(grpc_loop: Loop) -> None:
    frontend = GrpcFrontend(grpc_loop)
    with Wire(frontend.port) as wire:
        wire.send(headers(1, head("ModelInfer")), data(1, message(raw_request("silent").SerializeToString()), end=True))
        wait_until(lambda: frontend.inference.requests)
        frontend.close()
        assert status(wire.response(1))[0] == 14


# Stock clients


async def test_the_asyncio_client(frontend: GrpcFrontend) -> None:
    async with triton_aio.InferenceServerClient(f"127.0.0.1:{frontend.port}") as client:
        assert await client.is_server_ready()
        array = np.arange(4, dtype=np.float32).reshape(1, 4)
        result = await client.infer("same_FP32", [tensor("IN", array, "FP32")], client_timeout=TIMEOUT_S)
        np.testing.assert_array_equal(result.as_numpy("OUT"), array)


def test_requests_that_differ_in_content_only_get_their_own_responses(frontend: GrpcFrontend) -> None:
    for number in range(5):
        a, b = np.full((2, 3), number, np.float32), np.full((2, 3), 10, np.float32)
        result = frontend.client.infer("add_sub", [tensor("A", a, "FP32"), tensor("B", b, "FP32")])
        np.testing.assert_array_equal(result.as_numpy("SUM"), a + b)
        np.testing.assert_array_equal(result.as_numpy("DIFFERENCE"), a - b)


def test_twenty_megabytes_pass_both_ways(frontend: GrpcFrontend) -> None:
    array = np.arange(5_000_000, dtype=np.float32).reshape(1, -1)
    result = frontend.client.infer("same_FP32", [tensor("IN", array, "FP32")])
    np.testing.assert_array_equal(result.as_numpy("OUT"), array)


def test_a_message_above_the_clients_limit_leaves_the_connection_as_it_is(frontend: GrpcFrontend) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{frontend.port}", [("grpc.max_receive_message_length", 1000)]) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for _ in range(3):
            with pytest.raises(grpc.RpcError) as caught:
                infer(
                    raw_request(
                        "same_FP32",
                        inputs=[{"name": "IN", "datatype": "FP32", "shape": [1, 10_000]}],
                        raw_input_contents=[bytes(40_000)],
                    ).SerializeToString()
                )
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
