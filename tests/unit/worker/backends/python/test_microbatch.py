"""Microbatches in real processes: each request is executed alone, and those that have not started can be withdrawn."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.models.python_scripts import Collected, Models, body, execute_body, numbers, python_request
from tests.support.waiting import wait_until
from weir.worker.backend_api.interface import EndedRequest, Execution
from weir.worker.backends.python.microbatch import ProcessMicrobatch
from weir.worker.backends.python.process import ProcessDied, PythonProcess

COUNTING = execute_body("""
    (request,) = requests
    self.count = getattr(self, "count", 0) + 1
    if request.request_id() == "raise":
        raise ValueError("asked to raise")
    if request.request_id() == "exit":
        os._exit(3)
    if request.request_id() == "wrong":
        return [1]
    if request.request_id().startswith("/"):
        open(request.request_id(), "w").close()  # blocks until the other end is opened
        time.sleep(float(request.correlation_id()) / 1000)
    if request.request_id() == "error":
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("no", pb_utils.TritonError.NOT_FOUND))]
    return [pb_utils.InferenceResponse([
        pb_utils.Tensor("N", np.array([self.count])),
        *(pb_utils.Tensor(t.name(), t.as_numpy() * 2) for t in request.inputs()),
    ])]
""")


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models(tmp_path)


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "running"
    os.mkfifo(path)
    return path


def started(process: PythonProcess, *ids: str, execution: Execution | None = None, ms: int = 0) -> ProcessMicrobatch:
    requests = [python_request(name) for name in ids]
    for request in requests:
        request.correlation_id = ms
    return process.start_microbatch(requests, execution or Collected())


def brief(ended: Sequence[EndedRequest]) -> list[object]:
    """The position of each, and the number that the model counted or the first line of its error."""
    found: list[object] = []
    for position, result, _, _ in ended:
        assert result is not None
        error = result.error
        value = result.outputs[0].to_numpy().item() if error is None else error.message.partition("\n")[0]
        found.append((position, value))
    return found


def test_each_request_is_executed_alone_and_in_order(models: Models) -> None:
    with models.running(COUNTING) as process:
        before_ns = time.monotonic_ns()
        run = started(process, *"abcde")
        assert run.wait(10)
        ended = run.ended()
        assert brief(ended) == [(at, at + 1) for at in range(5)]
        times = [before_ns, *(ns for request in ended for ns in request[2:]), time.monotonic_ns()]
        assert times == sorted(times)
        assert (run.ended(), list(run.lost), list(run.withdraw()), run.death) == ([], [], [], "")
        again = started(process, "x", "y")
        assert again.wait(10)
        assert brief(again.ended()) == [(0, 6), (1, 7)]
        assert len(process.execute([python_request("z")])) == 1


def test_a_request_that_fails_does_not_affect_others(models: Models) -> None:
    with models.running(COUNTING) as process:
        run = started(process, "a", "raise", "b", "error", "wrong", "c")
        assert run.wait(10)
        failed = "Failed to process the request(s) for model 'm_0_0', message: "
        assert brief(run.ended()) == [
            (0, 1),
            (1, f"{failed}ValueError: asked to raise"),
            (2, 3),
            (3, "no"),
            (4, f"{failed}Expected an 'InferenceResponse' object in the execute function return list, "
             "found type '<class 'int'>'."),
            (5, 6),
        ]  # fmt: skip


@pytest.mark.parametrize("size", [3, 30_000, 500_000])
def test_outputs_stay_until_the_next_batch(models: Models, size: int) -> None:
    inputs = [numbers(1, size + extra) for extra in range(6)]
    with models.running(COUNTING) as process:
        for _ in range(2):
            run = process.start_microbatch([python_request(inputs=[tensor]) for tensor in inputs], Collected())
            assert run.wait(10)
            outputs = [request.result.outputs[1].to_numpy() for request in run.ended() if request.result]
            for got, sent in zip(outputs, inputs, strict=True):
                assert np.array_equal(got, 2 * sent.to_numpy())


def test_no_request_starts_once_the_outputs_are_large(models: Models) -> None:
    with models.running(COUNTING) as process:
        requests = [python_request(inputs=[numbers(1, 6_000_000)]) for _ in range(4)]
        run = process.start_microbatch(requests, Collected())
        assert run.wait(20)
        assert brief(run.ended()) == [(0, 1), (1, 2)]
        run = started(process, "a")
        assert run.wait(10)
        assert brief(run.ended()) == [(0, 3)]


def test_requests_that_have_not_started_can_be_withdrawn(models: Models, fifo: Path) -> None:
    with models.running(COUNTING) as process:
        run = started(process, "a", "b", str(fifo), "c", "d")
        wait_until(lambda: len(run.ended()) > 0 or run._read == 2)
        wait_until(lambda: process._tickets.left == 2)
        assert not run.wait(0)
        assert list(run.withdraw()) == [3, 4]
        assert list(run.withdraw()) == []
        fifo.read_text()
        assert run.wait(10)
        assert [request.position for request in run.ended()][-1:] == [2]
        run = started(process, "e")
        assert run.wait(10)
        assert brief(run.ended()) == [(0, 4)], "neither of them ran"


def test_outcomes_can_be_read_while_a_later_request_runs(models: Models, fifo: Path) -> None:
    with models.running(COUNTING) as process:
        run = started(process, "a", "raise", str(fifo), "b")
        wait_until(lambda: process._tickets.left == 1)
        assert [request.position for request in run.ended()] == [0, 1]
        assert run.ended() == []
        fifo.read_text()
        assert run.wait(10)
        assert brief(run.ended()) == [(2, 3), (3, 4)]


def test_a_process_that_dies_loses_only_the_request_it_runs(models: Models) -> None:
    closed: list[ProcessMicrobatch] = []
    with models.running(COUNTING) as process:
        run = process.start_microbatch(
            [python_request(name) for name in ("a", "b", "exit", "c", "d")], Collected(), closed.append
        )
        assert run.wait(10)
        assert brief(run.ended()) == [(0, 1), (1, 2)]
        assert list(run.lost) == [2]
        assert run.death == "the model's process ended with status 3"
        assert list(run.withdraw()) == []
        assert run.wait(None)
        run.close()
        assert closed == [run]
        assert process.is_closed
        with pytest.raises(ProcessDied):
            started(process, "e")


def test_a_killed_process_loses_the_first_request(models: Models) -> None:
    with models.running(COUNTING) as process:
        os.kill(process.pid, signal.SIGSTOP)
        run = started(process, "a", "b")
        os.kill(process.pid, signal.SIGKILL)
        assert run.wait(10)
        assert (run.ended(), list(run.lost)) == ([], [0])
        assert "SIGKILL" in run.death


def test_a_model_may_send_the_response_itself(models: Models) -> None:
    sent = Collected()
    with models.running(
        body("""
        import threading
        (request,) = requests
        sender = request.get_response_sender()
        if request.request_id() == "later":
            self.kept = sender
            return None
        if request.request_id() == "end":
            self.kept.send(texts("late"))
        sender.send(texts(request.request_id()))
        return None
        """)
    ) as process:
        run = started(process, "now", "later", "end", execution=sent)
        assert run.wait(10)
        assert [request.result for request in run.ended()] == [None] * 3
        wait_until(lambda: sorted(sent.over) == [0, 1, 2])
        assert [sent.texts(position) for position in range(3)] == [["now"], ["late"], ["end"]]
        wait_until(lambda: not process.has_open_requests)


def test_a_model_that_writes_into_the_memory_of_outcomes_is_killed(models: Models) -> None:
    with models.running(
        execute_body("""
        for fd in os.listdir("/proc/self/fd"):
            if "weir-python-outcomes" in os.readlink(f"/proc/self/fd/{fd}") and requests[0].request_id() == "b":
                os.pwrite(int(fd), b"\\xc1" * 20, 0)
        return [pb_utils.InferenceResponse([])]
        """)
    ) as process:
        run = started(process, "a", "b")
        assert run.wait(10)
        assert (run.ended(), list(run.lost)) == ([], [0, 1])
        assert "malformed" in run.death


def test_silence_is_counted_from_the_request_that_runs(models: Models, fifo: Path) -> None:
    with models.running(COUNTING) as process:
        run = started(process, "a", str(fifo), "b")
        wait_until(lambda: process._tickets.left == 1)
        now_s = time.monotonic() + 100
        assert process.silent_s(now_s) == 0, "it has started another request since the last check"
        assert process.silent_s(now_s + 5) == 5
        fifo.read_text()
        assert run.wait(10)
        assert process.silent_s(now_s + 5) is None
