"""A request that fails, or kills its model, does not affect other requests of its batch."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from tests.support.clients.stock import grpc_inputs
from tests.support.models.zoo import config_text, write_graph, write_model, write_python_model
from tests.support.servers.weir_server import Server

MATES = 8
# A batch leaves when it is full.
TOGETHER = "dynamic_batching { max_queue_delay_microseconds: 10000000 }"
DECOUPLED = "model_transaction_policy { decoupled: true }"

Said = list[Any]
"""What came of each request: an output's value, or the text of an error."""


def write_models(root: Path) -> None:
    words = {"WHAT": ("BYTES", [1])}, {"SAID": ("BYTES", [1])}
    write_python_model(root, "mates", "faulty", *words, MATES, TOGETHER)
    write_python_model(root, "broken", "faulty", *words, MATES, TOGETHER)
    write_python_model(
        root,
        "streams",
        "streamer",
        {"PLAN": ("BYTES", [1])},
        {"NUMBER": ("INT32", [1]), "CONTENT": ("UINT8", [-1])},
        MATES,
        f"{TOGETHER} {DECOUPLED}",
    )
    tensors = {"X": ("FP32", [4]), "WIDTH": ("INT64", [1])}, {"Y": ("FP32", [4])}
    write_model(root, "reshaped", config_text("reshaped", "onnxruntime", *tensors, MATES, TOGETHER))
    # Rows as wide as the widest request says, and back: what that can't be divided into fails the whole run.
    write_graph(
        root / "reshaped" / "1" / "model.onnx",
        [
            helper.make_node("Constant", [], ["ONE"], value_ints=[1]),
            helper.make_node("Constant", [], ["ANY"], value_ints=[-1]),
            helper.make_node("ReduceMax", ["WIDTH"], ["MOST"], keepdims=0),
            helper.make_node("Reshape", ["MOST", "ONE"], ["WIDE"]),
            helper.make_node("Concat", ["ANY", "WIDE"], ["SHAPE"], axis=0),
            helper.make_node("Reshape", ["X", "SHAPE"], ["ROWS"]),
            helper.make_node("Shape", ["X"], ["BEFORE"]),
            helper.make_node("Reshape", ["ROWS", "BEFORE"], ["Y"]),
        ],
        {"X": ("FP32", [-1, 4]), "WIDTH": ("INT64", [-1, 1])},
        {"Y": ("FP32", [-1, 4])},
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("mates")
    write_models(folder / "models")
    with Server(folder, folder / "models") as started:
        yield started
        assert started.in_flight() == 0


def together(server: Server, model: str, output: str, requests: Sequence[dict[str, np.ndarray]]) -> Said:
    """What comes of these requests, which are one batch."""
    outcomes: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    with server.grpc() as client:
        for number, arrays in enumerate(requests):

            def on_response(result: Any, error: Any, number: int = number) -> None:
                outcomes.put((number, error.message() if error else result.as_numpy(output)))

            client.async_infer(model, grpc_inputs(arrays), on_response)
        said = dict(outcomes.get(timeout=20) for _ in requests)
    return [said[number] for number in range(len(requests))]


def words_of(server: Server, model: str, words: Sequence[bytes]) -> Said:
    said = together(server, model, "SAID", [{"WHAT": np.array([[word]], np.object_)} for word in words])
    return [answer if isinstance(answer, str) else answer[0, 0] for answer in said]


def counted(server: Server, model: str) -> dict[str, Any]:
    """(requests that succeeded and failed, runs, and those by the size of their batch) of a model so far."""
    with server.http() as client:
        (row,) = client.get_inference_statistics(model)["model_stats"]
    return {
        "success": row["inference_stats"]["success"]["count"],
        "fail": row["inference_stats"]["fail"]["count"],
        "executions": row["execution_count"],
        "inferences": row["inference_count"],
        "batches": {batch["batch_size"]: batch["compute_infer"]["count"] for batch in row["batch_stats"]},
    }


def test_only_the_request_that_raises_fails(server: Server) -> None:
    # Answers that lie in shared memory, to be kept from those that come after them.
    words = [bytes([97 + number]) * 200_000 for number in range(MATES)]
    words[3], words[5] = b"raise", b"error"
    said = words_of(server, "mates", words)
    assert [said[at] == words[at] for at in range(MATES)] == [at not in (3, 5) for at in range(MATES)]
    assert said[3].startswith(
        "Failed to process the request(s) for model 'mates_0', message: ValueError: asked to raise"
    )
    assert said[5] == "as you asked"
    assert counted(server, "mates") == {
        "success": 7,
        "fail": 1,
        "executions": 9,
        "inferences": 7,
        "batches": {1: 8, 8: 1},
    }


def test_only_the_request_that_kills_fails(server: Server) -> None:
    words = [f"word {number}".encode() for number in range(MATES)]
    words[6] = b"exit"
    said = words_of(server, "mates", words)
    assert said[6] == "the model's worker or process died 4 times while running this request"
    assert [answer for at, answer in enumerate(said) if at != 6] == [word for word in words if word != b"exit"]


def test_a_broken_model_is_not_asked_nine_times_as_often_for_ever(server: Server) -> None:
    for _ in range(8):
        said = words_of(server, "broken", [b"raise"] * MATES)
        assert all("asked to raise" in answer for answer in said)
    reply = counted(server, "broken")
    assert (reply["fail"], reply["success"]) == (64, 0)
    assert reply["executions"] == 3 * 9 + 5 * 3
    assert words_of(server, "broken", [b"fine"] * MATES) == [b"fine"] * MATES
    assert words_of(server, "broken", [b"fine"] * 7 + [b"raise"])[:7] == [b"fine"] * 7


def test_only_the_request_that_does_not_fit_the_graph_fails(server: Server) -> None:
    rows = [np.full((1, 4), number, np.float32) for number in range(MATES)]
    requests = [{"X": row, "WIDTH": np.array([[3 if at == 2 else 2]])} for at, row in enumerate(rows)]
    said = together(server, "reshaped", "Y", requests)
    assert isinstance(said[2], str)
    assert "Reshape" in said[2]
    for at in set(range(MATES)) - {2}:
        np.testing.assert_array_equal(said[at], rows[at])


def test_no_response_of_a_stream_is_sent_twice(server: Server) -> None:
    # The first two have been heard of when the third raises; the others have not.
    plans = [{"responses": 2}, {"responses": 2}, {"responses": 2, "raise_at": 1}, {"responses": 2, "raise_at": 0}]
    plans += [{"responses": 3}] * (MATES - len(plans))
    received: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def on_response(result: Any, error: Any) -> None:
        if error is not None:
            received.put(("", error.message()))
            return
        response = result.get_response()
        number = None if not response.outputs else int(result.as_numpy("NUMBER")[0, 0])
        received.put((response.id, number))

    numbers: dict[str, list[int]] = {str(at): [] for at in range(MATES)}
    errors = []
    with server.grpc() as client:
        client.start_stream(on_response)
        for at, plan in enumerate(plans):
            inputs = grpc_inputs({"PLAN": np.array([[json.dumps(plan)]], np.object_)})
            client.async_stream_infer("streams", inputs, request_id=str(at))
        for _ in range(2 + 2 + 1 + 3 * 4 + 2):
            name, what = received.get(timeout=20)
            if name:
                numbers[name].append(what)
            else:
                errors.append(what)
        client.stop_stream()
    assert numbers == {"0": [0, 1], "1": [0, 1], "2": [0], "3": [], **{str(at): [0, 1, 2] for at in range(4, MATES)}}
    assert len(errors) == 2
    assert all("asked to raise" in error for error in errors)
