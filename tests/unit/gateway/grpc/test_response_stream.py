"""ModelStreamInfer as stock clients see it: order, errors, the ends of answers, and the ends of streams."""

import asyncio
import time
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_door import (
    BARE_END,
    END_WITH_LAST,
    ERROR_AMID,
    ERROR_AS_END,
    TIMEOUT_S,
    Door,
    raw_request,
    repeat_request,
    wait_until,
)
from grpc_streams import STREAM_HEAD, Conversation, answers, framed, release, told
from http2_peer import Wire, data, headers
from tritonclient.grpc import service_pb2

from schemas.errors import not_found

EMPTY_FINAL = {"triton_enable_empty_final_response": {"bool_param": True}}
GRPC_ERRORS = (("triton_grpc_error", "true"),)


def test_a_stream_without_requests_ends_well(door: Door) -> None:
    assert answers(door) == []


def test_an_answer_is_the_models_and_says_that_it_is_final(door: Door) -> None:
    values = np.array([[1.5, 2]], np.float32)
    (message,) = answers(door, raw_request("same_FP32", id="a", raw_input_contents=[values.tobytes()]))
    assert told(message) == ("a", "", "2", True, 1)
    assert message.infer_response.model_name == "same_FP32"
    assert message.infer_response.raw_output_contents == [values.tobytes()]


def test_requests_without_an_id_are_answered_the_second_time_too(door: Door) -> None:
    requests = [raw_request("same_FP32", raw_input_contents=[np.full(2, i, np.float32).tobytes()]) for i in range(5)]
    contents = [message.infer_response.raw_output_contents[0] for message in answers(door, *requests)]
    assert contents == [request.raw_input_contents[0] for request in requests]


def test_answers_come_in_the_order_of_requests_whichever_models_are_asked(door: Door) -> None:
    stream = Conversation(door)
    stream.ask(raw_request("silent", id="slow"), *(raw_request("same_FP32", id=str(i)) for i in range(5)))
    stream.close()
    wait_until(lambda: len(door.inference.requests) == 6)
    release(door)
    assert [told(message)[0] for message in stream] == ["slow", "0", "1", "2", "3", "4"]


def test_answers_of_decoupled_models_do_not_wait(door: Door) -> None:
    stream = Conversation(door)
    stream.ask(raw_request("silent", id="slow"), repeat_request(2, id="r"), raw_request("same_FP32", id="after"))
    stream.close()
    read = iter(stream)
    assert [told(next(read))[0] for _ in range(2)] == ["r", "r"]
    release(door)
    assert [told(message)[0] for message in read] == ["slow", "after"]


