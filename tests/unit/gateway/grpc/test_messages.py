"""Compressed responses, and requests that take long to decompress."""

import gzip
import threading
import zlib
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tests.support.gateway.grpc_frontend import (
    END_WITH_LAST,
    TIMEOUT_S,
    GrpcFrontend,
    Loop,
    raw_request,
    repeat_request,
    tensor,
)
from tests.support.gateway.http2_peer import REQUEST, Wire, data, frame, headers, uint32
from tests.support.waiting import wait_until
from weir.gateway.grpc.messages import MessageInflation, accepted_encoding
from weir.gateway.grpc.options import GrpcOptions
from weir.gateway.grpc.status import CallError
from weir.gateway.http2.frames import FrameType, Http2ErrorCode
from weir.gateway.inflation import STEP_BYTES

LARGE = np.zeros((1, 3_000_000), np.float32)


@pytest.fixture(scope="module")
def compressing(grpc_loop: Loop) -> Iterator[GrpcFrontend]:
    opened = GrpcFrontend(grpc_loop, GrpcOptions(infer_response_compression_level="low"))
    yield opened
    opened.close()


def ask(
    frontend: GrpcFrontend, method: str, request: service_pb2.ModelInferRequest, accepted: bytes
) -> tuple[bytes, bytes]:
    """(grpc-encoding, body) of a response to a client that accepts these encodings."""
    fields = [*REQUEST[:2], (b":path", f"/inference.GRPCInferenceService/{method}".encode()), *REQUEST[3:]]
    content = request.SerializeToString()
    with Wire(frontend.port) as wire:
        body = b"\0" + len(content).to_bytes(4, "big") + content
        wire.send(headers(1, [*fields, (b"grpc-accept-encoding", accepted)]), data(1, body, end=True))
        answered, received = wire.response(1)
    assert answered[b"grpc-status"] == b"0"
    return answered.get(b"grpc-encoding", b""), received


@pytest.mark.parametrize("method,tensor_field", [("ModelInfer", 0), ("ModelStreamInfer", 1)])
@pytest.mark.parametrize(
    "accepted,encoding,expand",
    [
        (b"identity,deflate,gzip", b"gzip", gzip.decompress),
        (b"deflate", b"deflate", zlib.decompress),
        (b"identity", b"", bytes),
        (b"", b"", bytes),
        (b"snappy", b"", bytes),
    ],
)
def test_responses_are_compressed_as_the_client_accepts_it(
    compressing: GrpcFrontend, method: str, tensor_field: int, accepted: bytes, encoding: bytes, expand: type
) -> None:
    content = np.zeros(500, np.float32).tobytes()
    inputs = [{"name": "IN", "datatype": "FP32", "shape": [1, 500]}]
    request = raw_request("same_FP32", inputs=inputs, raw_input_contents=[content])
    told, body = ask(compressing, method, request, accepted)
    assert told == encoding
    assert body[0] == bool(encoding)
    assert int.from_bytes(body[1:5], "big") == len(body) - 5
    message = expand(body[5:])
    if method == "ModelStreamInfer":
        response = service_pb2.ModelStreamInferResponse.FromString(message).infer_response
    else:
        response = service_pb2.ModelInferResponse.FromString(message)
    assert response.raw_output_contents == [content]


def test_a_response_that_compression_makes_no_shorter_stays_as_it_is(compressing: GrpcFrontend) -> None:
    request = raw_request("same_FP32", id="1", raw_input_contents=[b"\x01\x83\x7f\x3c\xaa\x0b\xe1\x99"])
    told, body = ask(compressing, "ModelInfer", request, b"gzip")
    assert (told, body[0]) == (b"gzip", 0)


def test_without_the_option_responses_are_not_compressed(frontend: GrpcFrontend) -> None:
    told, body = ask(frontend, "ModelInfer", raw_request("same_FP32"), b"gzip")
    assert (told, body[0]) == (b"", 0)


