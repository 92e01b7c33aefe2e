"""`ResponseIterator`, as a model iterates over responses of another one, without processes."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import weir.worker.python_stub

_STUB_FOLDER = str(Path(weir.worker.python_stub.__file__).parent)
sys.path.insert(0, _STUB_FOLDER)
import _weir_response_iterator as module  # noqa: E402
import triton_python_backend_utils as pb_utils  # noqa: E402
from _weir_calls import Calls  # noqa: E402

sys.path.remove(_STUB_FOLDER)


class RecordedCalls:
    """Stands in for `Calls`, and records which calls the iterator cancels or ignores."""

    def __init__(self) -> None:
        self.cancelled: list[int] = []
        self.cancelled_heard: list[int] = []
        self.ignored: list[int] = []
        self.cancel = self.cancelled.append
        self.cancel_and_listen = self.cancelled_heard.append
        self.ignore = self.ignored.append


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> RecordedCalls:
    made = RecordedCalls()
    monkeypatch.setattr(Calls, "current", made)
    return made


def response(size: int = 1) -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse([pb_utils.Tensor("O", np.zeros(size, np.uint8))])


def started() -> tuple[pb_utils.ResponseIterator, module.OnResponse]:
    responses = pb_utils.ResponseIterator()
    responses.started(7)
    return responses, responses.receiver()


def test_waits_for_responses_of_another_thread(calls: RecordedCalls) -> None:
    responses, receive = started()
    sent = [response(), response()]
    timers = [threading.Timer(0.01 * place, receive, (one, place == 1)) for place, one in enumerate(sent)]
    for timer in timers:
        timer.start()
    assert list(responses) == sent
    assert list(responses) == sent
    assert not calls.cancelled


async def test_coroutines_wait_together(calls: RecordedCalls) -> None:
    responses, receive = started()

    async def read() -> list[pb_utils.InferenceResponse]:
        return [one async for one in responses]

    readers = [asyncio.create_task(read()) for _ in range(3)]
    await asyncio.sleep(0)
    sent = [response() for _ in range(5)]
    for place, one in enumerate(sent):
        await asyncio.to_thread(receive, one, place == 4)
    got = await asyncio.gather(*readers)
    assert sorted(id(one) for ones in got for one in ones) == sorted(map(id, sent))


async def test_a_coroutine_that_is_cancelled_loses_nothing(calls: RecordedCalls) -> None:
    responses, receive = started()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await anext(responses)
    receive(response(), True)
    assert len([one async for one in responses]) == 1


def test_a_cancelled_stream_is_read_to_the_end_that_its_model_makes(calls: RecordedCalls) -> None:
    responses, receive = started()
    receive(response(), False)
    responses.cancel()
    receive(response(), False)
    receive(pb_utils.InferenceResponse(error=pb_utils.TritonError("stopped", pb_utils.TritonError.CANCELLED)), True)
    assert [one.has_error() for one in responses] == [False, False, True]
    assert (calls.cancelled_heard, calls.cancelled) == ([7], [])


async def test_a_cancelled_wait_for_the_first_response_drops_the_stream(calls: RecordedCalls) -> None:
    responses, receive = started()
    waiting = asyncio.create_task(responses.first_response())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    receive(response(), True)
    assert list(responses) == []
    assert (calls.cancelled_heard, calls.cancelled) == ([], [7])


def test_an_iterator_that_is_dropped_cancels_nothing(calls: RecordedCalls) -> None:
    responses, receive = started()
    del responses
    receive(response(), False)
    assert (calls.cancelled, calls.ignored) == ([], [7])


def test_a_call_with_too_many_unread_responses_is_cancelled(
    calls: RecordedCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_UNREAD_BYTES", 1000)
    responses, receive = started()
    for _ in range(5):
        receive(response(300), False)
    read = list(responses)
    assert [one.has_error() for one in read] == [False, False, False, True]
    assert read[-1].error().code() == pb_utils.TritonError.UNAVAILABLE
    assert calls.cancelled == [7]


def test_one_response_may_be_larger_than_what_may_lie_unread(
    calls: RecordedCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_UNREAD_BYTES", 1000)
    responses, receive = started()
    receive(response(5000), False)
    assert [tensor.shape() for tensor in next(responses).output_tensors()] == [[5000]]
    receive(response(5000), False)
    receive(response(1), False)
    assert [one.has_error() for one in responses] == [False, True]
    assert calls.cancelled == [7]


def test_reading_makes_room(calls: RecordedCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNREAD_BYTES", 1000)
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", 1000)
    responses, receive = started()
    for _ in range(10):
        receive(response(900), False)
        assert not next(responses).has_error()
    receive(pb_utils.InferenceResponse(), True)
    assert [one.output_tensors() for one in responses] == [[]]
    with pytest.raises(pb_utils.TritonModelException, match="too large to be kept"):
        iter(responses)