def test_requests_that_come_together_are_submitted_together(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is submitted in one turn of the loop shares a frame on the bus.
    turns: list[int] = []
    turn = 0
    submit = door.inference.submit

    def go_on() -> None:
        nonlocal turn
        turn += 1

    def note(*arguments: Any, **named: Any) -> Any:
        if not turns:
            asyncio.get_running_loop().call_soon(go_on)
        turns.append(turn)
        return submit(*arguments, **named)

    monkeypatch.setattr(door.inference, "submit", note)
    requests = [raw_request("same_FP32", id=str(i)) for i in range(20)]
    with Wire(door.port) as wire:
        wire.send(headers(1, STREAM_HEAD), data(1, framed(*requests), end=True))
        fields, _ = wire.response(1)
    assert fields[b"grpc-status"] == b"0"
    assert turns == [0] * 20


# The end of the answers to a request: as Triton 2.51 has it


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
def test_the_end_of_decoupled_answers(
    door: Door, times: int, ending: int, wants_end: bool, expected: list[tuple[str, str, bool]]
) -> None:
    request = repeat_request(times, ending, id="r", parameters=EMPTY_FINAL if wants_end else {})
    messages = answers(door, request)
    assert [told(message)[1:4] for message in messages] == expected
    assert all(message.infer_response.model_name == "repeat" for message in messages)
    assert all(message.infer_response.id == "r" for message in messages)


def test_an_empty_end_names_the_version_that_was_asked(door: Door) -> None:
    (message,) = answers(door, repeat_request(0, id="r", model_version="01", parameters=EMPTY_FINAL))
    assert told(message) == ("r", "", "1", True, 0)


# Errors


def test_refusals_are_answers_in_their_turn(door: Door) -> None:
    stream = Conversation(door)
    bad = raw_request("same_FP32", id="bad", raw_input_contents=[])
    stream.ask(raw_request("silent", id="slow"), raw_request("unknown", id="u"), bad, raw_request("same_FP32", id="ok"))
    stream.close()
    wait_until(lambda: len(door.inference.requests) == 2)
    release(door)
    assert [told(message) for message in stream] == [
        ("slow", "", "2", True, 1),
        ("u", "Request for unknown model: 'unknown' is not found", "", None, 0),
        ("bad", "unable to find data for input tensor 'IN' for model 'same_FP32' in request.", "", None, 0),
        ("ok", "", "2", True, 1),
    ]


def test_refusals_of_requests_to_decoupled_models_do_not_wait(door: Door) -> None:
    stream = Conversation(door)
    stream.ask(raw_request("silent", id="slow"), repeat_request(1, id="r", raw_input_contents=[]))
    stream.close()
    read = iter(stream)
    assert told(next(read))[0] == "r"
    release(door)
    assert [told(message)[0] for message in read] == ["slow"]


def test_a_models_error_names_the_model_and_is_final(door: Door) -> None:
    door.inference.failure = not_found("out of luck")
    first, second = answers(door, raw_request("failing", id="f"), raw_request("same_FP32", id="ok"))
    assert told(first) == ("f", "out of luck", "", True, 0)
    assert first.infer_response.model_name == "failing"
    assert told(second)[0] == "ok"


def test_bytes_that_are_no_message_are_one_more_error(door: Door) -> None:
    call = door.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
    messages = [
        service_pb2.ModelStreamInferResponse.FromString(message)
        for message in call(iter([b"\xff\xff", raw_request("same_FP32", id="ok").SerializeToString()]), timeout=10)
    ]
    assert [told(message)[:2] for message in messages] == [("", "Unable to parse request"), ("ok", "")]


def test_a_bug_behind_the_door_ends_the_stream_and_tells_the_client_nothing(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    door.inference.failure = RuntimeError("secret detail")
    stream = Conversation(door)
    stream.ask(raw_request("failing"))
    assert stream.ending() == (grpc.StatusCode.INTERNAL, "internal server error")
    assert "secret detail" in caplog.text


@pytest.mark.parametrize("value", ["false", "True", "1"])
def test_only_true_asks_for_errors_of_grpc(door: Door, value: str) -> None:
    stream = Conversation(door, (("triton_grpc_error", value),))
    stream.ask(raw_request("unknown", id="u"))
    stream.close()
    assert stream.ending() == (grpc.StatusCode.OK, "")


def test_the_first_error_ends_the_stream_if_the_client_wants_that(door: Door) -> None:
    door.inference.failure = not_found("out of luck")
    stream = Conversation(door, GRPC_ERRORS)
    stream.ask(raw_request("silent", id="slow"), raw_request("same_FP32", id="waits"))
    wait_until(lambda: len(door.inference.requests) == 2)
    stream.ask(raw_request("failing", id="f"))
    assert stream.ending() == (grpc.StatusCode.NOT_FOUND, "out of luck")
    assert [request.id for request in door.inference.abandoned] == ["slow"]


def test_a_refusal_ends_the_stream_if_the_client_wants_that(door: Door) -> None:
    stream = Conversation(door, GRPC_ERRORS)
    stream.ask(raw_request("silent", id="slow"), raw_request("unknown", id="u"))
    assert stream.ending() == (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'unknown' is not found")
    assert [request.id for request in door.inference.abandoned] == ["slow"]


def test_an_error_amid_decoupled_answers_ends_such_a_stream(door: Door) -> None:
    stream = Conversation(door, GRPC_ERRORS)
    stream.ask(repeat_request(3, ERROR_AMID, id="r"))
    assert told(next(iter(stream)))[0] == "r"
    assert stream.ending() == (grpc.StatusCode.NOT_FOUND, "told to fail")


# The end of the stream


def test_a_half_closed_stream_ends_when_everything_is_answered(door: Door) -> None:
    stream = Conversation(door)
    stream.ask(raw_request("silent", id="slow"))
    stream.close()
    wait_until(lambda: door.inference.held)
    assert stream.call.is_active()
    release(door)
    assert stream.ending() == (grpc.StatusCode.OK, "")


def test_a_cancelled_stream_abandons_all_its_requests(door: Door) -> None:
    stream = Conversation(door)
    stream.ask(*(raw_request("silent", id=str(i)) for i in range(10)))
    wait_until(lambda: len(door.inference.requests) == 10)
    stream.call.cancel()
    wait_until(lambda: len(door.inference.abandoned) == 10)
    assert {request.id for request in door.inference.abandoned} == {str(i) for i in range(10)}
    release(door)  # late answers disturb nobody
    assert answers(door, raw_request("same_FP32", id="ok"))


def test_a_deadline_ends_the_stream_and_abandons_its_requests(door: Door) -> None:
    stream = Conversation(door, timeout=0.1)
    stream.ask(raw_request("silent", id="late"))
    assert stream.ending()[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: door.inference.abandoned)


def test_a_stopping_server_answers_what_was_asked_and_refuses_what_is_new(own_door: Door) -> None:
    refusal = (grpc.StatusCode.UNAVAILABLE, "GRPC server is shutting down and has stopped accepting new requests.")
    idle, busy = Conversation(own_door), Conversation(own_door)
    for stream in (idle, busy):
        stream.ask(raw_request("same_FP32", id="before"))
        assert told(next(iter(stream)))[0] == "before"
    busy.ask(raw_request("silent", id="slow"))
    wait_until(lambda: own_door.inference.held)
    stopped = own_door.loop.spawn(own_door.server.stop(TIMEOUT_S))
    assert idle.ending() == refusal
    busy.ask(raw_request("same_FP32", id="new"))
    wait_until(lambda: busy._requests.empty())
    late = Conversation(own_door)
    assert late.ending() == refusal
    release(own_door)
    read = iter(busy)
    assert told(next(read)) == ("slow", "", "2", True, 1)
    assert told(next(read))[:2] == ("new", refusal[1])
    assert busy.ending() == refusal
    stopped.result(TIMEOUT_S)


def test_requests_have_as_long_as_their_stream_and_calls_as_they_say(door: Door) -> None:
    request = raw_request("same_FP32", raw_input_contents=[np.zeros(2, np.float32).tobytes()])
    began_ms = time.time() * 1000
    answers(door, request, request)
    door.stub.ModelInfer(request, timeout=TIMEOUT_S)
    door.stub.ModelInfer(request)
    *timed, untimed = [asked.deadline_ms for asked in door.inference.requests]
    assert len(timed) == 3
    assert timed[0] == timed[1], "that of the stream, whenever they come"
    assert all(-100 < deadline_ms - began_ms - TIMEOUT_S * 1000 < 10_000 for deadline_ms in timed)
    assert untimed == 0
