"""ModelStreamInfer as stock clients see it: order, errors, final responses, and the ends of streams."""

import asyncio
import time
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tests.support.gateway.grpc_frontend import (
    BARE_END,
    END_WITH_LAST,
    ERROR_AMID,
    ERROR_AS_END,
    TIMEOUT_S,
    GrpcFrontend,
    raw_request,
    repeat_request,
)
from tests.support.gateway.grpc_streams import STREAM_HEAD, StreamClient, framed, release, responses, summary
from tests.support.gateway.http2_peer import Wire, data, headers
from tests.support.waiting import wait_until
from weir.schemas.core.errors import not_found

EMPTY_FINAL = {"triton_enable_empty_final_response": {"bool_param": True}}
GRPC_ERRORS = (("triton_grpc_error", "true"),)


def test_a_stream_without_requests_ends_well(frontend: GrpcFrontend) -> None:
    assert responses(frontend) == []


def test_a_response_is_marked_as_final(frontend: GrpcFrontend) -> None:
    values = np.array([[1.5, 2]], np.float32)
    (message,) = responses(frontend, raw_request("same_FP32", id="a", raw_input_contents=[values.tobytes()]))
    assert summary(message) == ("a", "", "2", True, 1)
    assert message.infer_response.model_name == "same_FP32"
    assert message.infer_response.raw_output_contents == [values.tobytes()]


def test_requests_without_an_id_are_answered_the_second_time_too(frontend: GrpcFrontend) -> None:
    requests = [raw_request("same_FP32", raw_input_contents=[np.full(2, i, np.float32).tobytes()]) for i in range(5)]
    contents = [message.infer_response.raw_output_contents[0] for message in responses(frontend, *requests)]
    assert contents == [request.raw_input_contents[0] for request in requests]


def test_responses_keep_the_order_of_requests_across_models(frontend: GrpcFrontend) -> None:
    stream = StreamClient(frontend)
    stream.send(raw_request("silent", id="slow"), *(raw_request("same_FP32", id=str(i)) for i in range(5)))
    stream.close()
    wait_until(lambda: len(frontend.inference.requests) == 6)
    release(frontend)
    assert [summary(message)[0] for message in stream] == ["slow", "0", "1", "2", "3", "4"]


def test_responses_of_decoupled_models_do_not_wait(frontend: GrpcFrontend) -> None:
    stream = StreamClient(frontend)
    stream.send(raw_request("silent", id="slow"), repeat_request(2, id="r"), raw_request("same_FP32", id="after"))
    stream.close()
    read = iter(stream)
    assert [summary(next(read))[0] for _ in range(2)] == ["r", "r"]
    release(frontend)
    assert [summary(message)[0] for message in read] == ["slow", "after"]