def test_other_methods_are_not_compressed(compressing: GrpcFrontend) -> None:
    assert compressing.client.is_server_live()
    assert compressing.client.get_model_config("add_sub").config.name == "add_sub"


def test_large_responses_pass_compressed(compressing: GrpcFrontend) -> None:
    result = compressing.client.infer("same_FP32", [tensor("IN", LARGE, "FP32")], compression_algorithm="gzip")
    np.testing.assert_array_equal(result.as_numpy("OUT"), LARGE)


def test_compressed_responses_on_a_stream_keep_their_order(compressing: GrpcFrontend) -> None:
    sizes = [4, 2_000_000, 4, 400_000, 4, 4]
    requests = [repeat_request(3, END_WITH_LAST, size, id=str(number)) for number, size in enumerate(sizes)]
    messages = list(compressing.stub.ModelStreamInfer(iter(requests), timeout=TIMEOUT_S))
    seen: dict[str, list[int]] = {}
    for message in messages:
        response = message.infer_response
        content = np.frombuffer(response.raw_output_contents[0], np.int32)
        assert content.nbytes == sizes[int(response.id)]
        seen.setdefault(response.id, []).append(int(content[0]))
    assert seen == {str(number): [0, 1, 2] for number in range(len(sizes))}


def test_a_large_response_to_a_cancelled_call_is_dropped(compressing: GrpcFrontend) -> None:
    call = compressing.stub.ModelStreamInfer(iter([repeat_request(20, END_WITH_LAST, 4_000_000, id="r")]), timeout=10)
    call.cancel()
    with pytest.raises(grpc.RpcError):
        list(call)
    assert compressing.client.is_server_live()


def test_an_unknown_level_is_rejected() -> None:
    with pytest.raises(ValueError, match="--grpc-infer-response-compression-level"):
        _ = GrpcOptions(infer_response_compression_level="best").compression_level


@pytest.mark.parametrize("accepted,expected", [("gzip", "gzip"), ("br, deflate ,gzip", "gzip"), ("deflate", "deflate")])
def test_accepted_encodings(accepted: str, expected: str) -> None:
    assert accepted_encoding(accepted) == expected


# Requests


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_large_requests_may_be_compressed(frontend: GrpcFrontend, algorithm: str) -> None:
    result = frontend.client.infer("same_FP32", [tensor("IN", LARGE, "FP32")], compression_algorithm=algorithm)
    np.testing.assert_array_equal(result.as_numpy("OUT"), LARGE)


def test_compressed_requests_on_a_stream_keep_their_order(frontend: GrpcFrontend) -> None:
    requests = []
    for number, elements in enumerate([2, 1_000_000, 2, 500_000, 2]):
        inputs = [{"name": "IN", "datatype": "FP32", "shape": [1, elements]}]
        content = np.zeros(elements, np.float32).tobytes()
        requests.append(raw_request("same_FP32", id=str(number), inputs=inputs, raw_input_contents=[content]))
    call = frontend.stub.ModelStreamInfer(iter(requests), compression=grpc.Compression.Gzip, timeout=TIMEOUT_S)
    assert [message.infer_response.id for message in call] == ["0", "1", "2", "3", "4"]


def test_a_malformed_large_request_ends_its_call(frontend: GrpcFrontend) -> None:
    packed = zlib.compress(np.random.default_rng(1).bytes(200_000))
    body = packed[:100_000] + b"\0" * 64 + packed[100_064:]
    for method in ("ModelInfer", "ModelStreamInfer"):
        fields = [*REQUEST[:2], (b":path", f"/inference.GRPCInferenceService/{method}".encode()), *REQUEST[3:]]
        with Wire(frontend.port) as wire:
            wire.send(headers(1, [*fields, (b"grpc-encoding", b"deflate")]))
            message = b"\1" + len(body).to_bytes(4, "big") + body
            for start in range(0, len(message), 16_000):
                wire.send(data(1, message[start : start + 16_000], end=start + 16_000 >= len(message)))
            answered, _ = wire.response(1)
        assert (answered[b"grpc-status"], answered[b"grpc-message"]) == (b"13", b"a message can't be decompressed")


