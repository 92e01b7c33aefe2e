"""Fast models without batching under load: an instance holds many batches, which only the speed shows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest

from tests.support.clients.stock import grpc_inputs
from tests.support.models.zoo import write_python_model
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

IN_FLIGHT = 100
TWO = "instance_group [{ count: 2 kind: KIND_CPU }]"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("series")
    words = {"WHAT": ("BYTES", [1])}, {"SAID": ("BYTES", [1])}
    for name in ("words", "hurt"):
        write_python_model(folder / "models", name, "faulty", *words)
    numbers = {"IN": ("INT64", [1])}, {"OUT": ("INT64", [1])}
    write_python_model(folder / "models", "asking", "self_asking", *numbers, 0, TWO)
    with Server(folder, folder / "models", "--log-verbose=1") as started:
        yield started
        assert started.in_flight() == 0


def answers(
    server: Server,
    model: str,
    asked: Sequence[dict[str, np.ndarray]],
    meanwhile: Callable[[], None] = lambda: None,
    after: int = IN_FLIGHT,
) -> list[Any]:
    """What came of each, an output's value or an error's text, with `IN_FLIGHT` of them in flight.

    The first of them wait together in the scheduler, for the worker is held until they are there. `meanwhile` is called
    when so many were sent.
    """
    came: dict[int, Any] = {}
    free = threading.Semaphore(IN_FLIGHT)
    done = threading.Event()
    worker = psutil.Process(server.pids()["worker"])

    def answered(number: int, result: Any, error: Any) -> None:
        came[number] = error.message() if error is not None else result.as_numpy(result.get_response().outputs[0].name)
        free.release()
        if len(came) == len(asked):
            done.set()

    with server.grpc() as client:
        worker.suspend()
        try:
            for number, arrays in enumerate(asked):
                if number == IN_FLIGHT:
                    worker.resume()
                assert free.acquire(timeout=30)
                client.async_infer(model, grpc_inputs(arrays), partial(answered, number), client_timeout=30)
                if number == after:
                    meanwhile()
        finally:
            if worker.is_running():
                worker.resume()
        assert done.wait(30)
    return [said if isinstance(said, str) else said.item() for _, said in sorted(came.items())]


def words(*said: bytes) -> list[dict[str, np.ndarray]]:
    return [{"WHAT": np.array([word], np.object_)} for word in said]


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def test_each_is_answered_and_counted_as_an_execution_of_its_own(server: Server):
    asked = numbered(500)
    sent = 3 * len(asked)
    for _ in range(3):
        assert answers(server, "words", words(*asked)) == asked
    assert list(server.batches("words").values()) == [1] * sent
    with server.http() as client:
        (counted,) = client.get_inference_statistics("words")["model_stats"]
    assert (counted["inference_count"], counted["execution_count"]) == (sent, sent)
    assert counted["inference_stats"]["success"]["count"] == sent
    assert counted["inference_stats"]["queue"]["count"] == sent
    assert [(row["batch_size"], row["compute_infer"]["count"]) for row in counted["batch_stats"]] == [(1, sent)]


def test_one_that_fails_or_kills_takes_nobody_along(server: Server):
    assert answers(server, "hurt", words(*numbered(10))) == numbered(10)  # from now on it is known to be quick
    asked = numbered(IN_FLIGHT)
    asked[20], asked[25], asked[40] = b"raise", b"error", b"kill"
    said = answers(server, "hurt", words(*asked))
    assert "asked to raise" in said[20]
    assert said[25] == "as you asked"
    assert "died 4 times while running this request" in said[40]
    assert [one for one in said if isinstance(one, bytes)] == [one for one in asked if one.isdigit()]


def test_a_killed_process_costs_no_request(server: Server):
    asked = numbered(300)

    def kill_children() -> None:
        for pid in server.python_children():
            psutil.Process(pid).kill()

    assert answers(server, "hurt", words(*asked), kill_children) == asked
    wait_until(lambda: server.in_flight() == 0)


def test_a_model_may_ask_itself_while_others_wait_for_it(server: Server):
    server.wait_ready("asking")

    def said(numbers: Sequence[int]) -> list[Any]:
        return answers(server, "asking", [{"IN": np.array([number], np.int64)} for number in numbers])

    assert said(range(10)) == list(range(1, 11))
    for at in (5, 30, 60, 99):
        # It has two instances: one that asks, and one that answers.
        asked = [-number if number == at else number for number in range(IN_FLIGHT)]
        assert said(asked) == [abs(number) + 1 for number in asked]


@pytest.mark.slow
def test_a_killed_worker_costs_no_request(server: Server):
    asked = numbered(300)
    assert answers(server, "hurt", words(*asked), lambda: server.kill("worker") and None) == asked
    wait_until(lambda: server.in_flight() == 0)
