"""The bounds of a stream of ModelInferRequests, however it is split into frames."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tests.support.gateway.grpc_frontend import BARE_END, END_WITH_LAST, GrpcFrontend, Loop, raw_request, repeat_request
from tests.support.gateway.grpc_streams import STREAM_HEAD, StreamClient, framed, responses, summary, unframed
from tests.support.gateway.http2_peer import Wire, data, headers, window_update
from tests.support.waiting import wait_until
from weir.gateway.grpc import stream_infer as stream_methods
from weir.gateway.grpc.options import GrpcOptions
from weir.gateway.http2.frames import FrameType


@pytest.mark.parametrize("cut", [1, 13, 400, 16_000])
@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_messages_may_be_cut_into_frames_in_any_way(
    frontend: GrpcFrontend, monkeypatch: pytest.MonkeyPatch, cut: int, at_once: int
) -> None:
    monkeypatch.setattr(stream_methods, "MAX_STREAM_REQUESTS", at_once)
    body = framed(*(raw_request("unknown" if i % 7 == 3 else "same_FP32", id=str(i)) for i in range(50)))
    with Wire(frontend.port) as wire:
        wire.send(headers(1, STREAM_HEAD))
        wire.send(*(data(1, body[start : start + cut]) for start in range(0, len(body), cut)), data(1, b"", end=True))
        fields, received = wire.response(1)
    assert fields[b"grpc-status"] == b"0"
    messages = unframed(received)
    assert [summary(message)[0] for message in messages] == [str(i) for i in range(50)]
    assert [bool(message.error_message) for message in messages] == [i % 7 == 3 for i in range(50)]


def test_half_a_message_at_the_end_is_an_error(frontend: GrpcFrontend) -> None:
    with Wire(frontend.port) as wire:
        wire.send(headers(1, STREAM_HEAD), data(1, framed(raw_request("same_FP32"))[:-1], end=True))
        fields, _ = wire.response(1)
    assert (fields[b"grpc-status"], fields[b"grpc-message"]) == (b"13", b"the last message is not complete")


def test_an_error_is_acted_upon_before_the_client_has_read_what_came_before_it(frontend: GrpcFrontend) -> None:
    large = repeat_request(1, END_WITH_LAST, 100_000, id="large")
    with Wire(frontend.port) as wire:
        wire.send(headers(1, [*STREAM_HEAD, (b"triton_grpc_error", b"true")]))
        wire.send(data(1, framed(raw_request("silent", id="slow"), large)))
        wire.read_until(FrameType.DATA, 1)
        wire.send(data(1, framed(raw_request("unknown"), raw_request("same_FP32", id="after"))))
        wait_until(lambda: frontend.inference.cancelled)
        assert [request.id for request in frontend.inference.requests] == ["slow", "large"]
        wire.send(window_update(0, 1_000_000), window_update(1, 1_000_000))
        fields, _ = wire.response(1)
    assert fields[b"grpc-status"] == b"5"


def test_a_stream_that_has_enough_to_do_is_read_no_further(
    frontend: GrpcFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_methods, "MAX_STREAM_REQUESTS", 10)
    stream = StreamClient(frontend)
    stream.send(*(raw_request("silent", id=str(i)) for i in range(500)))
    stream.close()
    wait_until(lambda: len(frontend.inference.requests) == 10)
    assert frontend.client.is_server_live()
    assert len(frontend.inference.requests) == 10
    received = []
    for message in stream_until_empty(frontend, stream):
        received.append(summary(message)[0])
    assert received == [str(i) for i in range(500)]
    assert stream.call.code() is grpc.StatusCode.OK


def stream_until_empty(frontend: GrpcFrontend, stream: StreamClient) -> Iterator[Any]:
    read = iter(stream)
    answered = 0
    while answered < 500:
        wait_until(lambda answered=answered: len(frontend.inference.held) > answered)
        assert len(frontend.inference.requests) <= answered + 10
        frontend.loop.call(frontend.inference.held[answered])
        answered += 1
        yield next(read)
    yield from read


def test_a_stream_of_large_requests_holds_few_at_once(frontend: GrpcFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_methods, "MAX_STREAM_REQUEST_BYTES", 2_000_000)
    content = bytes(1_000_000)
    inputs = [{"name": "IN", "datatype": "FP32", "shape": [1, 250_000]}]
    large = [raw_request("silent", id=str(i), inputs=inputs, raw_input_contents=[content]) for i in range(8)]
    stream = StreamClient(frontend)
    stream.send(*large)
    stream.close()
    wait_until(lambda: len(frontend.inference.requests) == 2)
    assert frontend.client.is_server_live()
    assert len(frontend.inference.requests) == 2
    read = iter(stream)
    for number in range(8):
        wait_until(lambda number=number: len(frontend.inference.held) > number)
        frontend.loop.call(frontend.inference.held[number])
        assert summary(next(read))[0] == str(number)
    assert stream.ending() == (grpc.StatusCode.OK, "")


def test_a_client_that_leaves_its_responses_unread_is_reset(
    frontend: GrpcFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontend.server.ledger, "limit_bytes", 20_000_000)
    stream = StreamClient(frontend)
    stream.send(raw_request("silent", id="slow"), repeat_request(100, BARE_END, 1_000_000, id="r"))
    wait_until(lambda: frontend.inference.cancelled)
    code, _ = stream.ending()
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert frontend.client.is_server_live()


def test_large_responses_pass_while_they_are_read(frontend: GrpcFrontend) -> None:
    messages = responses(
        frontend, repeat_request(40, END_WITH_LAST, 1_000_000, id="r"), raw_request("same_FP32", id="ok")
    )
    sizes = [len(message.infer_response.raw_output_contents[0]) for message in messages]
    assert sorted(sizes) == [8, *([1_000_000] * 40)]


def test_a_message_above_the_limit_ends_the_stream(grpc_loop: Loop) -> None:
    frontend = GrpcFrontend(grpc_loop, GrpcOptions(max_receive_bytes=1000))
    try:
        stream = StreamClient(frontend)
        stream.send(raw_request("silent", id="before"), raw_request("silent", raw_input_contents=[bytes(1000)]))
        code, details = stream.ending()
        assert (code, details.partition("(")[0]) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "Received message larger than max ",
        )
        assert [request.id for request in frontend.inference.cancelled] == ["before"]
    finally:
        frontend.close()


def test_a_lost_connection_cancels_the_requests_of_its_streams(frontend: GrpcFrontend) -> None:
    with Wire(frontend.port) as wire:
        for stream_id in (1, 3):
            wire.send(
                headers(stream_id, STREAM_HEAD), data(stream_id, framed(raw_request("silent", id=str(stream_id))))
            )
        wait_until(lambda: len(frontend.inference.requests) == 2)
    wait_until(lambda: len(frontend.inference.cancelled) == 2)
    assert not frontend.server.open_calls
