"""Quick models whose requests run alone, under load: they come in series, and nobody can tell but by the speed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest
from asking import grpc_inputs
from model_zoo import write_python_model
from serving import Server, wait_until

from scheduler.replay import Replay, read_log

IN_FLIGHT = 64
TWO = "instance_group [{ count: 2 kind: KIND_CPU }]"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("series")
    words = {"WHAT": ("BYTES", [1])}, {"SAID": ("BYTES", [1])}
    for name in ("words", "hurt"):
        write_python_model(folder / "models", name, "faulty", *words)
    numbers = {"IN": ("INT64", [1])}, {"OUT": ("INT64", [1])}
    write_python_model(folder / "models", "asking", "self_asking", *numbers, 0, TWO)
    (folder / "events").mkdir()
    started = Server(folder, folder / "models", f"--event-log={folder / 'events'}")
    try:
        yield started
        assert started.in_flight() == 0
        assert started.stop() == 0
    finally:
        started.close()


def batches_of(server: Server, model: str) -> Counter[int]:
    """How many batches of which number of requests the scheduler has sent to a model, as far as that is written yet."""
    sizes: Counter[int] = Counter()
    for path in sorted((server.folder / "events").glob("**/*.events")):
        header, events = read_log(path)
        replay = Replay(header)
        if header.model != model:
            continue
        for event in events:
            actions, difference = replay.feed(event)
            assert not difference
            if event.method == "dispatch":
                sizes.update(len(batch.requests) for batch in actions[0])
    return sizes


def answers(
    server: Server, model: str, asked: Sequence[dict[str, np.ndarray]], meanwhile: Callable[[], None] = lambda: None
) -> list[Any]:
    """What came of each, an output's value or an error's text, with `IN_FLIGHT` of them in flight."""
    came: dict[int, Any] = {}
    free = threading.Semaphore(IN_FLIGHT)
    done = threading.Event()

    def answered(number: int, result: Any, error: Any) -> None:
        came[number] = error.message() if error is not None else result.as_numpy(result.get_response().outputs[0].name)
        free.release()
        if len(came) == len(asked):
            done.set()

    with server.grpc() as client:
        for number, arrays in enumerate(asked):
            assert free.acquire(timeout=30)
            client.async_infer(model, grpc_inputs(arrays), partial(answered, number), client_timeout=30)
            if number == len(asked) // 2:
                meanwhile()
        assert done.wait(30)
    return [said if isinstance(said, str) else said.item() for _, said in sorted(came.items())]


def words(*said: bytes) -> list[dict[str, np.ndarray]]:
    return [{"WHAT": np.array([word], np.object_)} for word in said]


def test_each_is_answered_and_counted_as_an_execution_of_its_own(server: Server):
    asked = [b"%d" % number for number in range(1500)]
    assert answers(server, "words", words(*asked)) == asked
    with server.http() as client:
        (counted,) = client.get_inference_statistics("words")["model_stats"]
    assert (counted["inference_count"], counted["execution_count"]) == (1500, 1500)
    assert counted["inference_stats"]["success"]["count"] == 1500
    assert counted["inference_stats"]["queue"]["count"] == 1500
    assert [(row["batch_size"], row["compute_infer"]["count"]) for row in counted["batch_stats"]] == [(1, 1500)]
    assert max(batches_of(server, "words")) > 1, "none came with another"


def test_one_that_fails_or_kills_takes_nobody_along(server: Server):
    asked = [b"%d" % number for number in range(600)]
    asked[200], asked[250], asked[400] = b"raise", b"error", b"kill"
    said = answers(server, "hurt", words(*asked))
    assert "asked to raise" in said[200]
    assert said[250] == "as you asked"
    assert "died 4 times while running this request" in said[400]
    assert [one for one in said if isinstance(one, bytes)] == [one for one in asked if one.isdigit()]


def test_a_killed_process_costs_no_request(server: Server):
    asked = [b"%d" % number for number in range(800)]

    def kill_children() -> None:
        for pid in server.python_children():
            psutil.Process(pid).kill()

    assert answers(server, "hurt", words(*asked), kill_children) == asked
    wait_until(lambda: server.in_flight() == 0)


def test_a_model_may_ask_itself_while_others_come_in_series(server: Server):
    server.wait_ready("asking")
    asked = list(range(1, 1201))
    stop = threading.Event()
    from_itself: list[Any] = []

    def ask_itself() -> None:
        with server.grpc() as client:
            while not stop.is_set():
                number = -len(from_itself) - 1
                result = client.infer("asking", grpc_inputs({"IN": np.array([number], np.int64)}), client_timeout=30)
                from_itself.append((number, result.as_numpy("OUT").item()))

    thread = threading.Thread(target=ask_itself)
    thread.start()
    try:
        said = answers(server, "asking", [{"IN": np.array([number], np.int64)} for number in asked])
    finally:
        stop.set()
        thread.join()
    assert said == [number + 1 for number in asked]
    assert len(from_itself) > 1
    assert all(answer == 1 - number for number, answer in from_itself)


@pytest.mark.slow
def test_a_killed_worker_costs_no_request(server: Server):
    asked = [b"%d" % number for number in range(800)]
    assert answers(server, "hurt", words(*asked), lambda: server.kill("worker") and None) == asked
    wait_until(lambda: server.in_flight() == 0)
