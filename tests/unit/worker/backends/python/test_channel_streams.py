"""Streams of Python models that outlast `execute`: coroutines, the death of the process, and malformed messages."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from tests.support.models.python_scripts import DECOUPLED, Collected, Models, body, python_request, run
from tests.support.waiting import wait_until
from weir.schemas.core.errors import ErrorCode
from weir.worker.backends.python.channel import ResponseReader
from weir.worker.backends.python.process import ProcessDied
from weir.worker.python_stub._weir_channel import Channel, Kind
from weir.worker.python_stub._weir_memory import MemoryReader, create_memory


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models(tmp_path)


class TestCoroutines:
    SOURCE = """
        async def answer(request):
            import asyncio
            sender = request.get_response_sender()
            sender.send(texts("begun"))
            while not sender.is_cancelled():
                await asyncio.sleep(0.005)
            if request.request_id() == "raise":
                raise ValueError("boo")
            if request.request_id() == "exit":
                sys.exit(1)
            if request.request_id() == "stop":
                raise KeyboardInterrupt
            sender.send(texts("done"), FINAL)

        import asyncio
        await asyncio.gather(*(answer(request) for request in requests))
    """

    def test_coroutines_run_concurrently(self, models: Models) -> None:
        with models.running(body(self.SOURCE).replace("def execute", "async def execute", 1), DECOUPLED) as process:
            sinks = [run(process, "", "")[1] for _ in range(3)]
            wait_until(lambda: all(len(sink.responses) == 2 for sink in sinks))
            assert [sink.texts(1) for sink in sinks] == [["begun"]] * 3
            for sink in reversed(sinks):
                sink.cancelled = {0, 1}
                wait_until(lambda sink=sink: sorted(sink.over) == [0, 1])
            assert [sink.texts() for sink in sinks] == [["begun", "done"]] * 3

    @pytest.mark.parametrize(
        ("id", "message"),
        [("raise", "message: ValueError: boo\n\nAt:\n"), ("exit", "SystemExit: 1"), ("stop", "KeyboardInterrupt")],
    )
    def test_coroutines_that_fail_fail_their_requests(self, models: Models, id: str, message: str) -> None:
        with models.running(body(self.SOURCE).replace("def execute", "async def execute", 1), DECOUPLED) as process:
            _, failing = run(process, id)
            failing.cancelled = {0}
            wait_until(lambda: failing.failures)
            _, sink = run(process, "")
            sink.cancelled = {0}
            wait_until(lambda: sink.over)
        (error,) = failing.failures
        assert error.message.startswith("Failed to process the request(s) for model 'm_0_0', message: ")
        assert message in error.message
        assert failing.texts() == ["begun"]


class TestDeath:
    KEEPS = body("""
        self.kept = getattr(self, "kept", []) + [request.get_response_sender() for request in requests]
        self.kept[-1].send(texts("first"))
        if requests[0].request_id() == "exit":
            os._exit(3)
    """)

    def test_while_streams_are_open(self, models: Models) -> None:
        with models.running(self.KEEPS, DECOUPLED) as process:
            sinks = [run(process, "a", "b")[1] for _ in range(2)]
            process.kill()
            wait_until(lambda: all(sink.failures for sink in sinks))
            assert not process.is_running
            for sink in sinks:
                (error,) = sink.failures
                assert error.code is ErrorCode.UNAVAILABLE
                assert error.message.endswith("the request may be sent again")

    def test_during_execute(self, models: Models) -> None:
        with models.running(self.KEEPS, DECOUPLED) as process:
            _, open_sink = run(process, "a")
            sink = Collected()
            with pytest.raises(ProcessDied):
                process.execute([python_request("exit")], sink)
            assert sink.texts() == ["first"]
            assert not sink.failures, "its caller was reported by the exception"
            assert len(open_sink.failures) == 1

    def test_no_thread_is_left(self, models: Models) -> None:
        before = threading.active_count()
        with models.running(self.KEEPS, DECOUPLED) as process:
            run(process, "a")
            assert threading.active_count() == before + 1
        assert threading.active_count() == before


@pytest.mark.parametrize(
    "message",
    [
        (99, 1, 0),
        (Kind.RESPONSE, 1, 7, None, True),
        (Kind.RESPONSE, 1, 0),
        (Kind.RESPONSE, 1, 0, 5, True),
        ("x",),
        (Kind.RESPONSE, 1, 0, ([("A", "FP32")], None), True),
    ],
)
def test_a_process_that_violates_the_protocol_is_killed(message: tuple[object, ...]) -> None:
    ours, theirs = socket.socketpair()
    killed = threading.Event()
    reader = ResponseReader(Channel(ours), MemoryReader(create_memory("test")), "m", killed.set)
    sink = Collected()
    number = reader.open_run(sink, 1)
    reader.returned(number, 0)
    Channel(theirs).send(*message)
    assert killed.wait(5)
    wait_until(lambda: sink.failures)
    reader.close()
    ours.close()
    theirs.close()