def test_a_call_cancelled_while_its_request_is_decompressed_is_dropped(
    frontend: GrpcFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, cancelled = threading.Event(), threading.Event()
    advance = MessageInflation.advance

    def advance_once_cancelled(inflation: MessageInflation, size_bytes: int) -> bool:
        if size_bytes >= STEP_BYTES:  # in a thread
            begun.set()
            assert cancelled.wait(TIMEOUT_S)
        return advance(inflation, size_bytes)

    monkeypatch.setattr(MessageInflation, "advance", advance_once_cancelled)
    body = zlib.compress(bytes(30_000_000))
    fields = [*REQUEST[:2], (b":path", b"/inference.GRPCInferenceService/ModelInfer"), *REQUEST[3:]]
    with Wire(frontend.port) as wire:
        wire.send(headers(1, [*fields, (b"grpc-encoding", b"deflate")]))
        message = b"\1" + len(body).to_bytes(4, "big") + body
        for start in range(0, len(message), 16_000):
            wire.send(data(1, message[start : start + 16_000], end=start + 16_000 >= len(message)))
        assert begun.wait(TIMEOUT_S)
        wire.send(frame(FrameType.RST_STREAM, 0, 1, uint32(Http2ErrorCode.CANCEL)))
        wait_until(lambda: not frontend.server.open_calls)
        cancelled.set()
        assert frontend.client.is_server_live()


def test_decompression_ends_early_when_it_is_cancelled() -> None:
    inflation = MessageInflation(gzip.compress(bytes(10_000_000)), "gzip", 2**31)
    inflation.is_wanted = False
    assert inflation.advance(1)
    assert not inflation.content


@pytest.mark.parametrize("limit,fits", [(1_000_000, True), (999_999, False)])
def test_expansion_is_bounded_exactly(limit: int, fits: bool) -> None:
    inflation = MessageInflation(gzip.compress(bytes(1_000_000)), "gzip", limit)
    assert inflation.run_if_short() is None  # it expands beyond what the event loop decompresses
    if fits:
        assert inflation.advance(2_000_000)
        assert len(inflation.message()) == 1_000_000
    else:
        with pytest.raises(CallError, match="larger than max"):
            inflation.advance(2_000_000)


@pytest.mark.parametrize("size", [0, 1, 4 << 20, (4 << 20) + 1, 9_999_999])
def test_a_large_message_expands_step_by_step(size: int) -> None:
    content = np.random.default_rng(1).integers(0, 4, size, np.uint8).tobytes()
    inflation = MessageInflation(gzip.compress(content, 1), "gzip", 2**31)
    sizes = [0]
    while not inflation.advance(sizes[-1] + STEP_BYTES):
        sizes.append(len(inflation.content))
        assert sizes[-1] - sizes[-2] <= STEP_BYTES
    assert inflation.message() == content


@pytest.mark.parametrize("damage", [lambda packed: packed[:-9], lambda packed: packed + b"x"])
def test_incomplete_streams_are_rejected(damage: Callable[[bytes], bytes]) -> None:
    inflation = MessageInflation(damage(gzip.compress(bytes(9_000_000))), "gzip", 2**31)
    with pytest.raises(CallError, match="can't be decompressed"):
        _ = inflation.advance(10_000_000) and inflation.message()


def test_responses_that_wait_to_be_compressed_are_bounded(
    compressing: GrpcFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = compressing.server.ledger
    monkeypatch.setattr(ledger, "limit_bytes", 20_000_000)
    ledger.peak_bytes = ledger.recent_peak_bytes = 0
    request = repeat_request(100, END_WITH_LAST, 1_000_000, id="r")
    call = compressing.stub.ModelStreamInfer(iter([request]), timeout=TIMEOUT_S, compression=grpc.Compression.Gzip)
    with pytest.raises(grpc.RpcError) as raised:
        list(call)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert 5_000_000 < ledger.peak_bytes <= ledger.account_share_bytes
    wait_until(lambda: not ledger.total_bytes)