def test_requests_that_come_together_are_submitted_together(
    frontend: GrpcFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is submitted in one turn of the loop shares a frame on the bus.
    turns: list[int] = []
    turn = 0
    submit = frontend.inference.submit

    def resume() -> None:
        nonlocal turn
        turn += 1

    def note(*arguments: Any, **named: Any) -> Any:
        if not turns:
            asyncio.get_running_loop().call_soon(resume)
        turns.append(turn)
        return submit(*arguments, **named)

    monkeypatch.setattr(frontend.inference, "submit", note)
    requests = [raw_request("same_FP32", id=str(i)) for i in range(20)]
    with Wire(frontend.port) as wire:
        wire.send(headers(1, STREAM_HEAD), data(1, framed(*requests), end=True))
        fields, _ = wire.response(1)
    assert fields[b"grpc-status"] == b"0"
    assert turns == [0] * 20


# The end of the responses to a request: as Triton 2.51 has it


@pytest.mark.parametrize(
    "times,ending,wants_end,expected",
    [
        (2, BARE_END, False, [("", "2", False), ("", "2", False)]),
        (2, BARE_END, True, [("", "2", False), ("", "2", False), ("", "", True)]),
        (2, END_WITH_LAST, False, [("", "2", False), ("", "2", True)]),
        (2, END_WITH_LAST, True, [("", "2", False), ("", "2", True)]),
        (0, BARE_END, False, []),
        (0, BARE_END, True, [("", "", True)]),
        (3, ERROR_AMID, False, [("", "2", False), ("told to fail", "", False), ("", "2", False)]),
        (2, ERROR_AS_END, True, [("", "2", False), ("told to fail", "", True)]),
    ],
)
def test_the_end_of_decoupled_responses(
    frontend: GrpcFrontend, times: int, ending: int, wants_end: bool, expected: list[tuple[str, str, bool]]
) -> None:
    request = repeat_request(times, ending, id="r", parameters=EMPTY_FINAL if wants_end else {})
    messages = responses(frontend, request)
    assert [summary(message)[1:4] for message in messages] == expected
    assert all(message.infer_response.model_name == "repeat" for message in messages)
    assert all(message.infer_response.id == "r" for message in messages)


def test_an_empty_final_response_names_the_requested_version(frontend: GrpcFrontend) -> None:
    (message,) = responses(frontend, repeat_request(0, id="r", model_version="01", parameters=EMPTY_FINAL))
    assert summary(message) == ("r", "", "1", True, 0)


# Errors


def test_rejections_are_responses_in_their_turn(frontend: GrpcFrontend) -> None:
    stream = StreamClient(frontend)
    bad = raw_request("same_FP32", id="bad", raw_input_contents=[])
    stream.send(
        raw_request("silent", id="slow"), raw_request("unknown", id="u"), bad, raw_request("same_FP32", id="ok")
    )
    stream.close()
    wait_until(lambda: len(frontend.inference.requests) == 2)
    release(frontend)
    assert [summary(message) for message in stream] == [
        ("slow", "", "2", True, 1),
        ("u", "Request for unknown model: 'unknown' is not found", "", None, 0),
        ("bad", "unable to find data for input tensor 'IN' for model 'same_FP32' in request.", "", None, 0),
        ("ok", "", "2", True, 1),
    ]


def test_rejections_of_requests_to_decoupled_models_do_not_wait(frontend: GrpcFrontend) -> None:
    stream = StreamClient(frontend)
    stream.send(raw_request("silent", id="slow"), repeat_request(1, id="r", raw_input_contents=[]))
    stream.close()
    read = iter(stream)
    assert summary(next(read))[0] == "r"
    release(frontend)
    assert [summary(message)[0] for message in read] == ["slow"]


def test_a_models_error_names_the_model_and_is_final(frontend: GrpcFrontend) -> None:
    frontend.inference.failure = not_found("out of luck")
    first, second = responses(frontend, raw_request("failing", id="f"), raw_request("same_FP32", id="ok"))
    assert summary(first) == ("f", "out of luck", "", True, 0)
    assert first.infer_response.model_name == "failing"
    assert summary(second)[0] == "ok"


def test_bytes_that_are_no_message_are_one_more_error(frontend: GrpcFrontend) -> None:
    call = frontend.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
    messages = [
        service_pb2.ModelStreamInferResponse.FromString(message)
        for message in call(iter([b"\xff\xff", raw_request("same_FP32", id="ok").SerializeToString()]), timeout=10)
    ]
    assert [summary(message)[:2] for message in messages] == [("", "Unable to parse request"), ("ok", "")]


def test_an_unexpected_exception_ends_its_request_alone_and_reveals_nothing_to_the_client(
    frontend: GrpcFrontend, caplog: pytest.LogCaptureFixture
) -> None:
    class UnexpectedError(Exception):
        """One that no other test has reported within the last second."""

    frontend.inference.failure = UnexpectedError("secret detail")
    messages = responses(frontend, raw_request("failing", id="bad"), raw_request("same_FP32", id="ok"))
    assert [summary(message)[:2] for message in messages] == [("bad", "internal server error"), ("ok", "")]
    assert "secret detail" in caplog.text


@pytest.mark.parametrize("value", ["false", "True", "1"])
def test_only_true_asks_for_errors_of_grpc(frontend: GrpcFrontend, value: str) -> None:
    stream = StreamClient(frontend, (("triton_grpc_error", value),))
    stream.send(raw_request("unknown", id="u"))
    stream.close()
    assert stream.ending() == (grpc.StatusCode.OK, "")


def test_the_first_error_ends_the_stream_if_the_client_wants_that(frontend: GrpcFrontend) -> None:
    frontend.inference.failure = not_found("out of luck")
    stream = StreamClient(frontend, GRPC_ERRORS)
    stream.send(raw_request("silent", id="slow"), raw_request("same_FP32", id="waits"))
    wait_until(lambda: len(frontend.inference.requests) == 2)
    stream.send(raw_request("failing", id="f"))
    assert stream.ending() == (grpc.StatusCode.NOT_FOUND, "out of luck")
    assert [request.id for request in frontend.inference.cancelled] == ["slow"]


def test_a_rejection_ends_the_stream_if_the_client_wants_that(frontend: GrpcFrontend) -> None:
    stream = StreamClient(frontend, GRPC_ERRORS)
    stream.send(raw_request("silent", id="slow"), raw_request("unknown", id="u"))
    assert stream.ending() == (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'unknown' is not found")
    assert [request.id for request in frontend.inference.cancelled] == ["slow"]


def test_an_error_amid_decoupled_responses_ends_such_a_stream(frontend: GrpcFrontend) -> None:
    stream = StreamClient(frontend, GRPC_ERRORS)
    stream.send(repeat_request(3, ERROR_AMID, id="r"))
    assert summary(next(iter(stream)))[0] == "r"
    assert stream.ending() == (grpc.StatusCode.NOT_FOUND, "told to fail")


# The end of the stream


def test_a_half_closed_stream_ends_when_everything_is_answered(frontend: GrpcFrontend) -> None:
    stream = StreamClient(frontend)
    stream.send(raw_request("silent", id="slow"))
    stream.close()
    wait_until(lambda: frontend.inference.held)
    assert stream.call.is_active()
    release(frontend)
    assert stream.ending() == (grpc.StatusCode.OK, "")


def test_a_cancelled_stream_cancels_all_its_requests(frontend: GrpcFrontend) -> None:
    stream = StreamClient(frontend)
    stream.send(*(raw_request("silent", id=str(i)) for i in range(10)))
    wait_until(lambda: len(frontend.inference.requests) == 10)
    stream.call.cancel()
    wait_until(lambda: len(frontend.inference.cancelled) == 10)
    assert {request.id for request in frontend.inference.cancelled} == {str(i) for i in range(10)}
    release(frontend)  # late responses are dropped
    assert responses(frontend, raw_request("same_FP32", id="ok"))


def test_a_deadline_ends_the_stream_and_cancels_its_requests(frontend: GrpcFrontend) -> None:
    stream = StreamClient(frontend, timeout=0.1)
    stream.send(raw_request("silent", id="late"))
    assert stream.ending()[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: frontend.inference.cancelled)


def test_a_stopping_server_answers_open_requests_and_rejects_new_ones(own_frontend: GrpcFrontend) -> None:
    refusal = (grpc.StatusCode.UNAVAILABLE, "GRPC server is shutting down and has stopped accepting new requests.")
    idle, busy = StreamClient(own_frontend), StreamClient(own_frontend)
    for stream in (idle, busy):
        stream.send(raw_request("same_FP32", id="before"))
        assert summary(next(iter(stream)))[0] == "before"
    busy.send(raw_request("silent", id="slow"))
    wait_until(lambda: own_frontend.inference.held)
    stopped = own_frontend.loop.spawn(own_frontend.server.stop(TIMEOUT_S))
    assert idle.ending() == refusal
    busy.send(raw_request("same_FP32", id="new"))
    wait_until(lambda: busy._requests.empty())
    late = StreamClient(own_frontend)
    assert late.ending() == refusal
    release(own_frontend)
    read = iter(busy)
    assert summary(next(read)) == ("slow", "", "2", True, 1)
    assert summary(next(read))[:2] == ("new", refusal[1])
    assert busy.ending() == refusal
    stopped.result(TIMEOUT_S)


def test_requests_have_as_long_as_their_stream_and_calls_as_they_say(frontend: GrpcFrontend) -> None:
    request = raw_request("same_FP32", raw_input_contents=[np.zeros(2, np.float32).tobytes()])
    began_ms = time.time() * 1000
    responses(frontend, request, request)
    frontend.stub.ModelInfer(request, timeout=TIMEOUT_S)
    frontend.stub.ModelInfer(request)
    *timed, untimed = [asked.deadline_ms for asked in frontend.inference.requests]
    assert len(timed) == 3
    assert timed[0] == timed[1], "that of the stream, whenever they come"
    assert all(-100 < deadline_ms - began_ms - TIMEOUT_S * 1000 < 10_000 for deadline_ms in timed)
    assert untimed == 0
