"""Every request of a Python model gets a final response, whatever the model does with its response sender."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models.python_scripts import (
    DECOUPLED,
    Collected,
    Models,
    body,
    code_and_message,
    python_request,
    run,
)
from tests.support.waiting import wait_until
from weir.schemas.core.errors import ErrorCode
from weir.worker.backends.python.process import PythonProcess

NEVER_ANSWERED = (
    ErrorCode.INTERNAL,
    "Failed to process the request(s) for model 'm_0_0', message: the model finished with the "
    "request without sending a final response",
)


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models(tmp_path)


def asynchronous(source: str) -> str:
    return source.replace("def execute", "async def execute", 1)


RETURNED_SENT_AND_LATER = """
    import asyncio

    returned, early, late = requests
    early.get_response_sender().send(texts("early"))

    async def answer(sender):
        await asyncio.sleep(0.01)
        sender.send(texts("late"))

    self.task = asyncio.create_task(answer(late.get_response_sender()))
    return [texts("returned"), None, None]
"""


def test_a_task_that_a_coroutine_leaves_behind_continues(models: Models) -> None:
    with models.running(asynchronous(body(RETURNED_SENT_AND_LATER))) as process:
        responses, sink = run(process, "returned", "early", "late")
        wait_until(lambda: sorted(sink.over) == [1, 2])
    assert responses[0] is not None
    assert responses[0].outputs[0].to_numpy().tolist() == [b"returned"]
    assert responses[1:] == [None, None]
    assert sink.texts(1) == ["early"]
    assert sink.texts(2) == ["late"]


def test_tasks_and_timers_that_are_left_behind_run_between_batches(models: Models) -> None:
    source = asynchronous(
        body("""
        import asyncio, threading

        if requests[0].request_id() == "ask":
            return [texts(*self.done)]
        loop = asyncio.get_running_loop()
        self.done = []
        sender = requests[0].get_response_sender()

        async def last():
            self.done.append("from a thread")
            sender.send(texts("late"))

        def in_thread():
            asyncio.run_coroutine_threadsafe(last(), loop)

        loop.call_later(0.01, lambda: (self.done.append("timer"), threading.Thread(target=in_thread).start()))
    """)
    )
    with models.running(source) as process:
        _, sink = run(process, "")
        wait_until(lambda: sink.over)
        (response,), _ = run(process, "ask")
    assert response is not None
    assert response.outputs[0].to_numpy().tolist() == [b"timer", b"from a thread"]


def test_a_coroutine_that_stops_its_loop_does_not_stop_the_next_one(models: Models) -> None:
    source = asynchronous(
        body("""
        import asyncio

        asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop)
        await asyncio.sleep(0.01)
        return [texts("done")]
    """)
    )
    with models.running(source) as process:
        for _ in range(2):
            (response,), _ = run(process)
            assert response is not None
            assert response.error is None


def ended(process: PythonProcess, *ids: str) -> Collected:
    """What was sent for a run whose requests `execute` left open, once all of them have ended."""
    returned, sink = run(process, *ids)
    assert returned == [None] * len(ids)
    wait_until(lambda: len(sink.over) == len(ids))
    return sink


@pytest.mark.parametrize("config", [None, DECOUPLED], ids=["one response", "decoupled"])
def test_deleting_a_sender_fails_its_request(models: Models, config: dict | None) -> None:
    source = body("""
        if requests[0].request_id() == "drop":
            self.kept = None
        self.kept = requests[0].get_response_sender()
        for request in requests[1:]:
            request.get_response_sender()
    """)
    with models.running(source, config) as process:
        _, sink = run(process, "kept", "not kept")
        wait_until(lambda: sink.over == [1])
        run(process, "drop")
        wait_until(lambda: sink.over == [1, 0])
    for position in (0, 1):
        assert code_and_message(sink.responses[position][-1].error) == NEVER_ANSWERED


def test_a_thread_that_dies_fails_its_request(models: Models) -> None:
    source = body("""
        import threading

        def answer(sender):
            sender.send(texts("first"))
            raise TypeError("a thread of the model")

        for request in requests:
            threading.Thread(target=answer, args=(request.get_response_sender(),)).start()
    """)
    with models.running(source, DECOUPLED) as process:
        sink = ended(process, "a", "b")
    for position in (0, 1):
        first, last = sink.responses[position]
        assert first.error is None
        assert code_and_message(last.error) == NEVER_ANSWERED


def test_a_decoupled_request_whose_sender_was_never_taken_fails(models: Models) -> None:
    with models.running(body("return None"), DECOUPLED) as process:
        sink = ended(process, "a")
    assert code_and_message(sink.responses[0][-1].error) == NEVER_ANSWERED


def test_a_finished_coroutine_ends_its_open_requests(models: Models) -> None:
    source = asynchronous(
        body("""
        requests[0].get_response_sender().send(texts("first"))
        requests[1].get_response_sender().send(texts("all"), FINAL)
    """)
    )
    with models.running(source, DECOUPLED) as process:
        sink = ended(process, "a", "b")
    assert code_and_message(sink.responses[0][-1].error) == NEVER_ANSWERED
    assert sink.texts(1) == ["all"]


def test_a_request_that_the_model_removed_from_its_list_is_closed_with_the_others(models: Models) -> None:
    source = body("""
        if requests[0].request_id() == "ask":
            return [texts(tried(self.kept.send, texts("late")))]
        self.kept = requests.pop().get_response_sender()
        raise ValueError("boo")
    """)
    with models.running(source) as process:
        (response,), _ = run(process)
        (asked,), _ = run(process, "ask")
    assert response is not None
    assert response.error is not None
    assert asked is not None
    assert asked.outputs[0].to_numpy().tolist() == [
        b"TritonModelException: Unable to send response. Response sender has been closed."
    ]


def test_no_request_ends_twice(models: Models) -> None:
    """Senders that are deleted after the final response, sent or returned, report nothing."""
    source = body("""
        sent, returned = requests
        sent.get_response_sender().send(texts("sent"))
        returned.get_response_sender()
        return [None, texts("returned")]
    """)
    with models.running(source) as process:
        for _ in range(20):
            responses, sink = run(process, "", "")
            assert responses[0] is None
            assert sink.texts(0) == ["sent"]
            assert 1 not in sink.responses
        process.execute([python_request(), python_request()], Collected())
